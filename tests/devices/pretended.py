"""Four devices that are not there: memory of the CPU, in tensors that say they are elsewhere.

torch's `lazy` is the one kind of device that each build knows, has nothing of its own, and that the
autograd engine accepts: its tensors are ours here, which run each operation on what they hold.
Operations of tensors on several devices fail, as on a GPU, and so does a device past the last.

torch has a way to write backends in Python, but only new versions do, and with one device each.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

KIND, COUNT = "lazy", 4
_COPIES = {torch.ops.aten.copy_.default}
_MADE = "empty.memory_format empty_strided".split()


def is_hidden(device: torch.device) -> bool:
    """Whether this thread's worker has no such device. Tests replace it."""
    return False


class Elsewhere(Tensor):
    """A tensor on such a device."""

    held: Tensor

    @staticmethod
    def __new__(
        cls: type["Elsewhere"], held: Tensor, device: torch.device
    ) -> "Elsewhere":
        if device.index is None or device.index >= COUNT or is_hidden(device):
            raise RuntimeError(f"there is no device {device}: invalid device ordinal")
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(op, args, dict(kwargs or {}))


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = _pytree.tree_leaves((args, kwargs))
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Elsewhere)}
    given = kwargs.pop("device", None)
    args, kwargs = _pytree.tree_map(_held, (args, kwargs))
    if op in _COPIES:
        op(*args, **kwargs)
        return leaves[0]
    if len(devices) > 1:
        raise RuntimeError(f"Expected all tensors on one device, but found {devices}")
    device = devices.pop() if given is None else torch.device(given)
    made = op(*args, **kwargs)
    if op._schema.is_mutable:
        return leaves[0]
    if device.type != KIND:
        return made
    return _pytree.tree_map(
        lambda one: Elsewhere(one, device) if isinstance(one, Tensor) else one, made
    )


def _held(value: Any) -> Any:
    return value.held if isinstance(value, Elsewhere) else value


def _maker(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(op, args, kwargs)


@contextmanager
def pretended_devices() -> Iterator[list[torch.device]]:
    """Tensors can be made on `lazy:0` to `lazy:3`."""
    library = torch.library.Library("aten", "IMPL")
    for name in _MADE:
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        library.impl(name, _maker(op), "Lazy")
    try:
        yield [torch.device(KIND, index) for index in range(COUNT)]
    finally:
        library._destroy()
