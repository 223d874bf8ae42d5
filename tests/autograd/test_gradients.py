"""Where gradients go: the context, copied only where they must be; hooks; `.grad` on demand."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from tests.autograd.functions import doubles, there_and_back
from tests.worlds import Autograds, autograds, together

close = torch.testing.assert_close


class Passes(Function):
    """Hands its gradient on as it is, to each of its inputs, and notes where it lies."""

    where = 0
    kept: Tensor | None = None
    keeps = False

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.count = len(tensors)
        return tensors[0] * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        sparse = gradient.layout is torch.sparse_coo
        Passes.where = (gradient._values() if sparse else gradient).data_ptr()
        Passes.kept = gradient if Passes.keeps else None
        return (gradient,) * ctx.count


class Expands(Function):
    """Yields a gradient that is one number, seen many times."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.size = tensor.size()
        return torch.ones(1)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        return torch.ones(1).expand(ctx.size)


def gradients(root: Tensor) -> dict[Tensor, Tensor]:
    with autograds(1) as world, world[0].context() as context:
        world[0].backward(context, [root])
        return world[0].get_gradients(context)


def test_a_buffer_that_nobody_else_has_is_kept() -> None:
    a = torch.randn(5, 6, requires_grad=True)
    found = gradients(Passes.apply(a)[1][0])
    assert found[a].data_ptr() == Passes.where


def test_a_buffer_of_two_leaves_is_copied_for_both() -> None:
    a, b = (torch.randn(5, 6, requires_grad=True) for _ in range(2))
    found = gradients(Passes.apply(a, b)[1][0])
    assert len({found[a].data_ptr(), found[b].data_ptr(), Passes.where}) == 3


def test_a_buffer_that_overlaps_itself_is_copied() -> None:
    a, b = (torch.randn(5, 6, requires_grad=True) for _ in range(2))
    found = gradients(Expands.apply(Passes.apply(a, b)))
    assert found[a].is_contiguous()
    assert Passes.where not in (found[a].data_ptr(), found[b].data_ptr())


def test_a_buffer_that_a_backward_keeps_is_copied() -> None:
    a = torch.randn(5, 6, requires_grad=True)
    Passes.keeps = True
    try:
        found = gradients(Passes.apply(a)[1][0])
        assert found[a].data_ptr() != Passes.where
    finally:
        Passes.keeps, Passes.kept = False, None


def test_views_of_one_buffer_are_copied() -> None:
    a, b = (torch.randn(6, requires_grad=True) for _ in range(2))
    found = gradients((Passes.apply(a.view(2, 3)) + b.view(2, 3)).tanh().sum())
    assert (
        found[a].untyped_storage().data_ptr() != found[b].untyped_storage().data_ptr()
    )


def test_a_gradient_is_laid_out_like_its_leaf() -> None:
    a = torch.randn(3, 4).t().requires_grad_()
    found = gradients((a * torch.randn(4, 3)).sum())
    assert found[a].stride() == a.stride()


def test_a_sparse_buffer_is_kept() -> None:
    a = torch.randn(10, 3, requires_grad=True)
    where, offsets = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 4])
    matrix = Passes.apply(a)
    bag = torch.nn.functional.embedding_bag(where, matrix, offsets, sparse=True)
    found = gradients(bag.sum())
    assert found[a].is_sparse
    assert found[a]._values().data_ptr() == Passes.where


def test_dense_and_sparse_gradients_of_a_leaf_add_up() -> None:
    with autograds(1) as world, world[0].context() as context:
        a = torch.randn(4, 2, requires_grad=True)
        picked = torch.nn.functional.embedding(torch.tensor([1]), a, sparse=True).sum()
        for roots in ([picked], [(a * 2).sum()]):
            world[0].backward(context, roots, retain_graph=True)
        expected = torch.full((4, 2), 2.0)
        expected[1] += 1
        close(world[0].get_gradients(context)[a], expected)


def memory(*tensors: Tensor) -> int:
    """In how many places they lie."""
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors})


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("func", [torch.cat, sum], ids=["views", "the same"])
def test_what_comes_back_for_leaves_has_memory_of_its_own(func: Any, to: int) -> None:
    with autograds(2) as world, world[0].context() as context:
        leaves = x, y, z = doubles(3), doubles(3), doubles(3)
        there = world.transfer(0, to, context, [x, y])
        there += world.transfer(0, to, context, [z])
        (back,) = world.transfer(to, 0, context, [func(there)])
        weights = torch.arange(1.0, back.numel() + 1)
        world[0].backward(context, [(back * weights).sum()])
        found = world[0].get_gradients(context)
        wanted = torch.autograd.grad((func(leaves) * weights).sum(), leaves)
        close([found[leaf] for leaf in leaves], [*wanted])
        assert memory(*found.values()) == 3


@pytest.mark.parametrize("passes", [1, 2])
def test_what_comes_back_is_laid_out_like_its_leaf(passes: int) -> None:
    with autograds(2) as world, world[0].context() as context:
        odd = torch.rand(3, 4).t().requires_grad_()
        plain = torch.rand(4, 3, requires_grad=True)
        a, b = world.transfer(0, 1, context, [odd, plain])
        (back,) = world.transfer(1, 0, context, [(a * 2 + (b * 3).t().t())])
        for _ in range(passes):
            world[0].backward(context, [back.sum()], retain_graph=True)
        found = world[0].get_gradients(context)
        assert found[odd].stride() == odd.stride()
        assert found[plain].is_contiguous()
        close(
            found,
            {
                odd: torch.full((4, 3), 2.0 * passes),
                plain: 3.0 * passes + torch.zeros(4, 3),
            },
        )


