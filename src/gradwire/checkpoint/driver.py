"""Saving and loading, driven by the calling worker: one object on each owner does its part."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from .._rref.reference import RRef
from ..api import remote
from ..fanout import call_all
from ..nn.spread_model import Part, find_parts
from ..optim import DistributedOptimizer
from ..optim.groups import settings_of
from .layout import new_save
from .shards import OwnedShard, Reader, Shard

_GROUPS = ("optim", "param_groups")
_EXTRA = ("extra",)

Shards = dict[str, RRef[OwnedShard]]


def save_checkpoint(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: DistributedOptimizer | None,
    extra: Mapping[str, Any] | None,
) -> None:
    """See `gradwire.save`."""
    folder = Path(path).absolute()
    values = _own_values(extra)
    shards = _make_shards(folder, model, optimizer)
    described = call_all({n: (s, "describe", ()) for n, s in shards.items()})
    if optimizer is not None:
        names = _names(optimizer, {n: d[1] for n, d in described.items()})
        values[_GROUPS] = [
            {**settings_of(group), "params": given}
            for group, given in zip(optimizer.param_groups, names, strict=True)
        ]
    with new_save(folder) as made:
        own = Shard(folder, values)
        plans = call_all({n: (s, "plan", (made,)) for n, s in shards.items()})
        planner, writer = (
            DefaultSavePlanner(flatten_state_dict=False),
            FileSystemWriter(made),
        )
        every = [own.plan(), *(plan for plan, _ in plans.values())]
        divided, metadata = planner.create_global_plan(every)
        first, *others = writer.prepare_global_plan(divided)
        results = [own.write(first, f"{made.name}/__0_")]
        calls = {
            name: (shards[name], "write", (plan, f"{made.name}/__{number}_"))
            for number, (name, plan) in enumerate(zip(plans, others, strict=True), 1)
        }
        results += call_all(calls).values()
        paths = [own.paths, *(found for _, found in plans.values())]
        merged = {key: path for found in paths for key, path in found.items()}
        writer.finish(replace(metadata, planner_data=merged), results)


def load_checkpoint(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: DistributedOptimizer | None,
    *,
    strict: bool,
) -> dict[str, Any]:
    """See `gradwire.load`."""
    folder = Path(path).absolute()
    reader = Reader(folder)
    own = {path for path in (_GROUPS, _EXTRA) if path in reader.paths.values()}
    reader.prepare(dict.fromkeys(own))
    values = reader.read()
    shards = _make_shards(folder, model, optimizer)
    described = call_all({n: (s, "describe", ()) for n, s in shards.items()})
    if strict:
        _check_names(
            reader, {name for names, _ in described.values() for name in names}
        )
    loaded = None
    if optimizer is not None:
        names = _names(optimizer, {n: d[1] for n, d in described.items()})
        loaded = _matching(values.get(_GROUPS), names)
    call_all({n: (s, "check", ()) for n, s in shards.items()})
    call_all({n: (s, "read", ()) for n, s in shards.items()})
    if optimizer is not None and loaded is not None:
        for group, saved in zip(optimizer.param_groups, loaded, strict=True):
            group.update(settings_of(saved))  # the owners hear of it with the next step
    found: dict[str, Any] = values.get(_EXTRA, {})
    return found


def _make_shards(
    folder: Path, model: nn.Module, optimizer: DistributedOptimizer | None
) -> Shards:
    parts: dict[str, list[Part]] = {}
    for part in find_parts(model):
        parts.setdefault(part.module.owner_name(), []).append(part)
    owners = {} if optimizer is None else optimizer.owners
    return {
        name: remote(
            name, OwnedShard, args=(folder, parts.get(name, []), owners.get(name))
        )
        for name in parts | owners
    }


def _own_values(extra: Mapping[str, Any] | None) -> dict[tuple[str, ...], Any]:
    """The values that the saving worker adds to those of the owners.

    Raises:
        TypeError: it could not be loaded.
    """
    if extra is None:
        return {}
    data = io.BytesIO()
    torch.save(dict(extra), data)
    data.seek(0)
    try:
        torch.load(data, weights_only=True)
    except Exception as error:
        raise TypeError(
            f"extra={extra!r} must contain only plain data and tensors: {error}"
        ) from error
    return {_EXTRA: dict(extra)}


def _names(
    optimizer: DistributedOptimizer, by_owner: Mapping[str, list[str]]
) -> list[list[str]]:
    """The names of the parameters of each group."""
    at = {
        position: name
        for owner, names in by_owner.items()
        if owner in optimizer.shares
        for position, name in zip(optimizer.shares[owner].positions, names, strict=True)
    }
    found, position = [], 0
    for group in optimizer.param_groups:
        end = position + len(group["params"])
        found.append([at[i] for i in range(position, end)])
        position = end
    return found


def _matching(saved: Any, names: list[list[str]]) -> list[dict[str, Any]]:
    """The saved groups, if they are groups of the same parameters."""
    if saved is None:
        raise ValueError("the checkpoint has no optimizer: load it without one")
    then = [sorted(group["params"]) for group in saved]
    if then != [sorted(group) for group in names]:
        raise ValueError(
            f"the checkpoint's optimizer has the groups {then}, this one has {names}"
        )
    groups: list[dict[str, Any]] = saved
    return groups


def _check_names(reader: Reader, here: set[str]) -> None:
    saved = {path[1] for path in reader.paths.values() if path[0] == "model"}
    if saved != here:
        raise ValueError(
            f"the checkpoint does not match the model: it lacks {sorted(here - saved)}, and "
            f"also has {sorted(saved - here)}; strict=False loads what is in both"
        )
