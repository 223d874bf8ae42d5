"""Tensors that are not plain memory, decomposed into tensors that are, and recomposed.

A recipe is a name and parts: plain data and tensors. Names and parts are the same for pickle and
for the safe encoding, so both support every kind of tensor.

Private torch names used here, and what breaks without them:
`Tensor._indices`, `Tensor._values`: an uncoalesced sparse tensor would have to be coalesced to be
sent. `torch._make_per_tensor_quantized_tensor` and `..._per_channel_...`: the only way from
stored integers to a quantized tensor that does not round again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from .. import streams
from . import dense_tensors
from .device_maps import DeviceMap, Place, place

log = logging.getLogger("gradwire")

_COMPRESSED_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED = {
    str(layout): layout
    for layout in (
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    )
}


Recipe = tuple[str, tuple[Any, ...]]


class Copy(NamedTuple):
    """In a recipe, a part that is sent unchanged: a strided tensor, in spite of device maps."""

    tensor: torch.Tensor


def take_apart(tensor: torch.Tensor, devices: DeviceMap | None = None) -> Recipe | None:
    """The recipe of a tensor of exact type `torch.Tensor`; None if it is plain memory.

    Raises:
        TypeError: this kind of tensor cannot be sent.
        ValueError: the device map does not have its device.
    """
    if devices is None and dense_tensors.is_plain(tensor):
        return None
    there = place(tensor.device, devices)
    if there.device == "cpu" and dense_tensors.is_plain(tensor):
        return None
    grad = tensor.requires_grad
    tensor = tensor.detach()
    if tensor.is_meta:
        return "meta", (
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            grad,
        )
    if tensor.is_nested and tensor.layout is torch.strided:
        # Each with its own memory: who puts them together from anyone's bytes insists.
        return "nested", ([member.clone() for member in tensor.unbind()], grad)
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    if is_dense and not (tensor.is_cpu and there.device == "cpu"):
        streams.note()
        return "device", (tuple(there), Copy(tensor), grad)
    if tensor.layout is torch.sparse_coo:
        parts = map(_unexpanded, (tensor._indices(), tensor._values()))
        return "coo", (*parts, tuple(tensor.shape), tensor.is_coalesced(), grad)
    if str(tensor.layout) in _COMPRESSED:
        return "compressed", (*_compressed_parts(tensor), grad)
    if tensor.is_quantized:
        return "quantized", _quantized_parts(tensor, there)
    raise TypeError(f"cannot send a tensor of {tensor.layout}, {tensor.dtype}")


def on_device(tensor: torch.Tensor, devices: DeviceMap | None = None) -> Recipe | None:
    """The recipe of a tensor of a backend written in Python: they have a type of their own.

    On the CPU they are plain tensors. All else with a type of its own has that there, too.
    """
    if tensor.is_cpu or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    bare = tensor.detach()
    if type(bare.flatten()[:0].cpu()) is not torch.Tensor:
        return None
    streams.note()
    there = tuple(place(tensor.device, devices))
    return "device", (there, Copy(bare), tensor.requires_grad)


def put_together(name: str, parts: tuple[Any, ...]) -> torch.Tensor:
    """The tensor that `take_apart` described."""
    return _RECIPES[name](*parts)


def is_known(name: object) -> bool:
    return name in _RECIPES


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether it has more elements than memory behind them."""
    return tensor.nbytes > tensor.untyped_storage().nbytes()


def tensors_of(parts: Iterable[Any]) -> Iterator[torch.Tensor]:
    for part in parts:
        if isinstance(part, torch.Tensor):
            yield part
        elif type(part) is list:
            yield from tensors_of(part)


def copied(name: str, parts: tuple[Any, ...]) -> int:
    """How many bytes `put_together` copies."""
    at = _COPIED.get(name)
    own = () if at is None else parts[at : at + 1]
    return sum(tensor.nbytes for tensor in tensors_of(own))


