"""The bodies that Gradwire does not pass, and why. docs/compat.md has the same list."""

_INTERPRETER = "runs RPC inside the TorchScript interpreter, which is C++"
_RREF = "hands an RRef to TorchScript, which takes torch's C++ ones only"

MISSES: dict[str, str] = {
    "TensorPipeDistAutogradTest.test_backward_unused_send_function": (
        "asserts that backward hangs; ours returns the exact gradients"
    ),
}
