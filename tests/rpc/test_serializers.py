"""What can be sent, and how a worker is taught to send a type."""

import operator
import pickle
import threading
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import gradwire as gw
from gradwire.testing import World
from tests.rpc.functions import held, holding
from tests.worlds import in_flight

LARGE = 100_000  # elements: travels in the bulk area


class Box:
    def __init__(self, value: int) -> None:
        self.value = value


class Opaque:
    """Pickle cannot send it: it has a lock."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.lock = threading.Lock()


def reduce_opaque(opaque: Opaque) -> tuple[Any, ...]:
    return Opaque, (opaque.tensor,)


def tensor_of(opaque: Opaque) -> torch.Tensor:
    return opaque.tensor


def test_an_argument_that_cannot_be_sent_is_refused_here(world: World) -> None:
    for to in ("worker1", "worker0"):
        for call in (world[0].rpc_sync, world[0].rpc_async):
            with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock'"):
                call(to, tensor_of, (Opaque(torch.ones(2)),))
    assert in_flight(world[0]) == "0 calls in flight"


def test_an_argument_too_large_is_refused_here() -> None:
    with World(2, max_body=1000, max_bulk=1000) as world:
        with pytest.raises(ValueError, match="max_body=1000, max_bulk=1000"):
            world[0].rpc_sync("worker1", len, (b"x" * 2000,))
        with pytest.raises(ValueError, match="raise them on all workers"):
            world[0].rpc_sync("worker1", torch.sum, (torch.ones(LARGE),))
        assert in_flight(world[0]) == "0 calls in flight"


def test_an_argument_nested_too_deep_is_refused_here(world: World) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TypeError, match=r"arguments of builtins\.len nest too deep"):
        world[0].rpc_sync("worker1", len, (deep,))
    while deep:  # freeing it whole would recurse as deep
        deep = deep.pop()


@pytest.mark.parametrize("size", [2, LARGE])
def test_a_worker_can_be_taught_to_send_a_type(world: World, size: int) -> None:
    world[0].register_reducer(Opaque, reduce_opaque)
    opaque = Opaque(torch.ones(size))
    result = world[0].rpc_sync("worker1", tensor_of, (opaque,))
    torch.testing.assert_close(result, opaque.tensor)
    with pytest.raises(TypeError, match="cannot be sent"):  # nobody taught worker1
        world[0].rpc_sync("worker1", Opaque, (torch.ones(1),))


def test_all_workers_of_a_process_can_be_taught_to_send_a_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradwire.api._reducers", {})
    gw.register_reducer(Opaque, reduce_opaque)
    with gw.init_rpc("alone", rank=0, world_size=1, store=HashStore()):
        result = gw.rpc_sync("alone", tensor_of, (Opaque(torch.ones(2)),))
        torch.testing.assert_close(result, torch.ones(2))
        gw.register_reducer(Box, lambda box: (Box, (box.value + 1,)))
        assert gw.rpc_sync("alone", operator.attrgetter("value"), (Box(1),)) == 2


def test_the_worker_that_is_entered_can_be_taught_to_send_a_type(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.api._reducers", {})
    with world.as_worker(0):
        gw.register_reducer(Opaque, reduce_opaque)
        gw.rpc_sync("worker1", tensor_of, (Opaque(torch.ones(2)),))


class Diary:
    """A serializer that writes down what it saw."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def dumps(self, obj: Any, tensors: list[torch.Tensor]) -> bytes:
        self.sent.append(obj)
        return pickle.dumps(self._swap(obj, tensors))

    def loads(self, data: bytes | memoryview, tensors: list[torch.Tensor]) -> Any:
        return self._restore(pickle.loads(data), tensors)

    def _swap(self, obj: Any, tensors: list[torch.Tensor]) -> Any:
        if isinstance(obj, torch.Tensor):
            tensors.append(obj)
            return ("tensor", len(tensors) - 1)
        if isinstance(obj, tuple):
            return tuple(self._swap(x, tensors) for x in obj)
        return obj

    def _restore(self, obj: Any, tensors: list[torch.Tensor]) -> Any:
        if isinstance(obj, tuple):
            if len(obj) == 2 and obj[0] == "tensor":
                return tensors[obj[1]]
            return tuple(self._restore(x, tensors) for x in obj)
        return obj


def test_a_serializer_of_ones_own_sees_all_that_is_sent() -> None:
    diary = Diary()
    with World(2, serializer=diary) as world:
        result = world[0].rpc_sync("worker1", torch.add, (torch.ones(2), 1))
        torch.testing.assert_close(result, torch.full((2,), 2.0))
        (name, *_), (value,) = diary.sent
        assert name == "torch:add"
        assert value.equal(result)
        with pytest.raises(IndexError):
            world[0].rpc_sync("worker1", operator.getitem, ([], 1))
        world.run(lambda worker: worker.barrier())


def test_a_worker_shows_what_matters() -> None:
    with World(2) as world, holding() as hold:
        future = world[0].rpc_async("worker1", held)
        assert repr(world[0]) == "<Worker 'worker0', id 0: 1 calls in flight>"
        assert repr(world) == "<World of ['worker0', 'worker1']>"
        hold.release.set()
        future.wait()
    assert repr(world[0]) == "<Worker 'worker0', id 0: closed>"
