"""The other worker of the self test: `python -m gradwire.tools.doctor.selftest_worker URL`.

Serves until its standard input ends.
"""

from __future__ import annotations

import sys

from ..._transport.stores import find_place
from ...options import Options
from ...worker import open_worker

JOIN = 30.0


def main(url: str) -> None:
    options = Options(join_timeout=JOIN)
    place = find_place(url, None, 1, 2, JOIN)
    with open_worker("partner", place, options):
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
