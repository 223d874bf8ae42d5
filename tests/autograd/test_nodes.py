"""What PyTorch's C++ tests ask of its nodes and its engine, asked of ours."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire._autograd.messages import (
    Answer,
    Delivery,
    Failed,
    Header,
    Load,
    request,
    unpack,
)
from gradwire.errors import ProtocolError
from tests.autograd.functions import doubles
from tests.worlds import Autograds, autograds, wait_until

ONES = torch.ones(3, dtype=torch.float64)


def ask(
    world: Autograds, context: int, send: int, gradients: Sequence[Tensor | None]
) -> Any:
    """Have worker 1 ask worker 0 to run one send, as a pass of its own."""
    number = world[1]._passes.next()
    header = Header(context, number, 0, number)
    message = request(header, Load([Delivery(send, gradients)]))
    return unpack(world[1].request(0, message).wait(), 0)


def test_a_send_knows_whom_it_went_to() -> None:
    with autograds(2) as world, world[0].context() as number:
        world.transfer(0, 1, number, [doubles(3), doubles(3)])
        context = world[0].contexts.get(number)
        assert context.known == {1}
        assert len(context.sends) == 1


def test_a_send_refuses_gradients_as_inputs() -> None:
    """They come by message: whatever torch's own engine gives to the node is refused."""
    with autograds(2) as world, world[0].context() as number:
        world.transfer(0, 1, number, [doubles(3) * 2, doubles(3) * 2])
        (send,) = world[0].contexts.get(number).sends.values()
        assert type(send.node).__name__.endswith("SendRpcBackward")
        with pytest.raises(RuntimeError, match="distributed backward pass"):
            torch.autograd.backward([send.output], [torch.ones_like(send.output)])


@pytest.mark.parametrize("count", [1, 3])
def test_a_send_refuses_another_number_of_gradients(count: int) -> None:
    with autograds(2) as world, world[0].context() as number:
        world.transfer(0, 1, number, [doubles(3) * 2, doubles(3) * 3])
        (send,) = world[0].contexts.get(number).sends
        answer = ask(world, number, send, [ONES] * count)
        assert isinstance(answer, Failed)
        assert f"send {send} of 2 tensors got {count} gradients" in answer.message
        assert world[0].get_gradients(number) == {}


def test_a_send_refuses_to_be_run_without_any_gradient() -> None:
    """Whoever has none says so in another way (a void): this cannot be meant."""
    with autograds(2) as world, world[0].context() as number:
        world.transfer(0, 1, number, [doubles(3) * 2])
        (send,) = world[0].contexts.get(number).sends
        with pytest.raises(ProtocolError, match=f"send {send} lacks gradients"):
            ask(world, number, send, [])
        assert world[0].get_gradients(number) == {}


def test_behind_an_undefined_gradient_nothing_is_run() -> None:
    """torch refuses one; here a tensor of a message whose result is not used has none."""
    with autograds(2) as world, world[0].context() as number:
        a, b = doubles(3), doubles(3)
        world.transfer(0, 1, number, [a * 2, b * 3])
        (send,) = world[0].contexts.get(number).sends
        assert isinstance(ask(world, number, send, [ONES, None]), Answer)
        torch.testing.assert_close(world[0].get_gradients(number), {a: 2 * ONES})


def test_a_send_is_run_by_itself_and_leaves_no_pass_under_way() -> None:
    with autograds(2) as world, world[0].context() as number:
        a = doubles(3)
        world.transfer(0, 1, number, [a * 2])
        (send,) = world[0].contexts.get(number).sends
        assert isinstance(ask(world, number, send, [ONES]), Answer)
        torch.testing.assert_close(world[0].get_gradients(number), {a: 2 * ONES})
        wait_until(lambda: not world.passes())


def test_a_local_graph_is_run_and_leaves_no_pass_under_way() -> None:
    with autograds(1) as world, world[0].context() as number:
        x, y = doubles(2, 2), doubles(2, 2)
        world[0].backward(number, [(x * x + y * y).sum()])
        expected = {x: 2 * x.detach(), y: 2 * y.detach()}
        torch.testing.assert_close(world[0].get_gradients(number), expected)
        assert world.passes() == 0


def test_counters_say_what_is_there() -> None:
    with autograds(2) as world:
        none = {"num_current_backward_passes": 0, "num_autograd_contexts": 0}
        assert world[0].debug_info() == none
        with world[0].context() as number:
            world.transfer(0, 1, number, [doubles(3)])
            counts = [each.debug_info()["num_autograd_contexts"] for each in world]
            assert counts == [1, 1]
        wait_until(lambda: all(each.debug_info() == none for each in world))
