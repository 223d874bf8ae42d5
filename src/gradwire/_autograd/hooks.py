"""Hooks that users put on leaves, on the nodes behind them, and on sends and recvs.

torch calls them where it runs a node. A pass does not run the nodes behind leaves, so their hooks
are called by `gradients.py`; and it cuts sends and recvs short, unless they have hooks.

Few programs put hooks on nodes, and to ask a node for its hooks takes long (5 µs). So it is asked
only if a hook of any kind was ever made in this process: torch numbers the handles of all.

Private torch names used here: `Tensor._backward_hooks` and `_post_accumulate_grad_hooks`, the only
places where the hooks of a tensor stand. Without them those of leaves would not be called.
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

_not_on_nodes = [0]  # handles that were made for what is no node


def were_made() -> bool:
    """Whether nodes may have hooks."""
    return RemovableHandle.next_id > _not_on_nodes[0]


def leave_out(_: RemovableHandle) -> None:
    """A handle of ours is not for a node."""
    _not_on_nodes[0] += 1


def before(node: Any) -> Hooks:
    """Those that are called before a node is run."""
    return _known_to(node.register_prehook) if were_made() else ()


def after(node: Any) -> Hooks:
    """Those that are called when a node was run."""
    return _known_to(node.register_hook) if were_made() else ()


def called(node: Any, gradients: Gradients, given: Any) -> Gradients:
    """What the hooks of a node, which is not run itself, make of the gradients it yields."""
    for hook in before(node):
        hook((given,))
    for hook in after(node):
        changed = hook(gradients, (given,))
        if changed is not None:
            gradients = changed
    return gradients


def of_tensor(tensor: torch.Tensor) -> Any:
    """The hooks that get the gradient of a tensor; nothing if there are none."""
    return tensor._backward_hooks


def of_grad(leaf: torch.Tensor) -> Hooks:
    """The hooks that are called when `.grad` of a leaf was filled."""
    found = getattr(leaf, "_post_accumulate_grad_hooks", None)
    return list(found.values()) if found else ()


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
