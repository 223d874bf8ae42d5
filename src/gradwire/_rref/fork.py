"""A hold on a value of another worker. It ends when the last handle that shares it goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._rpc.futures import CallFuture
from ..ids import WorkerInfo
from .ledger import Holding


class Creation(CallFuture):
    """The answer to the call that makes a value; tells if there will be none."""

    def __init__(
        self,
        failed: Callable[[Exception], None],
        explain: Callable[[Exception], Exception],
        *args: Any,
    ) -> None:
        super().__init__(*args)
        self._failed = failed
        self._explain = explain

    def set_exception(self, result: Exception) -> None:
        super().set_exception(self._explain(result))
        self._failed(result)


class Fork:
    """This worker's hold on a value of another."""

    __slots__ = ("_let_go", "creation", "holding", "owner")

    def __init__(
        self,
        holding: Holding,
        owner: WorkerInfo,
        let_go: Callable[[tuple[int, int]], None],
    ) -> None:
        self.holding = holding
        self.owner = owner
        self.creation: CallFuture | None = None
        """The call that makes the value, until it is known to have been made."""
        self._let_go = let_go

    def __del__(self) -> None:
        # From any thread, in the middle of anything: this must take no lock.
        self._let_go((self.holding.owner, self.holding.fork))

    @property
    def id(self) -> int:
        return self.holding.value

    @property
    def is_confirmed(self) -> bool:
        """Whether the owner has the value.

        Raises:
            Exception: why it will not have it.
        """
        creation = self.creation  # another thread may be here too
        if creation is not None:
            if not creation.done():
                return False
            creation.value()
            self.creation = None
        return True

    @property
    def state(self) -> str:
        try:
            return "confirmed" if self.is_confirmed else "pending"
        except Exception as error:  # noqa: BLE001 whatever the creating call met with
            return f"failed: {type(error).__name__}"
