"""What the parts of one worker share; `service.py` is it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .._rpc.futures import CallFuture
from ..threads import Executor
from .contexts import Contexts, Numbers


class Desk(Protocol):
    """What a part needs of its worker."""

    me: int
    executor: Executor
    numbers: Numbers
    contexts: Contexts
    pickles: bool

    def request(self, to: int, message: Any) -> CallFuture:
        """Send a message, with no limit to how long its answer may take."""

    def tell(self, to: int, message: Any) -> None:
        """Send a message whose answer nobody needs."""

    def ask(
        self,
        to: int,
        message: Any,
        is_over: Callable[[], bool],
        meanwhile: Callable[[], None] | None = None,
    ) -> Any:
        """Send a message and wait for its answer, or until it is not wanted any more.

        `meanwhile`: what may be done while others work; it may be left out.
        """
