"""All ways in which bytes travel between workers of this host."""

import socket
from typing import Any

import pytest

MANNERS: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "unix": {"shared_memory": False},
    "tcp": {"unix_sockets": False},
    "ipv6": {"unix_sockets": False, "bind": "::1"},
}


@pytest.fixture(params=MANNERS)
def manner(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "ipv6" and not has_ipv6():
        pytest.skip("this host has no IPv6 loopback address")
    return MANNERS[request.param]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
