"""The bodies that Gradwire does not pass, and why. docs/compat.md tells the same by reason."""

from __future__ import annotations

REASONS = {
    "hang": "asserts that backward hangs; ours returns the exact gradients",
}

_TESTS = {
    "hang": {"TensorPipeDistAutogradTest": "backward_unused_send_function"},
}

MISSES: dict[str, str] = {
    f"{suite}.test_{test}": REASONS[reason]
    for reason, tests in _TESTS.items()
    for suite, names in tests.items()
    for test in names.split()
}
