"""The allow-list: which functions others may call here, in general or depending on the caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

from .._wire.functions import Names
from ..errors import NotAllowedError


class _Rule:
    """What callers whose name matches a pattern may call.

    Names of functions, and of modules all of whose public functions are allowed. A function defined
    in an allowed module is allowed; one that the module merely imports is not.
    """

    def __init__(self, pattern: str, entries: Iterable[Any]) -> None:
        self.pattern = pattern
        self.functions: set[str] = set()
        self.modules: set[str] = set()
        names = Names()
        for entry in entries:
            if isinstance(entry, ModuleType):
                self.modules.add(entry.__name__)
                continue
            name = entry if isinstance(entry, str) else names.name_of(entry, True)
            if name is None or ":" not in name:
                raise ValueError(
                    f"allow: {entry!r} is neither a module, an importable function, "
                    "nor a name of the form 'module:function'"
                )
            self.functions.add(name)

    def __contains__(self, name: Any) -> bool:
        if not isinstance(name, str):
            return False
        if name in self.functions:
            return True
        module, _, function = name.partition(":")
        parts = function.split(".")
        return module in self.modules and not any(p.startswith("_") for p in parts)


class AllowList:
    """Rules by the caller's name, of which the first match decides; or one rule for all."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._is_by_caller = isinstance(entries, Mapping)
        rules = entries if isinstance(entries, Mapping) else {"*": entries}
        self._rules = [_Rule(pattern, rules[pattern]) for pattern in rules]

    def check(self, name: Any, caller: str) -> None:
        """Check that a function may be called.

        Raises:
            NotAllowedError: it is not on the list for this caller.
        """
        rule = self._rule(caller)
        if rule is None or name not in rule:
            raise self._not_listed(name, rule, caller)

    def check_resolved(self, name: str, function: Any, caller: str) -> None:
        """Reject what an allowed module merely imports.

        Raises:
            NotAllowedError: the function is defined elsewhere.
        """
        rule = self._rule(caller)
        if rule is not None and name in rule.functions:
            return
        if getattr(function, "__module__", None) != name.partition(":")[0]:
            why = ": it is only imported there, not defined"
            raise self._not_listed(name, rule, caller, why)

    def _not_listed(
        self, name: Any, rule: _Rule | None, caller: str, why: str = ""
    ) -> NotAllowedError:
        which = ""
        if rule is None:
            why = f": it has no rule for {caller!r}"
        elif self._is_by_caller:
            which = f" for {rule.pattern!r}, which {caller!r} is"
        return NotAllowedError(
            f"{name!r} is not on this worker's allow-list{which}{why}"
        )

    def _rule(self, caller: str) -> _Rule | None:
        matching = (r for r in self._rules if fnmatchcase(caller, r.pattern))
        return next(matching, None)
