"""Hooks that users put on leaves, on the nodes behind them, and on sends and recvs.

torch calls them where it runs a node. A pass does not run the nodes behind leaves, so their hooks
are called by `gradients.py`; and it cuts sends and recvs short, unless they have hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Hooks = list[Callable[..., Any]]

on_crossings: list[bool] = []
"""Not empty: some send or recv got hooks, ever."""


def before(node: Any) -> Hooks:
    """Those that are called before a node is run."""
    return _known_to(node.register_prehook)


def after(node: Any) -> Hooks:
    """Those that are called when a node was run."""
    return _known_to(node.register_hook)


def has_any(node: Any) -> bool:
    """Whether a leaf, of which this is the node, has hooks: they want its whole gradient."""
    leaf = node.variable
    return bool(
        leaf._backward_hooks
        or getattr(leaf, "_post_accumulate_grad_hooks", None)
        or before(node)
        or after(node)
    )


def _known_to(register: Callable[..., Any]) -> Hooks:
    """There is no list of the hooks of a node, but a new one gets to know the others."""
    handle = register(_nothing)
    hooks = handle.hooks_dict_ref()
    del hooks[handle.id]
    return list(hooks.values()) if hooks else []


def _nothing(*_: object) -> None:
    pass


def note(kind: Any) -> None:
    """Have the crossings of a kind of node know that one was put on theirs."""
    for name in ("register_hook", "register_prehook"):
        setattr(kind, name, _noting(getattr(kind, name)))


def _noting(register: Callable[..., Any]) -> Callable[..., Any]:
    def noting(node: Any, hook: Callable[..., Any]) -> Any:
        node.crossing.is_hooked = True
        on_crossings[:] = [True]
        return register(node, hook)

    return noting
