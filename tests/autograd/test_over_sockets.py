"""Distributed autograd over sockets and shared memory, also with workers that leave.

The same as in `test_calls.py` and `test_flows.py`, where it matters how messages
travel and who reads them.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire._autograd import recording
from gradwire._autograd.contexts import Context
from gradwire._rpc.function_runner import async_execution
from gradwire.api import current_worker, enter
from gradwire.errors import CallTimeout, GradwireError, WorkerLostError
from tests.autograd.functions import Gate, Raises, doubles
from tests.autograd.weights import check_gradients_of
from tests.rpc.functions import held, holding
from tests.worlds import LIMIT, close_world, meanwhile, open_world, vanish, wait_until

close = torch.testing.assert_close

KINDS: dict[str, dict[str, Any]] = {
    "unix": {},
    "tcp": {"unix_sockets": False, "shared_memory": False},
}
SMALL, LARGE = 3, 40_000

Workers = list[gw.Worker]

weights: dict[str, Tensor] = {}
"""What each worker computes with."""


@pytest.fixture(params=KINDS)
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    """The test is worker 0; in the end no context may be left."""
    Raises.is_on = True
    use_weights(SMALL)
    opened = open_world(3, **KINDS[request.param])
    before = enter(opened[0])
    try:
        yield opened
        see_nothing_left(opened)
    except BaseException:
        close_world(opened, graceful=False)
        raise
    finally:
        enter(before)
    close_world([worker for worker in opened if not worker.is_closed])


def use_weights(size: int) -> None:
    weights.update({f"worker{i}": doubles(size) for i in range(3)})


def see_nothing_left(workers: Workers) -> None:
    infos = [w.autograd.debug_info for w in workers if not w.is_closed]
    wait_until(lambda: not any(count for info in infos for count in info().values()))


def apply_weight(x: Tensor) -> Tensor:
    """Something of what came and what this worker has."""
    return torch.sin(x) * weights[current_worker().name]


def applied_locally(x: Tensor, *path: int) -> Tensor:
    """What `apply_weight` makes of it on these workers, computed here."""
    for worker in path:
        x = torch.sin(x) * weights[f"worker{worker}"]
    return x


def weigh_all(tensors: list[Tensor]) -> dict[str, Tensor]:
    return {str(i): apply_weight(tensor) for i, tensor in enumerate(tensors)}


def weigh_at(rref: gw.RRef[Tensor]) -> Tensor:
    return apply_weight(rref.to_here())


def apply_along(x: Tensor, path: list[str]) -> Tensor:
    if not path:
        return apply_weight(x)
    result: Tensor = gw.rpc_sync(path[0], apply_along, (apply_weight(x), path[1:]))
    return result


def current_id() -> int:
    context = current_worker().autograd.contexts.current()
    return 0 if context is None else context.id


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_gradients_come_back_through_all_ways_to_call(
    workers: Workers, size: int
) -> None:
    use_weights(size)
    with gw.context() as ctx:
        x = doubles(size)
        h = x * 2
        a = gw.rpc_sync("worker1", apply_weight, (h,))
        b = gw.rpc_async("worker2", apply_weight, (a,)).wait()
        c = gw.remote("worker1", apply_weight, (b,)).to_here()
        d = gw.rpc_sync(
            "worker2", weigh_at, (gw.remote("worker1", apply_weight, (c,)),)
        )
        e = gw.rpc_sync("worker0", apply_weight, (d,))
        f = gw.rpc_sync("worker1", weigh_all, ([e, h],))
        gw.backward(ctx, [(f["0"] * f["1"] * h).sum()])
        local = (
            applied_locally(x * 2, 1, 2, 1, 1, 2, 0, 1)
            * applied_locally(x * 2, 1)
            * x
            * 2
        )
        own = [[weights[f"worker{i}"]] for i in range(3)]
        check_gradients_of(workers, ctx, local.sum(), [[x, *own[0]], own[1], own[2]])


@pytest.mark.parametrize("path", "120 1010 0110".split())
def test_calls_that_make_calls(workers: Workers, path: str) -> None:
    with gw.context() as ctx:
        x = doubles(3)
        first, *rest = [f"worker{digit}" for digit in path]
        y = gw.rpc_sync(first, apply_along, (x, rest))
        z = gw.rpc_async(first, apply_along, (x * y, rest)).wait()
        gw.backward(ctx, [(z * y).sum()])
        numbers = [int(digit) for digit in path]
        y = applied_locally(x, *numbers)
        local = (applied_locally(x * y, *numbers) * y).sum()
        leaves: list[list[Tensor]] = [[x], [], []]
        for i in set(numbers):
            leaves[i].append(weights[f"worker{i}"])
        check_gradients_of(workers, ctx, local, leaves)


def test_many_calls_at_once(workers: Workers) -> None:
    with gw.context() as ctx:
        x = doubles(3)
        targets = [f"worker{1 + i % 2}" for i in range(50)]
        futures = [
            gw.rpc_async(to, apply_weight, (x * i,)) for i, to in enumerate(targets)
        ]
        total = torch.stack([future.wait() for future in futures]).sum()
        gw.backward(ctx, [total])
        each = [applied_locally(x * i, 1 + i % 2) for i in range(50)]
        own = [[x], [weights["worker1"]], [weights["worker2"]]]
        check_gradients_of(workers, ctx, torch.stack(each).sum(), own)


@async_execution
def weigh_by_thens(x: Tensor) -> torch.futures.Future[Tensor]:
    def weigh_there(future: Any) -> Tensor:
        result: Tensor = gw.rpc_sync("worker2", apply_weight, (future.value(),))
        return result

    def weigh_here(future: Any) -> Tensor:
        return torch.sin(future.value()) * weights["worker1"]

    first = gw.rpc_async("worker2", apply_weight, (x,))
    return first.then(weigh_there).then(weigh_there).then(weigh_here)


async def weigh_by_awaits(x: Tensor) -> Tensor:
    for _ in range(3):
        x = await gw.rpc_async("worker2", apply_weight, (x,))
        await asyncio.sleep(0)
    return torch.sin(x) * weights["worker1"]


@pytest.mark.parametrize("func", [weigh_by_thens, weigh_by_awaits])
def test_functions_that_answer_later(workers: Workers, func: Any) -> None:
    with gw.context() as ctx:
        x = doubles(3)
        y = gw.rpc_sync("worker1", func, (x * 2,))
        z = gw.remote("worker1", func, (y,)).to_here()
        gw.backward(ctx, [(z * x).sum()])
        local = (applied_locally(x * 2, 2, 2, 2, 1, 2, 2, 2, 1) * x).sum()
        own = [[x], [weights["worker1"]], [weights["worker2"]]]
        check_gradients_of(workers, ctx, local, own)


def test_tasks_have_contexts_of_their_own(workers: Workers) -> None:
    async def train(number: int) -> None:
        x = doubles(3)
        with gw.context() as ctx:
            y = await gw.rpc_async("worker1", apply_weight, (x * number,))
            z = await gw.rpc_async("worker2", apply_weight, (y,))
            assert await gw.rpc_async("worker1", current_id) == ctx
            gw.backward(ctx, [z.sum()])
            local = applied_locally(x * number, 1, 2).sum()
            close(gw.get_gradients(ctx), {x: torch.autograd.grad(local, [x])[0]})

    async def main() -> None:
        await asyncio.gather(*map(train, range(1, 7)))

    asyncio.run(main())


def test_calls_of_others_are_not_of_the_context_of_who_waits(workers: Workers) -> None:
    seen: list[int] = []

    def ask_back() -> None:
        assert hold.entered.wait(LIMIT)
        seen.append(workers[1].rpc_sync("worker0", current_id))
        seen.append(workers[1].rpc_async("worker0", current_id).wait())
        hold.release.set()

    with holding() as hold:
        first = gw.rpc_async("worker1", held)  # in no context
        last = first.then(lambda _: seen.append(current_id()))
        last = last.then(lambda _: seen.append(current_id()))
        with gw.context() as ctx, meanwhile(ask_back):
            gw.rpc_async("worker1", held).wait()  # reads what comes for all
            last.wait()
            assert gw.rpc_sync("worker1", current_id) == ctx
        first.wait()
    assert seen == [0, 0, 0, 0]


def test_kinds_of_tensors_side_by_side(workers: Workers) -> None:
    with gw.context() as ctx:
        x, p = doubles(3), nn.Parameter(torch.rand(3, dtype=torch.float64))
        large = nn.Parameter(torch.rand(LARGE, 3, dtype=torch.float64))
        y = gw.rpc_sync("worker1", weigh_all, ([x, p, large, large[::2], x.flip(0)],))
        gw.backward(ctx, [(y["0"] * y["1"] * y["4"] * y["2"].sum() + y["3"]).sum()])
        each = [applied_locally(t, 1) for t in (x, p, large, large[::2], x.flip(0))]
        local = (each[0] * each[1] * each[4] * each[2].sum() + each[3]).sum()
        check_gradients_of(
            workers, ctx, local, [[x, p, large], [weights["worker1"]], []]
        )


def test_large_gradients_outlive_their_context(workers: Workers) -> None:
    use_weights(LARGE)
    kept: list[Tensor] = []
    x = doubles(LARGE)
    for _ in range(3):
        with gw.context() as ctx:
            y = gw.rpc_sync("worker1", apply_weight, (x,))
            gw.backward(ctx, [y.sum()])
            kept.append(gw.get_gradients(ctx)[x])
            kept.append(workers[1].autograd.get_gradients(ctx)[weights["worker1"]])
    leaves = [x, weights["worker1"]]
    gx, gw1 = torch.autograd.grad(applied_locally(x, 1).sum(), leaves)
    for gradient, expected in zip(kept, [gx, gw1] * 3, strict=True):
        close(gradient, expected)


def test_several_passes_and_second_derivatives(workers: Workers) -> None:
    with gw.context() as ctx:
        x = doubles(3)
        y = gw.rpc_sync("worker1", apply_along, (x**3, ["worker2"])).sum()
        for _ in range(2):
            gw.backward(ctx, [y], retain_graph=True)
        (slope,) = gw.grad(ctx, [y], [x], create_graph=True)
        assert slope is not None
        gw.backward(ctx, [(slope**2).sum()])
        y = applied_locally(x**3, 1, 2).sum()
        (slope,) = torch.autograd.grad(y, [x], create_graph=True)
        local = 2 * y + (slope**2).sum()
        own = [[x], [weights["worker1"]], [weights["worker2"]]]
        check_gradients_of(workers, ctx, local, own)


def raise_in_backward(x: Tensor, path: list[str]) -> Tensor:
    if not path:
        return Raises.apply(apply_weight(x))
    result: Tensor = gw.rpc_sync(
        path[0], raise_in_backward, (apply_weight(x), path[1:])
    )
    return result


@pytest.mark.parametrize("path", ["1", "12", "120"])
def test_an_error_in_a_backward_and_then_none(workers: Workers, path: str) -> None:
    with gw.context() as ctx:
        x = doubles(3)
        h = x * 2
        first, *rest = [f"worker{digit}" for digit in path]
        y = gw.rpc_sync(first, raise_in_backward, (h, rest))
        loss = (y * h).sum()
        text = f"Error on Node {path[-1]}: this backward fails"
        for _ in range(10):
            with pytest.raises(GradwireError, match=text) as caught:
                gw.backward(ctx, [loss], retain_graph=True)
            assert type(caught.value.__cause__) is ValueError
        contexts = [c for w in workers for c in w.autograd.contexts]
        wait_until(lambda: not any(context.passes() for context in contexts))
        Raises.is_on = False
        for context in contexts:
            context.gradients.clear()
        gw.backward(ctx, [loss])
        numbers = [int(digit) for digit in path]
        local = (applied_locally(x * 2, *numbers) * x * 2).sum()
        leaves: list[list[Tensor]] = [[x], [], []]
        for i in numbers:
            leaves[i].append(weights[f"worker{i}"])
        check_gradients_of(workers, ctx, local, leaves)


def weigh_held(x: Tensor) -> Tensor:
    held()
    return apply_along(x, ["worker2"])


def by_async(*args: Any, **kwargs: Any) -> Any:
    return gw.rpc_async(*args, **kwargs).wait()


@pytest.mark.parametrize("call", [gw.rpc_sync, by_async])
def test_a_pass_after_a_call_that_timed_out(workers: Workers, call: Any) -> None:
    call("worker1", max, (1, 2))  # connects: the next one leaves before its time is up
    with gw.context() as ctx, holding() as hold:
        x = doubles(3)
        h = x * 2
        with pytest.raises(CallTimeout):
            call("worker1", weigh_held, (h,), timeout=0.05)
        y = gw.rpc_sync("worker1", apply_weight, (h,))
        gw.backward(ctx, [(y * h).sum()], retain_graph=True)
        hold.release.set()
        there = workers[1].autograd.contexts.get(ctx)
        wait_until(lambda: len(there.sends) == 3)
        gw.backward(ctx, [(y * h).sum()])
        local = 2 * (applied_locally(x * 2, 1) * x * 2).sum()
        check_gradients_of(workers, ctx, local, [[x], [weights["worker1"]], []])


def test_threads_with_contexts_of_their_own(workers: Workers) -> None:
    def train(number: int) -> Callable[[], None]:
        def body() -> None:
            enter(workers[number % 3])
            for _ in range(3):
                numbers = [(number + i) % 3 for i in (1, 2, 3)]
                first, *rest = [f"worker{i}" for i in numbers]
                x = doubles(3)
                with gw.context() as ctx:
                    y = gw.rpc_sync(first, apply_along, (x, rest))
                    gw.backward(ctx, [(y * x).sum()])
                    local = (applied_locally(x, *numbers) * x).sum()
                    (expected,) = torch.autograd.grad(local, [x])
                    close(gw.get_gradients(ctx)[x], expected)

        return body

    with meanwhile(*map(train, range(8))):
        pass


def test_a_worker_that_vanished(workers: Workers) -> None:
    with gw.context() as ctx:
        x = doubles(3)
        y = gw.rpc_sync("worker1", apply_along, (x, ["worker2"]))
        vanish(workers[2])
        began = time.monotonic()
        with pytest.raises(WorkerLostError, match="worker2"):
            gw.backward(ctx, [y.sum()])
        assert time.monotonic() - began < 2
    with gw.context() as ctx:
        y = gw.rpc_sync("worker1", apply_weight, (x,))
        gw.backward(ctx, [y.sum()])
        local = applied_locally(x, 1).sum()
        check_gradients_of(workers[:2], ctx, local, [[x], [weights["worker1"]]])


_gates: list[Gate] = []


def weigh_gated(x: Tensor) -> Tensor:
    (gate,) = _gates
    return gate(apply_weight(x))


@pytest.mark.parametrize("is_residual", [False, True])
def test_a_pass_that_is_stuck_ends_in_time(workers: Workers, is_residual: bool) -> None:
    gate = Gate()
    _gates[:] = [gate]
    with gw.context() as ctx:
        x = doubles(3)
        y = gw.rpc_sync("worker1", apply_weight, (x,))
        z = gw.rpc_sync("worker2", weigh_gated, (y,))
        with pytest.raises(gw.BackwardTimeout):
            gw.backward(ctx, [(z * y if is_residual else z).sum()], timeout=0.05)
        gate.open.set()


def test_a_worker_that_vanishes_in_a_pass(workers: Workers) -> None:
    gate = Gate()
    _gates[:] = [gate]
    gone: list[float] = []

    def end() -> None:
        assert gate.entered.wait(LIMIT)
        gone.append(time.monotonic())
        threading.Timer(0.2, gate.open.set).start()  # it is waited for when closed
        vanish(workers[2])

    with gw.context() as ctx, meanwhile(end):
        x = doubles(3)
        y = gw.rpc_sync("worker1", apply_weight, (x,))
        z = gw.rpc_sync("worker2", weigh_gated, (y,))
        with pytest.raises(WorkerLostError, match="worker2"):
            gw.backward(ctx, [(z * y).sum()])
        assert time.monotonic() - gone[0] < 2


def test_a_model_over_three_workers_trains_as_it_does_locally(workers: Workers) -> None:
    torch.manual_seed(0)
    use_weights(8)
    leaves = [weights["worker1"], weights["worker2"]]
    twins = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    optimizer = torch.optim.SGD(twins, lr=0.1)
    for _ in range(5):
        x = torch.rand(6, 8, dtype=torch.float64)
        with gw.context() as ctx:
            rref = gw.remote("worker1", apply_weight, (x,))
            y = gw.rpc_sync("worker2", weigh_at, (rref,))
            loss = ((y - 1) ** 2).mean()
            gw.backward(ctx, [loss])
            for i in (1, 2):
                gw.rpc_sync(f"worker{i}", update, (ctx, 0.1))
        optimizer.zero_grad()
        y = torch.sin(torch.sin(x) * twins[0]) * twins[1]
        local = ((y - 1) ** 2).mean()
        local.backward()
        optimizer.step()
        close(loss.detach(), local.detach())
    close([w.detach() for w in leaves], [w.detach() for w in twins])
    del rref


def update(ctx: int, rate: float) -> None:
    """One step of gradient descent on this worker."""
    weight = weights[current_worker().name]
    with torch.no_grad():
        weight -= rate * gw.get_gradients(ctx)[weight]


# Tensors that are changed as soon as they have arrived

kept: dict[str, Tensor] = {}


def answer_to(x: Tensor) -> Tensor:
    return x * 5


def sends(way: str, to: str, x: Tensor) -> Callable[[], Tensor]:
    """Send it in some way; how to get the answer."""
    if way == "sync":
        result: Tensor = gw.rpc_sync(to, answer_to, (x,))
        return lambda: result
    if way == "async":
        return gw.rpc_async(to, answer_to, (x,)).wait
    return gw.remote(to, answer_to, (x,)).to_here


@pytest.mark.parametrize("to", ["worker0", "worker1"])
@pytest.mark.parametrize("way", ["sync", "async", "remote"])
@pytest.mark.parametrize("is_full", [False, True])
def test_what_was_sent_may_be_changed_in_place_at_once(
    workers: Workers, to: str, way: str, is_full: bool
) -> None:
    for _ in range(20):  # `remote` holds requests back when that pays
        with gw.context() as context:
            x = doubles(SMALL)
            y = x * 2
            answer = sends(way, to, y)
            y.mul_(3)
            gw.backward(context, [answer().sum()], create_graph=is_full)
            close(gw.get_gradients(context)[x].detach(), torch.full_like(x, 10))


def doubled(x: Tensor) -> Tensor:
    kept["doubled"] = x * 2
    return kept["doubled"]


def change_what_was_returned() -> None:
    kept["doubled"].mul_(3)


def test_what_is_asked_for_next_does_not_change_what_was_returned(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that returned it is late with what it does afterwards."""
    has_changed, caller = threading.Event(), threading.current_thread()
    look = recording.look_at_graph

    def look_late(seen: Context) -> None:
        if threading.current_thread() is not caller:
            assert has_changed.wait(LIMIT)
        look(seen)

    monkeypatch.setattr(recording, "look_at_graph", look_late)
    with gw.context() as context:
        x = doubles(SMALL)
        y = gw.rpc_sync("worker1", doubled, args=(x,))
        gw.rpc_async("worker1", change_what_was_returned).wait()
        has_changed.set()
        gw.backward(context, [y.sum()])
        close(gw.get_gradients(context), {x: torch.full_like(x, 2)})
