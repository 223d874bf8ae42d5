"""Users' secrets of worlds, and the files that contain them: readable only by their owner.

`gradwire key FILE` creates one. A user without one gets a generated one: `own`, shared by
everything that this user runs on this machine. It never leaves the machine.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path

from ..errors import GradwireError
from ..options import Options

_LEAST = 16
"""Bytes of a key that protects something."""


def given(options: Options) -> tuple[bytes, ...]:
    """The user's keys, from the option or the file, the current one first; none by default.

    Raises:
        ValueError: one is too short to be secure, or others can read its file.
    """
    key = options.key
    if key is None:
        return () if options.key_file is None else read(options.key_file)
    return (_check(key),)


def _check(key: bytes) -> bytes:
    """The key, if it is long enough.

    Raises:
        ValueError: it is too short to be secure.
    """
    if len(key) < _LEAST:
        raise ValueError(
            f"the key has {len(key)} bytes: use at least {_LEAST} random bytes"
        )
    return key


def read(path: str | Path) -> tuple[bytes, ...]:
    """The keys in a file: one, or in a text file one per line, of which the first is current.

    Raises:
        OSError: it cannot be read.
        ValueError: others can read it, or it contains no key.
    """
    with open(path, "rb") as file:
        _check_access(str(path), os.fstat(file.fileno()))
        data = file.read().strip()
    keys = data.splitlines() if data.isascii() else [data]
    return tuple(_check(key.strip()) for key in keys or [b""])


def _check_access(path: str, found: os.stat_result) -> None:
    """As libpq does it: only the owner may read it; if that is root, also a group."""
    if found.st_uid not in (0, os.geteuid()):
        raise ValueError(f"the key file {path!r} belongs to another user")
    if found.st_mode & (0o037 if found.st_uid == 0 else 0o077):
        mode = stat.S_IMODE(found.st_mode)
        raise ValueError(
            f"the key file {path!r} can be read by others (mode {mode:04o}): make a new one "
            f"with `gradwire key`, or if nobody has read it: chmod 600 {path}"
        )


def create(path: str | Path) -> None:
    """Write a new random key, readable only by this user.

    Raises:
        FileExistsError: the file exists.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(file, "w") as out:
        out.write(secrets.token_hex(32) + "\n")


def own() -> bytes:
    """The key of this user on this machine, created at its first use.

    Raises:
        GradwireError: its folder is not safe.
    """
    folder = Path(tempfile.gettempdir()) / f"gradwire-{os.geteuid()}"
    path = folder / "key"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if found.st_uid != os.geteuid() or not is_private:
        raise GradwireError(
            f"{folder} belongs to another user, or others may enter it: remove it, or give a key "
            "(GRADWIRE_KEY_FILE; `gradwire key FILE` makes one)"
        )
    if not path.exists():
        new = folder / secrets.token_hex(8)
        create(new)
        try:
            os.link(new, path)  # atomic: the first to create it has written all of it
        except FileExistsError:
            pass
        finally:
            new.unlink()
    return read(path)[0]
