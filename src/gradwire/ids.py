"""Names and numbers of workers.

A worker has a name, chosen by people, and an id, a number that is never used twice in one world.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class WorkerInfo(NamedTuple):
    """Who a worker is: its name and its id."""

    name: str
    id: int


def check_name(name: object) -> str:
    """The name, if a worker can be called that.

    Raises:
        ValueError: naming what is wrong with it.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"worker name {name!r} is not valid: use 1 to 128 letters, digits, "
            "and any of '_', '.', ':', '-'"
        )
    return name
