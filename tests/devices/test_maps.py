"""Device maps: where tensors arrive, and come back to, by what a worker says."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

import gradwire as gw
from gradwire._transport.base import Card
from gradwire._transport.stores import Place
from gradwire._wire.device_maps import NoMapError, between, names_of
from gradwire.compat.rpc.agents import KINDS
from gradwire.errors import ProtocolError
from gradwire.options import Options
from gradwire.testing import World
from gradwire.worker import Kinds, Worker, open_worker
from tests.worlds import LIMIT, close_world, join_world, socket_world, together

CPU, FIRST, SECOND, THIRD = (
    torch.device(d) for d in "cpu lazy:1 lazy:2 lazy:3".split()
)


@contextmanager
def mapped(**options: Any) -> Iterator[World]:
    with World(2, **options) as world, world.as_worker(0):
        yield world


def on(device: torch.device, *values: float) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.float32).to(device)
    return tensor.requires_grad_()


def device_of(x: Tensor) -> str:
    return str(x.device)


def double(x: Tensor) -> Tensor:
    return x * 2


def moved(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device)


def several(x: Tensor, device: torch.device) -> dict[str, list[Tensor]]:
    return {"x": [x, x.to(device)]}


class Given:
    """An object of a program's."""

    def __init__(self, inner: object) -> None:
        self.inner = inner


RING = {"worker1": {FIRST: SECOND, SECOND: THIRD}}


def test_a_request_follows_the_map_and_its_response_goes_back() -> None:
    with mapped(device_maps=RING):
        x = on(FIRST, 1, 2)
        assert gw.rpc_sync("worker1", device_of, (x,)) == "lazy:2"
        result = gw.rpc_sync("worker1", double, (x,))
        assert result.device == FIRST
        assert result.cpu().tolist() == [2, 4]


def test_nested_arguments_and_results_follow_it() -> None:
    def devices(found: dict[str, list[Tensor]]) -> tuple[list[str], list[Tensor]]:
        return [str(x.device) for x in found["a"]], found["a"]

    with mapped(device_maps=RING):
        given = {"a": [on(FIRST, 1), on(SECOND, 2), on(CPU, 3)]}
        there, back = gw.rpc_sync("worker1", devices, (given,))
        assert there == ["lazy:2", "lazy:3", "cpu"]
        assert [x.device for x in back] == [FIRST, SECOND, CPU]


def test_references_are_fetched_by_the_map() -> None:
    with mapped(device_maps=RING):
        rref = gw.remote("worker1", double, (on(FIRST, 1, 2),))
        assert rref.to_here().device == FIRST
        assert gw.rpc_sync(
            "worker1", lambda r: device_of(r.local_value()), (rref,)
        ) == ("lazy:2")
        assert rref.rpc_sync().sum().device == FIRST


@pytest.mark.parametrize("allow", [None, [device_of, double]])
def test_the_cpu_can_be_mapped_too(allow: Any) -> None:
    with mapped(device_maps={"worker1": {CPU: FIRST}}, allow=allow) as world:
        x = torch.ones(2)
        assert gw.rpc_sync("worker1", device_of, (x,)) == "lazy:1"
        if allow is None:  # allow-lists know no tensors of pretended devices
            assert gw.rpc_sync("worker1", double, (x,)).tolist() == [2, 2]
        assert len(world) == 2


def test_remote_modules_return_what_they_make_by_the_map() -> None:
    with mapped(device_maps=RING):
        layer = gw.RemoteModule("worker1/lazy:2", nn.Linear, (2, 1))
        x = on(FIRST, 1, 2)
        assert layer(x).device == FIRST
        assert layer.forward_async(x).wait().device == FIRST
        with gw.context() as ctx:
            gw.backward(ctx, [layer(x).sum().cpu()])
            assert gw.get_gradients(ctx)[x].device == FIRST


