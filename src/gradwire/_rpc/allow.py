"""The allow-list: which functions others may call here."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from .._wire.functions import Names
from ..errors import NotAllowedError


class AllowList:
    """Names of functions, and of modules whose public functions are all allowed.

    A function defined in an allowed module is allowed; one that the module merely imported is not.
    """

    def __init__(self, entries: Iterable[Any]) -> None:
        self._functions: set[str] = set()
        self._modules: set[str] = set()
        names = Names()
        for entry in entries:
            if isinstance(entry, ModuleType):
                self._modules.add(entry.__name__)
                continue
            name = entry if isinstance(entry, str) else names.name_of(entry, True)
            if name is None or ":" not in name:
                raise ValueError(
                    f"allow: {entry!r} is neither a module, an importable function, "
                    "nor a name of the form 'module:function'"
                )
            self._functions.add(name)

    def check(self, name: Any) -> None:
        """Let it pass.

        Raises:
            NotAllowedError: it is not on the list.
        """
        if isinstance(name, str):
            if name in self._functions:
                return
            module, _, function = name.partition(":")
            parts = function.split(".")
            if module in self._modules and not any(p.startswith("_") for p in parts):
                return
        raise NotAllowedError(f"{name!r} is not on this worker's allow-list")

    def check_resolved(self, name: str, function: Any) -> None:
        """A module's names include what it imported: those were not meant.

        Raises:
            NotAllowedError: the function comes from elsewhere.
        """
        if name in self._functions:
            return
        if getattr(function, "__module__", None) != name.partition(":")[0]:
            raise NotAllowedError(f"{name!r} is only imported there, not defined")
