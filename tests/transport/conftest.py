"""All ways in which bytes travel between workers of this host; workers to attack; stores."""

import io
import logging
import pickle
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from torch.distributed import FileStore, HashStore, PrefixStore

from gradwire.worker import Worker
from tests.transport.stores import NewStore, new_tcp_store
from tests.transport.strangers import KEY, Journal
from tests.worlds import (
    LIMIT,
    socket_world,
)

TRANSPORTS: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "unix": {"shared_memory": False},
    "tcp": {"unix_sockets": False},
    "ipv6": {"unix_sockets": False, "bind": "::1"},
}


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "ipv6" and not has_ipv6():
        pytest.skip("this host has no IPv6 loopback address")
    return TRANSPORTS[request.param]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was unpickled, by whatever way; nothing, if all is well."""
    seen: list[str] = []

    def recorder(name: str) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            raise AssertionError(f"{name} was called")

        return record

    class Unpickler(pickle.Unpickler):
        def __init__(self, file: io.BytesIO, *args: Any, **kwargs: Any) -> None:
            seen.append("Unpickler")
            super().__init__(file, *args, **kwargs)

    for module in (pickle, cloudpickle):
        monkeypatch.setattr(module, "loads", recorder(f"{module.__name__}.loads"))
        monkeypatch.setattr(module, "load", recorder(f"{module.__name__}.load"))
    monkeypatch.setattr(pickle, "Unpickler", Unpickler)
    monkeypatch.setattr("gradwire._wire.pickling._Unpickler", Unpickler)
    return seen


@pytest.fixture
def journal(caplog: pytest.LogCaptureFixture) -> Iterator[Journal]:
    with caplog.at_level(logging.WARNING, "gradwire"):
        yield Journal(caplog)


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    with socket_world(2, key=KEY) as opened:
        yield opened


@pytest.fixture
def target(workers: list[Worker]) -> Iterator[Worker]:
    """A worker to attack; afterwards it still serves the other one."""
    yield workers[0]
    assert workers[1].rpc_sync("worker0", max, (1, 2), timeout=LIMIT) == 2
    assert workers[1].rpc_async("worker0", max, (1, 2), timeout=LIMIT).wait() == 2


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> NewStore:
    """Makes a store; one made here would outlive the look for what was left behind."""
    makers: dict[str, NewStore] = {
        "hash": HashStore,
        "file": lambda: FileStore(str(tmp_path / "store")),
        "tcp": new_tcp_store,
        "prefix": lambda: PrefixStore("job", HashStore()),
    }
    return makers[request.param]
