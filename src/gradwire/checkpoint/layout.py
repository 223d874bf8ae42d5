"""The folder of a checkpoint, and how a new checkpoint atomically replaces the previous one.

    checkpoint/
        .metadata            lists the files of the latest complete save, and their contents
        save-3f9a01/         the files of that save

Each save writes its own folder. It is committed by renaming its `.metadata` over the previous one,
which the file system does atomically. All other folders are leftovers of older or killed saves, and
are removed then.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import GradwireError

METADATA = ".metadata"
_SAVES = "save-"


@contextmanager
def new_save(folder: Path) -> Iterator[Path]:
    """A folder for the files of a save, whose metadata must exist at the end of the block.

    Raises:
        GradwireError: another save is in progress, in any process of this host.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise GradwireError(f"another save to {folder} is under way") from error
        made = folder / f"{_SAVES}{secrets.token_hex(4)}"
        made.mkdir()
        try:
            yield made
            (made / METADATA).replace(folder / METADATA)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        os.fsync(handle)
        for other in folder.glob(f"{_SAVES}*"):
            if other != made:
                shutil.rmtree(other, ignore_errors=True)
    finally:
        os.close(handle)  # and with it the lock