def test_gradients_go_back_to_where_tensors_came_from() -> None:
    with mapped(device_maps=RING):
        x, y = on(FIRST, 1, 2), on(CPU, 3, 4)
        with gw.context() as ctx:
            first = gw.rpc_sync("worker1", double, (x,))
            second = gw.rpc_sync("worker1", moved, (y, SECOND))
            assert (first.device, second.device) == (FIRST, FIRST)
            gw.backward(ctx, [(first * second).sum().cpu()])
            found = gw.get_gradients(ctx)
        assert (found[x].device, found[y].device) == (FIRST, CPU)
        assert found[x].cpu().tolist() == [6, 8]
        assert found[y].tolist() == [2, 4]


def test_gradients_of_a_mapped_cpu() -> None:
    with mapped(device_maps={"worker1": {CPU: FIRST}}):
        x = on(CPU, 1, 2)
        with gw.context() as ctx:
            result = gw.rpc_sync("worker1", double, (x,))
            assert result.device == CPU
            gw.backward(ctx, [result.sum()])
            assert gw.get_gradients(ctx)[x].tolist() == [2, 2]


# What is refused


def test_a_device_that_the_map_does_not_list_is_refused_at_the_caller() -> None:
    with mapped(device_maps=RING) as world:
        wrong = "on lazy:3, which the device map of worker 'worker0' for 'worker1' does"
        before = world[1].statistics()["calls_run"]
        with pytest.raises(ValueError, match=wrong):
            gw.rpc_sync("worker1", double, (on(THIRD, 1),))
        tensor = r"a tensor of shape \(1, 2\) and torch.float32, is"
        for args, kwargs, path in (
            ((1, {"a": [on(FIRST, 1), on(THIRD, 1, 2)[None]]}), {}, r"1\['a'\]\[1\]"),
            ((), {"x": (on(THIRD, 1, 2)[None],)}, r"'x'\[0\]"),
            ((Given({1: on(THIRD, 1, 2)[None]}),), {}, r"0\.inner\[1\]"),
        ):
            wrong = f"^argument {path}, {tensor} on lazy:3, .*a call of .*double"
            with pytest.raises(ValueError, match=wrong):
                gw.rpc_async("worker1", double, args, kwargs)
            with pytest.raises(ValueError, match=wrong):
                gw.remote("worker1", double, args, kwargs)
        assert world[1].statistics()["calls_run"] == before


def test_an_output_on_such_a_device_is_an_error_of_the_callee() -> None:
    with mapped(device_maps=RING):
        wrong = r"on lazy:1, which .* backwards, does not list: .*'lazy:2': 'lazy:1'"
        tensor = r"a tensor of shape \(2,\) and torch.float32, is"
        with pytest.raises(TypeError, match=f"result, {tensor} {wrong}"):
            gw.rpc_sync("worker1", moved, (torch.ones(2), FIRST))
        with pytest.raises(TypeError, match=rf"result\['x'\]\[1\], {tensor} {wrong}"):
            gw.rpc_sync("worker1", several, (torch.ones(2), FIRST))


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (
            {FIRST: THIRD, "lazy:2": "lazy:3"},
            r"device_maps\['worker1'\] must be one to",
        ),
        ({"lazy": "cpu"}, r"device_maps\['worker1'\]: which lazy device"),
        ({"no such device": "cpu"}, r"device_maps\['worker1'\]: .*no such device"),
    ],
)
def test_maps_that_make_no_sense(given: Any, wrong: str) -> None:
    with (
        pytest.raises(ValueError, match=wrong),
        World(2, device_maps={"worker1": given}),
    ):
        pass


@pytest.mark.parametrize(
    ("maps", "wrong"),
    [
        (
            {"nobody": {FIRST: FIRST}},
            r"invalid target node names .*\['nobody'\]; there a",
        ),
        ({"worker1": {"lazy:9": FIRST}}, "source devices .* for worker1: .*'lazy:9'"),
        ({"worker1": {FIRST: "lazy:9"}}, "target devices .* for worker1: .*'lazy:9'"),
    ],
)
def test_workers_and_devices_that_are_not_there(maps: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong), World(2, device_maps=maps):
        pass


