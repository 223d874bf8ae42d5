"""What users call to save and load a model that is spread over workers.

What does the work is beside this file, and imported on first use: torch's checkpoints take a second
to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import nn

from ..optim import DistributedOptimizer
from ..tracebacks import hidden_frames


def save(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: DistributedOptimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of a model into a folder; each owner writes what it has.

    What was saved in it before stays whole until the new one is complete, also if this is killed.
    No one should step meanwhile.

    Args:
        path: A folder that all owners see.
        model: Any module; those of its children that are remote are saved by their owners.
        optimizer: The optimizer of its parameters, if its state is to be saved, too.
        extra: Plain data and tensors, for `load` to return.

    Raises:
        GradwireError: an owner does not see the folder, or another save into it is under way.
        TypeError: `extra` has something else in it.
        ValueError: the optimizer has parameters that are not in the model.
        Exception: what went wrong on an owner; `OwnersError` if it was several.
    """
    from .driver import save_checkpoint

    with hidden_frames:
        save_checkpoint(path, model, optimizer, extra)


def load(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: DistributedOptimizer | None = None,
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Read a checkpoint into a model, which may be on other workers than the one it was made of.

    Names and shapes are looked at before anything is changed.

    Args:
        path: The folder.
        model: The model to fill.
        optimizer: The optimizer to fill, if its state was saved.
        strict: Whether the names have to be the same; else those that are in both are read.

    Returns:
        The `extra` of `save`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is one of another model, or has no optimizer.
        Exception: what went wrong on an owner; `OwnersError` if it was several.
    """
    from .driver import load_checkpoint

    with hidden_frames:
        return load_checkpoint(path, model, optimizer, strict=strict)
