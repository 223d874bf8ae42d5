"""What one owner writes or reads of a checkpoint, with torch's own planners, writers and readers.

A value has a path: `("model", name)` for the model's state dict, `("optim", "state", parameter,
field)` for the optimizer's. The keys of the checkpoint are these, joined by dots, as in torch;
its metadata has the paths.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from .._rref.reference import RRef
from ..errors import GradwireError
from ..nn.spread_model import Part, state_of_part
from ..optim.local import LocalOptimizer

PathOf = tuple[str, ...]


class Shard:
    """Some values of a checkpoint, to write."""

    def __init__(self, folder: Path, values: Mapping[PathOf, Any]) -> None:
        self._folder = folder
        self.paths = {".".join(path): path for path in values}
        self._planner = DefaultSavePlanner(flatten_state_dict=False)
        state = {".".join(path): value for path, value in values.items()}
        self._planner.set_up_planner(state, None, is_coordinator=True)

    def plan(self) -> SavePlan:
        """What to write."""
        return self._planner.create_local_plan()

    def write(self, plan: SavePlan, prefix: str) -> list[WriteResult]:
        """Write it, to files with this prefix; returns where."""
        plan = self._planner.finish_plan(plan)
        plan = replace(plan, storage_data=replace(plan.storage_data, prefix=prefix))
        writer = FileSystemWriter(self._folder)
        results: list[WriteResult] = writer.write_data(plan, self._planner).wait()
        return results


class OwnedShard:
    """One owner's part of a model and its optimizer."""

    def __init__(
        self, folder: Path, parts: list[Part], optimizer: RRef[LocalOptimizer] | None
    ) -> None:
        self._folder = folder
        self._parts = [(prefix, rref.local_value()) for prefix, rref in parts]
        self._optimizer = None if optimizer is None else optimizer.local_value()
        self.names = self._parameter_names()

    def describe(self) -> tuple[list[str], list[str]]:
        """The names in the model's state dict, and those of the optimizer's parameters."""
        return list(self._model()), self.names

    # Writing

    def plan(self, made: Path) -> tuple[SavePlan, dict[str, PathOf]]:
        """What to write, and the paths of its keys."""
        if not made.is_dir():
            raise GradwireError(
                f"{made.parent} is not visible to this worker: save to a file system "
                "that all workers share"
            )
        values: dict[PathOf, Any] = {
            ("model", name): value for name, value in self._model().items()
        }
        if self._optimizer is not None:
            for index, state in self._optimizer.state().items():
                path = ("optim", "state", self.names[index])
                values |= {(*path, field): value for field, value in state.items()}
        self._shard = Shard(self._folder, values)
        return self._shard.plan(), self._shard.paths

    def write(self, plan: SavePlan, prefix: str) -> list[WriteResult]:
        """Write it; returns where."""
        return self._shard.write(plan, prefix)

    # Reading

    def check(self) -> None:
        """Plan the read and check that it fits. Changes nothing.

        Raises:
            FileNotFoundError, ValueError: there is no such checkpoint, or it does not match the
                model.
        """
        self._reader = Reader(self._folder)
        self._states = self._reader.empty_states(self.names)
        self._values = {
            ("model", name): value
            for name, value in self._model().items()
            if ".".join(("model", name)) in self._reader.paths
        }
        self._reader.prepare(self._values | self._states)

    def read(self) -> None:
        """Read it."""
        values = self._reader.read()
        for prefix, module in self._parts:
            state = {
                name: values[("model", _join(prefix, name))]
                for name in state_of_part(module)
                if ("model", _join(prefix, name)) in values
            }
            module.load_state_dict(state, strict=False)
        if self._optimizer is not None:
            states: dict[int, dict[str, Any]] = {}
            for path in self._states:
                index = self.names.index(path[2])
                states.setdefault(index, {})[path[3]] = values[path]
            self._optimizer.load_state(states, {})

    def _model(self) -> dict[str, Any]:
        return {
            _join(prefix, name): value
            for prefix, module in self._parts
            for name, value in state_of_part(module).items()
        }

    def _parameter_names(self) -> list[str]:
        """The names of the optimizer's parameters, in its order."""
        if self._optimizer is None:
            return []
        known = {
            id(parameter): name
            for prefix, module in reversed(self._parts)
            for name, parameter in module.named_parameters(prefix=prefix)
        }
        strangers = [p for p in self._optimizer.params if id(p) not in known]
        if strangers:
            shapes = [tuple(p.shape) for p in strangers]
            raise ValueError(
                f"the optimizer has parameters that are not in the model, of shapes {shapes}"
            )
        return [known[id(parameter)] for parameter in self._optimizer.params]


class Reader:
    """A checkpoint, to read values out of."""

    def __init__(self, folder: Path) -> None:
        self._reader = FileSystemReader(folder)
        self._metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._planner = _Planner(flatten_state_dict=False)
        self.paths: dict[str, PathOf] = {
            key: tuple(path)
            for key, path in (self._metadata.planner_data or {}).items()
        }

    def prepare(self, values: Mapping[PathOf, Any]) -> None:
        """Set what to read: tensors to read into, and placeholders for other values.

        Raises:
            ValueError: they have other shapes.
        """
        self._wanted = list(values)
        state = {".".join(path): value for path, value in values.items()}
        self._planner.set_up_planner(state, self._metadata, is_coordinator=True)
        self._plan = self._planner.create_local_plan()

    def read(self) -> dict[PathOf, Any]:
        """Read the requested values."""
        self._reader.read_data(self._plan, self._planner).wait()
        state = self._planner.state_dict
        return {path: state[".".join(path)] for path in self._wanted}

    def empty_states(self, names: Iterable[str]) -> dict[PathOf, Any]:
        """Buffers for the optimizer's state of these parameters."""
        wanted = set(names)
        room: dict[PathOf, Any] = {}
        for key, path in self.paths.items():
            if path[:2] == ("optim", "state") and path[2] in wanted:
                about = self._metadata.state_dict_metadata[key]
                room[path] = None
                if isinstance(about, TensorStorageMetadata):
                    kind = about.properties.dtype
                    room[path] = torch.empty(about.size, dtype=kind)
        return room


class _Planner(DefaultLoadPlanner):
    """Reads plain data and tensors only: a checkpoint may come from anywhere."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        self.state_dict[read_item.dest_index.fqn] = loaded


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
