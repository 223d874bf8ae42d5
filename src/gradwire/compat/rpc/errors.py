"""Errors with the messages that torch's RPC has for them, which programs look for."""

from __future__ import annotations

from ...errors import CallTimeout, GradwireError


class RpcTimeout(CallTimeout):
    """No response in time."""

    def __str__(self) -> str:
        return (
            f"RPCErr:1:RPC ran for more than set timeout ({self.seconds * 1000:.0f} ms) "
            f"and will now be marked with an error: {super().__str__()}"
        )


class RRefCreationError(GradwireError):
    """The call that was to make the value of a reference failed."""


def explain_creation(error: Exception) -> Exception:
    """What uses of a reference raise if the call that was to make its value failed."""
    if not isinstance(error, GradwireError) or isinstance(error, RRefCreationError):
        return error
    return RRefCreationError(
        "RRef creation via rpc.remote() timed out or failed, and it is possible that the "
        f"RRef on the owner node does not exist: {error}"
    )
