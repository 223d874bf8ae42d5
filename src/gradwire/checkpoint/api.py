"""The functions that save and load a model spread over workers.

The implementation is next to this file and imported on first use: torch's checkpoints take a second
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
    """Write a checkpoint of a model into a folder; each owner writes its own part.

    A previous checkpoint stays intact until the new one is complete, even if this is killed. Run no
    step meanwhile.

    Args:
        path: A folder that is visible to all owners.
        model: Any module; remote children are saved by their owners.
        optimizer: The optimizer of its parameters, to save its state as well.
        extra: Plain data and tensors, which `load` returns.

    Raises:
        GradwireError: the folder is not visible to an owner, or another save into it is in
            progress.
        TypeError: `extra` contains something else.
        ValueError: the optimizer has parameters that are not in the model.
        Exception: the error on an owner; `OwnersError` if several failed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gw.save(folder, gw.RemoteModule("worker1", torch.nn.Linear, (2, 1)), extra={"epoch": 3})
    ...     gw.load(folder, torch.nn.Linear(2, 1))
    {'epoch': 3}
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
    """Read a checkpoint into a model, whose layout over workers may differ from the saved one.

    Names and shapes are checked before anything is changed.

    Args:
        path: The folder.
        model: The model to load into.
        optimizer: The optimizer to load into, if its state was saved.
        strict: Whether names must match; otherwise the common ones are loaded.

    Returns:
        The `extra` of `save`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it does not match the model, or has no optimizer.
        Exception: the error on an owner; `OwnersError` if several failed.

    >>> import tempfile
    >>> here = torch.nn.Linear(2, 1)
    >>> there = gw.RemoteModule("worker1", torch.nn.Linear, (2, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gw.save(folder, there)
    ...     _ = gw.load(folder, here)
    >>> torch.equal(here.weight, there.state_dict()["weight"])
    True
    """
    from .driver import load_checkpoint

    with hidden_frames:
        return load_checkpoint(path, model, optimizer, strict=strict)
