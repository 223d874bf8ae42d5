"""A warning where a tensor that requires grad goes to another worker without a context."""

import contextvars
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.api import current_worker
from gradwire.compat.rpc.agents import KINDS
from gradwire.testing import World
from tests.autograd.functions import doubles

LOST = "no gradients will flow back"


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with World(2) as world, world.as_worker(0):
        yield


def warned(func: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        func()
    return [each for each in caught if each.category is gw.LostGradientWarning]


def double(x: Tensor) -> Tensor:
    return x * 2


weight = doubles(3)


def weigh(x: Tensor) -> Tensor:
    return x * weight


def test_an_argument_that_requires_grad_is_warned_of_once_for_a_line() -> None:
    x = doubles(3)

    def call() -> None:
        for _ in range(3):
            gw.rpc_sync("worker1", torch.sum, (x,))

    of_arguments = [w for w in warned(call) if "argument" in str(w.message)]
    (warning,) = of_arguments
    assert LOST in str(warning.message)
    assert "gradwire.context()" in str(warning.message)
    assert "see LostGradientWarning in docs/errors.md" in str(warning.message)
    assert warning.filename == __file__
    assert warning.lineno == call.__code__.co_firstlineno + 2


def test_the_line_that_calls_a_module_is_named_not_torchs_own() -> None:
    def call() -> None:
        remote(x)

    remote, x = gw.RemoteModule("worker1", torch.nn.Identity), doubles(3)
    (warning,) = [w for w in warned(call) if "argument" in str(w.message)]
    assert (warning.filename, warning.lineno) == (
        __file__,
        call.__code__.co_firstlineno + 1,
    )


@pytest.mark.parametrize("call", [gw.rpc_sync, gw.rpc_async, gw.remote])
def test_every_way_to_call_is_warned_of(call: Callable[..., object]) -> None:
    x = doubles(3)

    def do() -> None:
        made = call("worker1", torch.sum, (x.detach() * weight,))
        getattr(made, "wait", getattr(made, "to_here", lambda: None))()

    assert len(warned(do)) == 1


def test_a_result_that_requires_grad_is_warned_of_where_the_function_stands() -> None:
    x = torch.ones(3)

    def call() -> None:
        for _ in range(2):
            gw.rpc_sync("worker1", weigh, (x,))

    (warning,) = warned(call)
    assert "the result of weigh" in str(warning.message)
    assert warning.filename == __file__
    assert warning.lineno == weigh.__code__.co_firstlineno


def in_context(x: Tensor) -> None:
    with gw.context():
        gw.rpc_sync("worker1", weigh, (x,))


def without_grad(x: Tensor) -> None:
    with torch.no_grad():
        gw.rpc_sync("worker1", weigh, (x,))


def detached(x: Tensor) -> None:
    gw.rpc_sync("worker1", double, (x.detach(),))


@pytest.mark.parametrize("work", [in_context, without_grad, detached])
def test_what_is_meant_is_not_warned_of(work: Callable[[Tensor], None]) -> None:
    assert warned(lambda: work(doubles(3))) == []


def test_a_thread_that_was_not_given_the_context_is_told_how() -> None:
    x = doubles(3)

    worker = current_worker()

    def work() -> None:
        worker.rpc_sync("worker1", torch.neg, (x,))

    def start(target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()

    def run() -> None:
        with gw.context():
            run_here = contextvars.copy_context().run
            start(lambda: run_here(work))
            start(work)

    (warning,) = [w for w in warned(run) if "argument" in str(w.message)]
    assert "contextvars.copy_context().run" in str(warning.message)


def test_a_filter_turns_it_off() -> None:
    x = doubles(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", gw.LostGradientWarning)
        gw.rpc_sync("worker1", torch.sum, (x,))


def test_programs_for_torch_are_not_warned() -> None:
    assert not KINDS.warns
