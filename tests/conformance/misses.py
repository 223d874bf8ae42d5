"""The bodies that Gradwire does not pass, and why. docs/compat.md tells the same by reason."""

from __future__ import annotations

REASONS = {
    "interpreter": "makes calls inside TorchScript, whose interpreter knows torch's C++ RPC only",
    "rref": "hands an RRef to TorchScript, which takes those of torch's C++ RPC only",
    "module": "scripts a RemoteModule, so that TorchScript makes the calls",
    "autograd": "scripts backward or get_gradients of torch's C++ autograd",
    "script module": "asserts that an RRef to a ScriptModule cannot be fetched; ours can",
    "arguments": "wants wrong arguments of a scripted function refused before the call",
    "strides": "wants memory between a view's elements sent along; ours arrives contiguous",
    "hang": "asserts that backward hangs; ours returns the exact gradients",
}

_TESTS = {
    "interpreter": {
        "FaultyJitFaultyAgentRpcTest": """
            timeout_in_python
            timeout_in_torchscript_function
        """,
        "TensorPipeJitDistAutogradTest": """
            jit_fork_within_context
            restore_context_after_swtich_to_jit_thread
        """,
        "TensorPipeJitRpcTest": """
            all_kwargs_are_populated_by_defaults
            args_and_kwargs_contain_different_types
            args_kwargs_are_neither_passed
            async_function_remote
            async_function_remote_multi
            async_function_simple
            async_function_wrong_return_type
            async_function_wrong_return_type_remote
            call_python_function_remotely_from_script_not_supported
            call_rpc_with_profiling
            call_script_function_that_not_exists_remotely_from_script
            call_script_function_that_raises_remotely_from_script
            future_passed_between_python_and_jit
            kwargs_not_passed
            no_kwargs_are_populated_by_defaults
            record_function_on_caller_rpc_async
            rpc_async_jit_profiled
            rpc_torchscript_record_function
            some_kwargs_are_populated_by_defaults
        """,
    },
    "rref": {
        "FaultyJitFaultyAgentRpcTest": """
            remote_timeout_to_here_in_jit
            rref_timeout_pickle_in_jit
            rref_to_here_timeout_in_jit
        """,
        "TensorPipeJitRpcTest": """
            load_script_module_with_pickled_rref
            local_rref_local_value
            my_script_module_with_rrefs
            return_local_script_class_rref_in_py_and_use_in_script
            return_local_script_module_rref_in_py_and_use_in_script
            rref_is_owner
            rref_jit_pickle_not_supported
            rref_local_value
            rref_python_annotation
        """,
    },
    "module": {
        "TensorPipeRemoteModuleTest": """
            forward_async
            forward_async_script
            forward_sync
            forward_sync_script
            remote_module_py_pickle_not_supported_script
        """,
        "TensorPipeThreeWorkersRemoteModuleTest": """
            send_remote_module_over_the_wire_script_not_supported
        """,
    },
    "autograd": {
        "TensorPipeJitDistAutogradTest": """
            dist_backward
            get_gradients
        """,
    },
    "script module": {"TensorPipeJitRpcTest": "remote_script_module"},
    "arguments": {"TensorPipeJitRpcTest": "torchscript_function_exception"},
    "strides": {"TensorPipeRpcTest": "non_cont_tensors"},
    "hang": {"TensorPipeDistAutogradTest": "backward_unused_send_function"},
}

MISSES: dict[str, str] = {
    f"{suite}.test_{test}": REASONS[reason]
    for reason, tests in _TESTS.items()
    for suite, names in tests.items()
    for test in names.split()
}
