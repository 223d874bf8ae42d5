"""Where the gradients of leaves go: into the context, and into `.grad` only on request.

The engine captures them on the way into the AccumulateGrad nodes, after the hooks of the leaves.
What those nodes do besides accumulating is done here, by the same rules: the pre-hooks of the node
run; a buffer that nobody else references is kept, any other is copied, laid out like its leaf; then
its post-hooks run.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._wire.raw_bytes import place
from ..locks import CheckedLock
from . import hooks
from .contexts import Context, add
from .messages import ACCUMULATE, CREATE

_grad_lock = CheckedLock()  # for `.grad`: passes of several contexts add to it
_NOBODY_ELSE = 2  # references to an item of a list: the list's and the caller's


class Leaf(NamedTuple):
    """A leaf, and the hooks of its node."""

    tensor: Tensor
    before: hooks.Hooks
    after: hooks.Hooks


def look_at(nodes: Iterable[Any]) -> list[Leaf]:
    """The leaves behind these nodes, as they are now."""
    return [Leaf(n.variable, hooks.before(n), hooks.after(n)) for n in nodes]


def keep_plain(
    context: Context, leaves: Iterable[Tensor], gradients: Iterable[Tensor | None]
) -> None:
    """Add gradients that arrived in a message to the context, where there are no hooks."""
    found = [
        (leaf, _own(leaf, gradient, is_ours=True))
        for leaf, gradient in zip(leaves, gradients, strict=True)
        if gradient is not None
    ]
    context.add_gradients(found)


def keep(
    context: Context,
    leaves: Sequence[Leaf],
    captured: list[Tensor | None],
    flags: int,
    *,
    are_ours: bool = False,
) -> None:
    """Add what the engine captured for these leaves to the context. Empties the list.

    `are_ours`: they arrived in a message, so nobody else has their memory.
    """
    shared = () if are_ours or len(captured) < 2 else _shared_storages(captured)
    for index, (leaf, before, after) in enumerate(leaves):
        is_ours = are_ours or sys.getrefcount(captured[index]) <= _NOBODY_ELSE
        gradient, captured[index] = captured[index], None
        if gradient is None:
            continue
        for hook in before:
            changed = hook((gradient,))
            if changed is not None:
                (gradient,) = changed if isinstance(changed, tuple) else (changed,)
                is_ours = False
        if gradient is None:
            continue
        if flags & CREATE:
            with torch.enable_grad():
                gradient = gradient.clone()
        else:
            is_ours = is_ours and not (shared and place(gradient) in shared)
            gradient = gradient.detach() if gradient.requires_grad else gradient
            gradient = _own(leaf, gradient, is_ours=is_ours)
        context.add_gradients(((leaf, gradient),))
        if flags & ACCUMULATE:
            _accumulate(leaf, gradient)
        for hook in after:
            hook((), (gradient,))


def kept_so_far(context: Context, leaf: Tensor) -> Tensor | None:
    """A copy of what the context has for a leaf, for the engine to add to."""
    with context.lock:
        gradient = context.gradients.get(leaf)
        return None if gradient is None else gradient.clone()


def keep_accumulated(
    context: Context, flags: int, leaf: Tensor, gradient: Tensor
) -> None:
    """Keep what the engine made of what the context had for a leaf; it has called the hooks."""
    gradient = gradient.clone()  # it may be part of a buffer that is reused
    with context.lock:
        before = context.gradients.get(leaf)
        context.gradients[leaf] = gradient
    if flags & ACCUMULATE:
        more = gradient if before is None else gradient - before
        _add_to_grad(leaf, more)


def _own(leaf: Tensor, gradient: Tensor, *, is_ours: bool) -> Tensor:
    """A gradient that shares no memory with anything, laid out like its leaf."""
    if gradient.layout is not torch.strided or leaf.layout is not torch.strided:
        return gradient if is_ours else gradient.clone()
    strides = gradient.stride()
    is_dense = gradient.is_contiguous() or 0 not in strides
    if is_ours and is_dense and strides == leaf.stride():
        return gradient
    if leaf.is_contiguous() or 0 in leaf.stride():
        return gradient.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(
        leaf.size(), leaf.stride(), dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)


def _shared_storages(captured: Sequence[Tensor | None]) -> Collection[int]:
    places = [place(gradient) for gradient in captured if gradient is not None]
    if len(set(places)) == len(places):
        return ()
    return [storage for storage, count in Counter(places).items() if count > 1]


def _add_to_grad(leaf: Tensor, gradient: Tensor) -> None:
    """Add in place where torch does, so that a buffer of the user's stays the gradient."""
    with _grad_lock, torch.set_grad_enabled(gradient.requires_grad):
        before = leaf.grad
        if before is None:
            leaf.grad = gradient.clone()
        elif gradient.requires_grad or before.layout is not torch.strided:
            leaf.grad = add(before, gradient)
        else:
            before.add_(gradient)


def _accumulate(leaf: Tensor, gradient: Tensor) -> None:
    """Do what an ordinary backward does."""
    _add_to_grad(leaf, gradient)
    for hook in hooks.of_grad(leaf):
        hook(leaf)