def test_over_sockets_who_has_such_a_map_does_not_join() -> None:
    store, tried = HashStore(), threading.Event()

    def stay() -> None:
        worker = join_world("worker0", Place(store, 0, 2, None))
        try:
            assert tried.wait(LIMIT)
        finally:
            worker.close()

    def try_to_join() -> None:
        maps = {"worker0": {FIRST: "lazy:9"}}
        wrong = "Node worker1 has target devices with invalid indices"
        try:
            with pytest.raises(ValueError, match=wrong):
                join_world("worker1", Place(store, 1, 2, None), device_maps=maps)
        finally:
            tried.set()

    together(stay, try_to_join)


def test_each_worker_says_its_own_over_sockets() -> None:
    apart = {0: {"device_maps": {"worker1": {FIRST: SECOND}}}}
    with socket_world(2, apart=apart) as (first, second):
        x = on(FIRST, 1, 2)
        assert first.rpc_sync("worker1", device_of, (x,)) == "lazy:2"
        assert first.rpc_sync("worker1", double, (x,)).device == FIRST
        assert second.rpc_sync("worker0", device_of, (x,)) == "lazy:1"


def test_devices_are_named_in_any_way() -> None:
    given = {"a": {torch.device("cuda:1"): "cuda:0", "cpu:0": torch.device("xpu:2")}}
    assert names_of(given) == {"a": {"cuda:1": "cuda:0", "cpu": "xpu:2"}}


def test_the_maps_between_two_workers() -> None:
    maps = between("a", {"cuda:0": "cuda:1"}, "b", {"cpu": "cuda:2"})
    first, third = torch.device("cuda:0"), torch.device("cuda:2")
    assert maps.requests is not None
    assert maps.requests.target(first) == "cuda:1"
    assert maps.responses is not None
    assert maps.responses.target(third) == "cpu"
    assert maps.gradients is not None
    assert maps.gradients.target(third) == "cpu"
    assert maps.gradients.target(first) == "cuda:1"
    assert maps.gradients.target(torch.device("cuda:7")) == "cuda:7"
    assert between("a", {}, "b", {}) == (None, None, None)


def test_a_device_of_which_only_the_other_worker_knows() -> None:
    maps = between("a", {}, "b", {"a kind of b's:0": "cpu"})
    assert maps.responses is not None
    assert maps.responses.target(CPU) == "a kind of b's:0"


@pytest.mark.parametrize("maps", [None, [], {"a": None}, {"a": {"cpu": 1}}, {"a": []}])
def test_a_card_with_maps_that_are_none_is_refused(maps: Any) -> None:
    good = Card(name="a", id=1, device_maps={"b": {"cpu": "cuda:0"}})
    assert Card.from_bytes(good.to_bytes()) == good
    bad = replace(good, device_maps=maps)
    with pytest.raises(ProtocolError, match="not a worker's card"):
        Card.from_bytes(bad.to_bytes())


def test_a_map_can_be_asked_for_as_torch_does() -> None:
    maps = between("a", {}, "b", {}, "no map:")
    for one, kind in ((maps.requests, "Request"), (maps.responses, "Response")):
        assert one is not None
        assert one.target(CPU) == "cpu"
        with pytest.raises(NoMapError, match=f"^no map: {kind} .*destination: b"):
            one.target(FIRST)
    assert maps.gradients is None
    assert between("a", {"cpu": "cpu"}, "b", {}, "no map:").requests is not None


def test_programs_for_torch_need_maps() -> None:
    store, kinds = HashStore(), Kinds(no_map=KINDS.no_map)

    def join(rank: int) -> Worker:
        place = Place(store, rank, 2, None)
        return open_worker(
            f"worker{rank}", place, Options(torch_threads=0), kinds=kinds
        )

    workers = together(lambda: join(0), lambda: join(1))
    try:
        wrong = "supports CPU tensors by default.*`set_device_map` on `TensorPipeRpcB"
        with pytest.raises(RuntimeError, match=wrong):
            workers[0].rpc_sync("worker1", double, (on(FIRST, 1),))
        with pytest.raises(RuntimeError, match="Response device mapping is not avail"):
            workers[0].rpc_sync("worker1", moved, (torch.ones(2), FIRST))
        assert workers[0].rpc_sync("worker1", double, (torch.ones(1),)).item() == 2
        assert workers[0].rpc_sync("worker0", double, (on(FIRST, 1),)).device == FIRST
    finally:
        close_world(workers)
