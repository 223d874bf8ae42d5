"""Hooks that users put on leaves, on the nodes behind them, and on sends and recvs.

torch calls them where it runs a node. A pass does not run the nodes behind leaves, so
`gradients.py` calls their hooks; and it bypasses sends and recvs, unless they have hooks.

Few programs put hooks on nodes, and asking a node for its hooks is slow (5 µs). So it is asked only
if a hook of any kind was ever created in this process: torch numbers the handles of all.

Private torch names used here: `Tensor._backward_hooks` and `_post_accumulate_grad_hooks`, the only
access to the hooks of a tensor. Without them those of leaves would not be called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

Hooks = Sequence[Callable[..., Any]]
Gradients = tuple[torch.Tensor | None, ...]

on_crossings: list[bool] = []
"""Not empty: some send or recv got hooks, ever."""

_plain: dict[type, Callable[..., Any]] = {}  # `register_prehook` of crossings
_not_on_nodes = [0]  # handles that do not belong to nodes


def were_made() -> bool:
    """Whether nodes may have hooks."""
    return RemovableHandle.next_id > _not_on_nodes[0]


def leave_out(_: RemovableHandle) -> None:
    """Do not count a handle of ours."""
    _not_on_nodes[0] += 1


def add_own(node: Any, hook: Callable[..., Any]) -> RemovableHandle:
    """Have a function of ours called before a node runs. It does not count as a hook."""
    register = _plain.get(type(node))
    handle: RemovableHandle = (
        register(node, hook) if register else node.register_prehook(hook)
    )
    leave_out(handle)
    return handle


def before(node: Any) -> Hooks:
    """The hooks called before a node runs."""
    return _known_to(node.register_prehook) if were_made() else ()


def after(node: Any) -> Hooks:
    """The hooks called after a node has run."""
    return _known_to(node.register_hook) if were_made() else ()


def called(node: Any, gradients: Gradients, given: Any) -> Gradients:
    """The gradients after the hooks of a node that is not itself run."""
    for hook in before(node):
        hook((given,))
    for hook in after(node):
        changed = hook(gradients, (given,))
        if changed is not None:
            gradients = changed
    return gradients


def of_tensor(tensor: torch.Tensor) -> Any:
    """The hooks that receive the gradient of a tensor; empty if there are none."""
    return tensor._backward_hooks


def of_grad(leaf: torch.Tensor) -> Hooks:
    """The hooks called when `.grad` of a leaf has been accumulated."""
    found = getattr(leaf, "_post_accumulate_grad_hooks", None)
    return list(found.values()) if found else ()


def _known_to(register: Callable[..., Any]) -> Hooks:
    """A node does not list its hooks, but a new hook gets to know the others."""
    handle = register(_nothing)
    hooks = handle.hooks_dict_ref()
    del hooks[handle.id]
    return list(hooks.values()) if hooks else []


def _nothing(*_: object) -> None:
    pass


def note(kind: Any) -> None:
    """Record that a hook was put on a crossing of this kind."""
    _plain[kind] = kind.register_prehook
    for name in ("register_hook", "register_prehook"):
        setattr(kind, name, _noting(getattr(kind, name)))


def _noting(register: Callable[..., Any]) -> Callable[..., Any]:
    def noting(node: Any, hook: Callable[..., Any]) -> Any:
        node.crossing.is_hooked = True
        on_crossings[:] = [True]
        return register(node, hook)

    return noting
