"""Tensors of pretended devices over sockets, with a driver that is pretended, too."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire._transport import connection_pool, device_memory
from gradwire._transport.cuda_driver import DriverError
from gradwire._transport.shared_memory import is_available
from tests.devices.pretended_driver import Memory, PretendedDriver
from tests.worlds import LIMIT, socket_world

pytestmark = pytest.mark.skipif(not is_available(), reason="there is no memfd here")

FIRST, SECOND = torch.device("lazy:1"), torch.device("lazy:2")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedDriver]:
    made = PretendedDriver(Memory())
    monkeypatch.setattr(connection_pool, "cuda_driver", lambda: made)
    monkeypatch.setattr(device_memory, "_LONG", LIMIT)  # the machine may be busy
    yield made
    assert not made.memory.buffers
    assert not made.mapped


def on(device: torch.device, *values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).to(device)


def device_and_double(x: Tensor) -> tuple[str, Tensor]:
    return str(x.device), x * 2


def by_cpu(worker: gw.Worker) -> int:
    sent: int = worker.statistics()["device_bytes_sent_by_cpu"]
    return sent


def test_they_go_from_device_to_device(driver: PretendedDriver) -> None:
    with socket_world(2) as workers:
        for count in range(5):
            x = on(FIRST, count, 2)
            device, twice = workers[0].rpc_sync("worker1", device_and_double, (x,))
            assert (device, twice.device) == ("lazy:1", FIRST)
            assert twice.cpu().tolist() == [2 * count, 4]
        for worker in workers:
            found = worker.statistics()
            assert found["device_bytes_sent_by_cpu"] == 64  # the first
            assert found["device_bytes_sent_directly"] == 4 * 64
        assert workers[0].statistics()["links"] == {
            "worker1": "Unix sockets, shared memory, memory of GPUs"
        }
        assert driver.copied == [8] * 16


def test_strides_large_tensors_and_those_of_the_cpu_beside(
    driver: PretendedDriver,
) -> None:
    given = {
        "a": [torch.rand(3, 4).to(FIRST).t(), torch.rand(5)],
        "b": torch.rand(100_000).to(FIRST),
        "c": torch.rand(100_000),
        "empty": torch.rand(0, 3).to(FIRST),
    }
    with socket_world(2) as workers:
        for count in range(3):
            back = workers[0].rpc_sync("worker1", lambda x: x, (given,))
            # Pretended devices lose them on the way from the CPU, as the first ones go.
            assert back["a"][0].stride() == ((1, 4) if count else (3, 1))
            for one, other in zip(flat(given), flat(back), strict=True):
                assert one.device == other.device
                assert torch.equal(one.cpu(), other.cpu())
        assert by_cpu(workers[0]) < 2 * 400_000 + 1000


def flat(given: dict[str, Any]) -> list[Tensor]:
    return [*given["a"], given["b"], given["c"], given["empty"]]


def test_maps_are_followed_on_arrival(driver: PretendedDriver) -> None:
    apart = {0: {"device_maps": {"worker1": {FIRST: SECOND}}}}
    with socket_world(2, apart=apart) as workers:
        for _ in range(3):
            x = on(FIRST, 1, 2)
            device, twice = workers[0].rpc_sync("worker1", device_and_double, (x,))
            assert (device, twice.device) == ("lazy:2", FIRST)
            assert twice.cpu().tolist() == [2, 4]
        assert workers[0].statistics()["device_bytes_sent_directly"] == 128


def test_gradients_take_the_same_way(driver: PretendedDriver) -> None:
    with socket_world(2) as workers:
        autograd = workers[0].autograd
        for _ in range(3):
            x = on(FIRST, 1, 2).requires_grad_()
            with autograd.context() as context:
                _, y = workers[0].rpc_sync("worker1", device_and_double, (x,))
                autograd.backward(context, [y.sum().cpu()])
                gradient = autograd.get_gradients(context)[x]
            assert gradient.device == FIRST
            assert gradient.cpu().tolist() == [2, 2]
        assert workers[0].statistics()["device_bytes_sent_directly"] > 128


def test_by_tcp_they_go_by_way_of_the_cpu(driver: PretendedDriver) -> None:
    with socket_world(2, unix_sockets=False) as workers:
        for _ in range(3):
            x = on(FIRST, 1, 2)
            device, twice = workers[0].rpc_sync("worker1", device_and_double, (x,))
            assert (device, twice.device) == ("lazy:1", FIRST)
            assert twice.cpu().tolist() == [2, 4]
        assert by_cpu(workers[0]) == 3 * 64
        assert driver.copied == []


def test_where_memory_cannot_be_opened_they_do_so_too(
    driver: PretendedDriver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.refuses = "open"
    with socket_world(2) as workers:
        for _ in range(3):
            _, twice = workers[0].rpc_sync(
                "worker1", device_and_double, (on(FIRST, 1, 2),)
            )
            assert twice.cpu().tolist() == [2, 4]
        assert (
            workers[0]
            .statistics()["links"]["worker1"]
            .endswith("; tensors of GPUs by way of the CPU (open: not today)")
        )
        assert len([m for m in caplog.messages if "by way of the CPU" in m]) == 2


def test_memory_is_freed_whoever_ends_the_connection(driver: PretendedDriver) -> None:
    with socket_world(2) as workers:
        for _ in range(2):
            workers[0].rpc_sync("worker1", device_and_double, (on(FIRST, 1, 2),))
        assert len(driver.memory.buffers) == 2
        transport: Any = workers[0]._transport
        for link in transport._links():
            link._on_ended = lambda *_: None  # another thread is about to call it


# What the receiver cannot take


def test_a_receiver_without_memory_says_so(
    driver: PretendedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with socket_world(2) as workers:
        call = workers[0].rpc_sync
        call("worker1", device_and_double, (on(FIRST, 1, 2),))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty_strided", full)
            with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
                call("worker1", device_and_double, (on(FIRST, 1, 2),))
        with monkeypatch.context() as patch:  # here, of the response
            patch.setattr(torch, "empty_strided", full)
            with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
                call("worker1", torch.ones(2).to, (FIRST,))
        assert call("worker1", device_and_double, (on(FIRST, 1, 2),))[0] == "lazy:1"


def test_a_receivers_driver_that_fails(
    driver: PretendedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, count = driver.copy, 0

    def every_other(to: int, source: int, size: int, stream: int) -> None:
        nonlocal count
        count += 1
        if count == 1:
            raise DriverError("cuMemcpyDtoDAsync_v2: CUDA_ERROR_UNKNOWN")
        copy(to, source, size, stream)

    with socket_world(2) as workers:
        for _ in range(2):
            workers[0].rpc_sync("worker1", device_and_double, (on(FIRST, 1, 2),))
        monkeypatch.setattr(driver, "copy", every_other)
        for skipped in (1, 3):  # of the request, and of the response
            count = -skipped
            with pytest.raises(
                gw.GradwireError, match=r"could not be taken: .*UNKNOWN"
            ):
                workers[0].rpc_sync("worker1", device_and_double, (on(FIRST, 1, 2),))
        before = workers[0].statistics()["device_bytes_sent_directly"]
        workers[0].rpc_sync("worker1", device_and_double, (on(FIRST, 1, 2),))
        assert workers[0].statistics()["device_bytes_sent_directly"] == before + 64
