"""A call with a device map of its own, which takes the place of the worker's."""

from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from tests.devices.test_maps import (
    CPU,
    FIRST,
    RING,
    SECOND,
    THIRD,
    device_of,
    double,
    mapped,
    moved,
    on,
    several,
)
from tests.worlds import socket_world

OWN = {FIRST: "lazy:3"}


def device_and_double(x: Tensor) -> tuple[str, Tensor]:
    return str(x.device), x * 2


@pytest.mark.parametrize("device_maps", [{}, RING])
def test_arguments_follow_it_and_the_result_goes_back(device_maps: Any) -> None:
    with mapped(device_maps=device_maps):
        given = ("worker1", device_and_double, (on(FIRST, 1, 2).detach(),))
        for result in (
            gw.rpc_sync(*given, device_map=OWN),
            gw.rpc_async(*given, device_map=OWN).wait(),
        ):
            assert (result[0], result[1].device) == ("lazy:3", FIRST)
            assert result[1].cpu().tolist() == [2, 4]
        usual = "lazy:2" if device_maps else "lazy:1"
        assert gw.rpc_sync(*given)[0] == usual  # it is for one call only


def test_a_reference_is_fetched_by_the_workers_map() -> None:
    with mapped(device_maps=RING):
        x = on(SECOND, 1, 2).detach()
        rref = gw.remote("worker1", double, (x,), device_map={SECOND: SECOND})
        assert gw.rpc_sync("worker1", there, (rref,)) == "lazy:2"
        assert rref.to_here().device == FIRST
        serial = gw.remote("worker1", Kept, (x,), serial=True, device_map={SECOND: CPU})
        assert serial.rpc_sync().device() == "cpu"


def there(rref: gw.RRef[Tensor]) -> str:
    return device_of(rref.local_value())


class Kept:
    """An object with a tensor."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def device(self) -> str:
        return str(self._x.device)


def test_an_empty_map_maps_nothing() -> None:
    with mapped(device_maps=RING):
        x = on(THIRD, 1).detach()
        result = gw.rpc_sync("worker1", device_and_double, (x,), device_map={})
        assert (result[0], result[1].device) == ("lazy:3", THIRD)


@pytest.mark.parametrize("allow", [None, [device_of]])
def test_the_cpu_can_be_in_it(allow: Any) -> None:
    with mapped(allow=allow):
        x, to_first = torch.ones(2), {"cpu": FIRST}
        call = ("worker1", device_of, (x,))
        assert gw.rpc_sync(*call, device_map=to_first) == "lazy:1"
        if allow is None:  # allow-lists know no tensors of pretended devices
            back = gw.rpc_sync("worker1", double, (x,), device_map=to_first)
            assert (back.device, back.tolist()) == (CPU, [2, 2])


def test_it_is_followed_over_sockets_and_in_retries() -> None:
    with socket_world(2) as (worker, _):
        x = on(FIRST, 1).detach()
        assert worker.rpc_sync("worker1", device_of, (x,), device_map=OWN) == "lazy:3"
        rref = worker.remote("worker1", double, (x,), device_map={FIRST: CPU})
        assert rref.to_here().device == CPU
    with mapped():
        given = ("worker1", gw.idempotent(device_of), (x,))
        assert gw.rpc_sync(*given, retries=1, device_map=OWN) == "lazy:3"


def test_gradients_go_back_to_where_tensors_came_from() -> None:
    with mapped(device_maps=RING):
        x, y = on(FIRST, 1, 2), on(CPU, 3, 4)
        with gw.context() as ctx:
            first = gw.rpc_sync("worker1", double, (x,), device_map=OWN)
            second = gw.rpc_sync("worker1", double, (y,), device_map={"cpu": SECOND})
            assert (first.device, second.device) == (FIRST, CPU)
            gw.backward(ctx, [(first.cpu() * second).sum()])
            found = gw.get_gradients(ctx)
        assert (found[x].device, found[y].device) == (FIRST, CPU)
        assert found[x].cpu().tolist() == [12, 16]
        assert found[y].tolist() == [4, 8]


# What is refused


def test_what_it_does_not_list_is_refused_at_the_caller_and_at_the_callee() -> None:
    with mapped(device_maps=RING) as world:
        before = world[1].statistics()["calls_run"]
        wrong = r"^argument 0, .* on lazy:2, which the device map of the call does not"
        with pytest.raises(ValueError, match=wrong):
            gw.rpc_sync("worker1", double, (on(SECOND, 1),), device_map=OWN)
        assert world[1].statistics()["calls_run"] == before
        wrong = r"result, .* on lazy:2, which the device map of the call, backwards, d"
        with pytest.raises(TypeError, match=wrong):
            gw.rpc_sync("worker1", moved, (torch.ones(2), SECOND), device_map=OWN)
        with pytest.raises(
            TypeError, match=r"result\['x'\]\[1\], .* of the call, back"
        ):
            gw.rpc_sync("worker1", several, (torch.ones(2), SECOND), device_map=OWN)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({FIRST: THIRD, SECOND: THIRD}, "^device_map must be one to one"),
        ({"lazy": "cpu"}, "^device_map: which lazy device"),
        ({FIRST: "lazy:9"}, "a device map puts a tensor on 'lazy:9' here"),
    ],
)
def test_maps_that_make_no_sense(given: Any, wrong: str) -> None:
    with mapped(), pytest.raises((ValueError, RuntimeError), match=wrong):
        gw.rpc_sync("worker1", double, (on(FIRST, 1),), device_map=given)
