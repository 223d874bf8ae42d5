"""The command: `gradwire key FILE`, which makes the secret of a world."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .._transport import key_files


def main(arguments: Sequence[str]) -> int:
    """Write a new key; the exit status."""
    parser = argparse.ArgumentParser(
        prog="gradwire key",
        description="Write a new random key to a file that nobody else may read. Workers of one "
        "world on several machines need the same key: copy the file to all of them, over a trusted "
        "channel, and set GRADWIRE_KEY_FILE to its path.",
        epilog="example: gradwire key world.key",
    )
    parser.add_argument("file", metavar="FILE", help="a file that does not exist yet")
    path = parser.parse_args(arguments).file
    try:
        key_files.create(path)
    except OSError as error:
        parser.error(f"cannot make {path}: {error.strerror}")
    print(f"{path}: set GRADWIRE_KEY_FILE to this path on all machines of the world")
    return 0
