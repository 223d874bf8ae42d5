"""The arguments of scripted functions, seen to before they are sent."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from .calls import packer


def check_arguments(function: Any, args: Any, kwargs: Any) -> None:
    """See that a scripted function takes these arguments, before they are sent.

    Raises:
        RuntimeError: it does not, in TorchScript's own words.
    """
    args = args or ()
    if not kwargs and all(isinstance(value, torch.Tensor) for value in args):
        takes, needs = _signature(function)
        if needs <= len(args) <= len(takes) and all(takes[: len(args)]):
            return
    pack = packer(function)
    try:
        pack(*args, **(kwargs or {}))
    except RuntimeError as error:  # declares what returns the arguments
        words = str(error).replace(str(pack.schema), str(function.schema))
        raise RuntimeError(words) from None


@lru_cache(maxsize=4096)
def _signature(function: Any) -> tuple[tuple[bool, ...], int]:
    """By parameter, whether it is a tensor; and how many have to be given."""
    parameters = function.schema.arguments
    takes = tuple(str(parameter.type) == "Tensor" for parameter in parameters)
    needs = sum(not parameter.has_default_value() for parameter in parameters)
    return takes, needs