def _compressed_parts(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout in _COMPRESSED_BY_ROW:
        outer, inner = tensor.crow_indices(), tensor.col_indices()
    else:
        outer, inner = tensor.ccol_indices(), tensor.row_indices()
    parts = map(_unexpanded, (outer, inner, tensor.values()))
    return str(tensor.layout), *parts, tuple(tensor.shape)


def _unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous() if is_expanded(tensor) else tensor


def _quantized_parts(tensor: torch.Tensor, there: Place) -> tuple[Any, ...]:
    if tensor.dtype in (torch.quint4x2, torch.quint2x4):
        raise TypeError(f"cannot send a tensor of {tensor.dtype}")
    if tensor.qscheme() is torch.per_tensor_affine:
        how: tuple[Any, ...] = (tensor.q_scale(), tensor.q_zero_point())
    else:
        how = (
            tensor.q_per_channel_scales(),
            tensor.q_per_channel_zero_points(),
            tensor.q_per_channel_axis(),
        )
    return (tuple(there), Copy(tensor.int_repr().cpu()), *how)


def _meta(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], grad: bool
) -> torch.Tensor:
    tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return tensor.requires_grad_(grad)


def _nested(members: list[torch.Tensor], grad: bool) -> torch.Tensor:
    if type(members) is not list:
        raise TypeError("members of a nested tensor are not in a list")
    return torch.nested.as_nested_tensor(members).requires_grad_(grad)


def _device(there: tuple[str, bool], tensor: torch.Tensor, grad: bool) -> torch.Tensor:
    streams.note()
    return _moved(tensor, there).requires_grad_(grad)


def _moved(tensor: torch.Tensor, there: tuple[str, bool]) -> torch.Tensor:
    """A tensor on this device; or, if there is none and no map names it, on another one."""
    device, is_mapped = there
    try:
        return tensor.to(torch.device(device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError) or _is_here(device):
            raise
        reason = str(error).partition(". ")[0]  # torch's message has several pages
        if is_mapped:
            raise RuntimeError(
                f"a device map puts a tensor on {device!r} here, where that device cannot be "
                f"used ({reason})"
            ) from error
    other = _current_device()
    if device not in _missed and len(_missed) < _MOST_MISSED:
        _missed.add(device)
        log.warning(
            "tensors that leave from %s arrive on %s here: there is no such device (%s); to choose "
            "another one, give the sender a device map",
            device,
            other,
            reason,
        )
    return tensor.to(other)


_MOST_MISSED = 64  # of which it is said: their names are the other worker's words
_missed: set[str] = set()
"""Devices that this process lacks, and that were said to be missing."""


def _is_here(device: str) -> bool:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        return False
    return True


def _current_device() -> torch.device:
    """The accelerator that is current here; without one, the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.get_device_module(kind).current_device())


def _coo(
    indices: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    coalesced: bool,
    grad: bool,
) -> torch.Tensor:
    tensor = torch.sparse_coo_tensor(
        indices,
        values,
        shape,
        device=values.device,  # and not the default device
        check_invariants=True,
        is_coalesced=coalesced,
    )
    return tensor.requires_grad_(grad)


def _compressed(
    layout: str,
    outer: torch.Tensor,
    inner: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    grad: bool,
) -> torch.Tensor:
    tensor = torch.sparse_compressed_tensor(
        outer,
        inner,
        values,
        shape,
        device=values.device,
        layout=_COMPRESSED[layout],
        check_invariants=True,
    )
    return tensor.requires_grad_(grad)


def _quantized(
    there: tuple[str, bool], stored: torch.Tensor, *how: Any
) -> torch.Tensor:
    stored = _moved(stored, there)
    if len(how) == 2:
        return torch._make_per_tensor_quantized_tensor(stored, *how)
    return torch._make_per_channel_quantized_tensor(stored, *how)


_RECIPES: dict[str, Callable[..., torch.Tensor]] = {
    "meta": _meta,
    "nested": _nested,
    "device": _device,
    "coo": _coo,
    "compressed": _compressed,
    "quantized": _quantized,
}
_COPIED = {
    "nested": 0,
    "device": 1,
    "quantized": 1,
}  # which part; the others stay in place
