"""Hooks that users put on leaves, on the nodes behind them, and on sends and recvs.

torch calls them where it runs a node. A pass does not run the nodes behind leaves, so their hooks
are called by `gradients.py`; and it cuts sends and recvs short, unless they have hooks.

Few programs put hooks on nodes at all, and to ask a node for its hooks takes long. So it is noted
if any node gets one, ever: torch calls `Function._register_hook` for each, which is replaced here
by one that takes note. It is not documented. If torch no longer calls it, or if there were hooks
before this file was loaded, all nodes count as having some (`_note_all`), and each is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

Hooks = Sequence[Callable[..., Any]]
Gradients = tuple[torch.Tensor | None, ...]

on_crossings: list[bool] = []
"""Not empty: some send or recv got hooks, ever."""

on_nodes: list[bool] = []
"""Not empty: some node may have got hooks, ever."""


def before(node: Any) -> Hooks:
    """Those that are called before a node is run."""
    return _known_to(node.register_prehook) if on_nodes else ()


def after(node: Any) -> Hooks:
    """Those that are called when a node was run."""
    return _known_to(node.register_hook) if on_nodes else ()


def called(node: Any, gradients: Gradients, given: Any) -> Gradients:
    """What the hooks of a node, which is not run itself, make of the gradients it yields."""
    for hook in before(node):
        hook((given,))
    for hook in after(node):
        changed = hook(gradients, (given,))
        if changed is not None:
            gradients = changed
    return gradients


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


def _note_all() -> None:
    """Have it noted when any node gets a hook."""
    were_some = RemovableHandle.next_id > 0  # of any kind
    function: Any = Function
    register = getattr(function, "_register_hook", None)

    def noting(known: Any, hook: Callable[..., Any]) -> Any:
        if hook is not _nothing:
            on_nodes[:] = [True]
        return register(known, hook)  # type: ignore[misc]

    if register is not None:
        function._register_hook = staticmethod(noting)
    node: Any = get_gradient_edge(torch.zeros((), requires_grad=True)).node
    are_noted = _is_noted(node.register_prehook) and _is_noted(node.register_hook)
    on_nodes[:] = [] if are_noted and not were_some else [True]


def _is_noted(register: Callable[..., Any]) -> bool:
    on_nodes.clear()
    register(lambda *_: None)
    return bool(on_nodes)


_note_all()


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
