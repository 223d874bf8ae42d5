"""PyTorch's test suites for RPC and distributed autograd, as its wheel brings them along.

The bodies are in `torch.testing._internal.distributed`; PyTorch's own test files only combine them
with an agent, as is done here. Import this after `install()`: they bind names of torch at import.
"""

from __future__ import annotations

import fnmatch
import importlib
from typing import Any

from torch.testing._internal.distributed import rpc_utils

_FIXTURES = "torch.testing._internal.distributed.rpc"
_AGENTS = {
    "TensorPipe": (
        f"{_FIXTURES}.tensorpipe_rpc_agent_test_fixture",
        "TensorPipeRpcAgentTestFixture",
        [*rpc_utils.GENERIC_TESTS, *rpc_utils.TENSORPIPE_TESTS],
    ),
    # Importing its fixture adds a backend, so this is done for its own suites only.
    "Faulty": (
        f"{_FIXTURES}.faulty_rpc_agent_test_fixture",
        "FaultyRpcAgentTestFixture",
        rpc_utils.FAULTY_AGENT_TESTS,
    ),
}


def names() -> dict[str, list[str]]:
    """By suite, the tests in it that need no GPU."""
    return {
        agent + suite.__name__: sorted(n for n in dir(suite) if n.startswith("test_"))
        for agent, (_, _, suites) in _AGENTS.items()
        for suite in suites
    }


def load(suite: str) -> Any:
    """A suite, with its agent."""
    agent = next(agent for agent in _AGENTS if suite.startswith(agent))
    module, fixture, suites = _AGENTS[agent]
    mixin = getattr(importlib.import_module(module), fixture)
    return rpc_utils.generate_tests(agent, mixin, suites, __name__)[suite]


def select(patterns: list[str]) -> list[tuple[str, str]]:
    """The tests whose `Suite.test` fits one of the patterns; all without any."""
    return [
        (suite, test)
        for suite, tests in names().items()
        for test in tests
        if not patterns
        or any(fnmatch.fnmatch(f"{suite}.{test}", pattern) for pattern in patterns)
    ]
