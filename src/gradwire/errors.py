"""Every error of Gradwire. The type says who is at fault; the data is in attributes.

GradwireError                 (a RuntimeError, so that code written for torch RPC catches it)
├── ClosedError               you: the worker was shut down, or never started
├── NotAllowedError           you: the other worker does not allow this call or argument
├── WorkerLostError           the world: a worker died, left, or cannot be reached
├── CallTimeout               the world: no response in time (also a TimeoutError)
├── BackwardTimeout           the world: a pass did not finish in time (also a TimeoutError)
├── StaleReferenceError       the world: the value of a reference was freed with its holder
├── OwnersError               several of these at once, from several workers
├── ProtocolError             the other side: malformed bytes
│   └── AuthenticationError   the other side: it does not know the world's key
└── RemoteError               your function on the other worker (the cause of what you catch)
"""

from __future__ import annotations

from typing import Any


class GradwireError(RuntimeError):
    """The root of all errors raised by Gradwire itself."""

    _advice = "see GradwireError in docs/errors.md"
    """What to do. It becomes a note, which Python 3.11 prints last."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.__notes__ = [self._advice]


class LostGradientWarning(UserWarning):
    """A tensor that requires grad was sent to another worker without an active context."""


class ClosedError(GradwireError):
    """The worker is shut down, or was never started."""

    _advice = "call init_rpc first, and nothing after shutdown: see ClosedError in docs/errors.md"


class NotAllowedError(GradwireError):
    """The receiving worker runs with an allow-list that does not include this."""

    _advice = "add it to the allow=[...] of that worker: see NotAllowedError in docs/errors.md"


class WorkerLostError(GradwireError):
    """A worker died, left or cannot be reached."""

    _advice = (
        "read that worker's last output, and let all workers reach gw.shutdown(): see "
        "WorkerLostError in docs/errors.md"
    )

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"lost worker {worker!r}: {reason}")
        self.worker = worker
        self.reason = reason

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[str, str]]:
        return type(self), (self.worker, self.reason)


class CallTimeout(GradwireError, TimeoutError):
    """No response in time. The function may still be running."""

    _advice = "to find out what it waits for, see CallTimeout in docs/errors.md"

    def __init__(
        self, call: str, worker: str, seconds: float, reason: str = ""
    ) -> None:
        why = f": {reason}" if reason else ""
        super().__init__(
            f"call of {call} on worker {worker!r} timed out after {seconds:g} s{why}; "
            "raise it with timeout=..., or disable it with timeout=0"
        )
        self.call = call
        self.worker = worker
        self.seconds = seconds
        self.reason = reason

    def __reduce__(self) -> tuple[type[CallTimeout], tuple[str, str, float, str]]:
        return type(self), (self.call, self.worker, self.seconds, self.reason)


class BackwardTimeout(GradwireError, TimeoutError):
    """A backward pass did not finish in time, and was aborted on all workers."""

    _advice = (
        "to find out which worker it waits for, see BackwardTimeout in docs/errors.md"
    )

    def __init__(self, context_id: int, seconds: float) -> None:
        super().__init__(
            f"the backward pass of context {context_id} did not finish within {seconds:g} s: "
            "one of its workers is slow or stuck; raise it with timeout=..., or disable it "
            "with timeout=0"
        )
        self.context_id = context_id
        self.seconds = seconds

    def __reduce__(self) -> tuple[type[BackwardTimeout], tuple[int, float]]:
        return type(self), (self.context_id, self.seconds)


class StaleReferenceError(GradwireError):
    """The value of a reference was freed: its sender died, or released it too early."""

    _advice = (
        "keep a reference until the worker it was passed to has used it: see StaleReferenceError "
        "in docs/errors.md"
    )


class OwnersError(GradwireError):
    """The failures of one operation on several workers, by worker name.

    `errors` has the exceptions, `traces` their tracebacks, as text.
    """

    _advice = "`errors` has each of them: see OwnersError in docs/errors.md"

    def __init__(
        self, errors: dict[str, Exception], traces: dict[str, str] | None = None
    ) -> None:
        lines = [f"{name}: {type(e).__name__}: {e}" for name, e in errors.items()]
        names: dict[str, list[str]] = {}  # by trace: often all have the same
        for name, trace in (traces or {}).items():
            names.setdefault(trace, []).append(name)
        parts = [f"\non {', '.join(on)}: {trace}" for trace, on in names.items()]
        super().__init__("\n".join([f"on {len(errors)} workers:", *lines, *parts]))
        self.errors = errors
        self.traces = traces or {}

    def __reduce__(self) -> tuple[type[OwnersError], tuple[Any, Any]]:
        return type(self), (self.errors, self.traces)


class ProtocolError(GradwireError):
    """The other side violated Gradwire's protocol."""

    _advice = "run the same version of Gradwire on all workers: see ProtocolError in docs/errors.md"


class AuthenticationError(ProtocolError):
    """The other side could not prove that it knows the world's key."""

    _advice = (
        "give all workers the same GRADWIRE_KEY or GRADWIRE_KEY_FILE: see "
        "AuthenticationError in docs/errors.md"
    )


class RemoteError(GradwireError):
    """What a function raised on another worker, as text.

    It is the `__cause__` of the exception that you catch, which has the original type. Where that
    type cannot be recreated here, this is raised instead.
    """

    _advice = "the traceback is that worker's: see RemoteError in docs/errors.md"

    def __init__(self, worker: str, type_name: str, message: str, trace: str) -> None:
        super().__init__(f"on worker {worker!r}: {type_name}: {message}\n\n{trace}")
        self.worker = worker
        self.type_name = type_name
        self.message = message
        self.trace = trace

    def __reduce__(self) -> tuple[type[RemoteError], tuple[str, str, str, str]]:
        return type(self), (self.worker, self.type_name, self.message, self.trace)