def test_a_gradient_in_another_order_is_put_in_that_of_its_leaf() -> None:
    with autograds(2) as world, world[0].context() as context:
        leaf = torch.rand(100, 100, requires_grad=True)  # not small: sent as it lies
        (there,) = world.transfer(0, 1, context, [leaf])
        (back,) = world.transfer(1, 0, context, [there.t() * 1])
        world[0].backward(context, [(back * torch.rand(100, 100)).sum()])
        assert world[0].get_gradients(context)[leaf].is_contiguous()


def test_a_sparse_gradient_comes_back_as_one() -> None:
    with autograds(2) as world, world[0].context() as context:
        weight = torch.rand(4, 3, requires_grad=True)
        (there,) = world.transfer(0, 1, context, [weight])
        rows = torch.nn.functional.embedding(torch.tensor([1, 1]), there, sparse=True)
        (back,) = world.transfer(1, 0, context, [rows])
        for _ in range(2):
            world[0].backward(context, [back.sum()], retain_graph=True)
        found = world[0].get_gradients(context)[weight]
        assert found.layout is torch.sparse_coo
        close(found.to_dense()[1], torch.full((3,), 4.0))


def test_gradients_that_were_handed_out_are_left_alone() -> None:
    with autograds(1) as world, world[0].context() as context:
        a = doubles(3)
        loss = (a * 2).sum()
        world[0].backward(context, [loss], retain_graph=True)
        first = world[0].get_gradients(context)[a]
        world[0].backward(context, [loss], retain_graph=True)
        close(first, torch.full_like(a, 2.0))
        close(world[0].get_gradients(context)[a], torch.full_like(a, 4.0))


def test_hooks_of_leaves_are_run_and_change_gradients() -> None:
    a = doubles(3)
    a.register_hook(lambda gradient: gradient * 2)
    close(gradients(a.sum())[a], torch.full_like(a, 2.0))


def test_hooks_of_the_nodes_behind_leaves_are_run() -> None:
    a = doubles(3)
    double = a + a
    called: list[str] = []
    assert double.grad_fn is not None
    first, second = (node for node, _ in double.grad_fn.next_functions)
    assert first is not None
    assert second is not None
    first.register_hook(lambda *_: called.append("one"))
    first.register_hook(lambda *_: called.append("two"))
    gone = second.register_hook(lambda *_: called.append("gone"))
    gone.remove()
    found = gradients(double.sum())
    assert called == ["one", "two"]
    assert list(found) == [a]


def test_an_error_in_a_hook_is_an_error_of_the_pass() -> None:
    a = doubles(3)
    made = a * 2
    assert made.grad_fn is not None
    node = made.grad_fn.next_functions[0][0]

    def hook(*_: object) -> None:
        raise ValueError("no")

    assert node is not None
    node.register_hook(hook)
    with pytest.raises(RuntimeError, match="Error on Node 0: no"):
        gradients(made.sum())


def everywhere(world: Autograds, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """A loss on worker 0, and the leaves of workers 0 and 1 that it depends on."""
    a, b = doubles(3), doubles(3)
    (there,) = world.transfer(0, 1, context, [a])
    (back,) = world.transfer(1, 0, context, [there * b])
    return back.sum(), a, b


def test_accumulate_also_fills_grad_on_all_workers() -> None:
    with autograds(2) as world, world[0].context() as context:
        loss, a, b = everywhere(world, context)
        seen: list[Tensor] = []
        a.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf))
        a.grad = torch.ones_like(a)
        world[0].backward(context, [loss], accumulate=True)
        close(a.grad, 1 + b.detach())
        close(b.grad, a.detach())
        close(world[0].get_gradients(context), {a: b.detach()})
        assert len(seen) == 1
        assert seen[0] is a
        assert b.grad is not world[1].get_gradients(context)[b]


def test_grad_is_otherwise_left_alone() -> None:
    with autograds(2) as world, world[0].context() as context:
        loss, a, b = everywhere(world, context)
        world[0].backward(context, [loss])
        assert a.grad is None
        assert b.grad is None


def test_grad_is_added_to_in_place_as_torch_does() -> None:
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        buffer = torch.ones_like(x)
        x.grad = buffer
        loss = there_and_back(world, context, x, lambda there: there * 2).sum()
        world[0].backward(context, [loss], accumulate=True)
        assert x.grad is buffer
        close(buffer, torch.full_like(buffer, 3.0))


def test_passes_of_several_contexts_add_to_one_grad() -> None:
    count, rounds = 6, 20
    leaf = torch.zeros(20_000, requires_grad=True)  # to add takes a while
    with autograds(2) as world:

        def work() -> None:
            for _ in range(rounds):
                with world[0].context() as context:
                    (there,) = world.transfer(0, 1, context, [torch.ones(20_000)])
                    (back,) = world.transfer(1, 0, context, [there * leaf])
                    world[0].backward(context, [back.sum()], accumulate=True)

        together(*[work] * count)
    assert leaf.grad is not None
    close(leaf.grad, torch.full_like(leaf, float(count * rounds)))


def test_leaves_do_not_share_a_gradient_that_has_a_history() -> None:
    with autograds(2) as world, world[0].context() as context:
        a, b = doubles(3), doubles(3)
        loss = there_and_back(world, context, a + b, lambda there: there**2).sum()
        world[0].backward(context, [loss], create_graph=True)
        found = world[0].get_gradients(context)
        assert found[a].data_ptr() != found[b].data_ptr()
        close(torch.autograd.grad(found[a].sum(), [found[a]])[0], torch.ones_like(a))
        assert found[a].requires_grad
