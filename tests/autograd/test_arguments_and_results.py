"""Distributed autograd and what calls carry: what is recorded of it, and its gradients."""

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from tests.autograd.functions import doubles
from tests.autograd.weights import (
    Way,
    applied_locally,
    apply_weight,
    check_gradients,
    close,
    known,
    recorded,
    same,
    two_ways,
    weights,
    world_with_weights,
)
from tests.worlds import orders

LARGE = 40_000
"""Elements that do not fit into a message itself."""


# What calls carry


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Batch:
    inputs: dict[str, Tensor]
    pairs: list[Pair]
    note: str
    numbers: Tensor


def take_apart(batch: Batch, *, scale: Tensor) -> dict[str, Any]:
    a, b = batch.inputs["a"], batch.inputs["b"]
    (pair,) = batch.pairs
    return {
        "sums": [a * pair.first * scale, (b - pair.second,)],
        "batch": Batch({"a": a}, [Pair(b, a * b)], batch.note, batch.numbers + 1),
    }


@two_ways
def test_tensors_deep_inside_arguments_and_results(call: Way) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        a, b, c, scale = (doubles(3) for _ in range(4))

        def make() -> tuple[Batch, Tensor]:
            pairs = [Pair(a * b, torch.ones(3, dtype=torch.float64))]
            return Batch({"a": a, "b": b * c}, pairs, "note", torch.arange(3)), scale

        def reduce(result: dict[str, Any]) -> Tensor:
            first, (second,) = result["sums"]
            batch = result["batch"]
            (pair,) = batch.pairs
            assert batch.note == "note"
            close(batch.numbers, torch.arange(3) + 1)
            total: Tensor = first * second + batch.inputs["a"] * pair.first
            return (total * pair.second).sum()

        batch, by = make()
        result = call("worker1", apply_with, (take_apart, (batch,), {"scale": by}))
        gw.backward(ctx, [reduce(result)])
        batch, by = make()
        local = reduce(take_apart(batch, scale=by))
        check_gradients(world, ctx, local, [[a, b, c, scale], []])


def apply_with(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


@two_ways
@pytest.mark.parametrize("to", [0, 1])
def test_parameters_get_their_gradient(call: Way, to: int) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        p, x = nn.Parameter(torch.rand(3, dtype=torch.float64)), doubles(3)
        y = call(f"worker{to}", torch.mul, (p, x))
        z = call(f"worker{to}", torch.stack, ([p, x],))
        gw.backward(ctx, [y.sum() + (z**2).sum()])
        local = (p * x).sum() + (p**2).sum() + (x**2).sum()
        check_gradients(world, ctx, local, [[p, x], []])


def own_parameter() -> Tensor:
    return weights["parameter"]


@two_ways
def test_parameters_as_results_get_their_gradient_where_they_are(call: Way) -> None:
    parameter = nn.Parameter(torch.rand(3, dtype=torch.float64))
    with world_with_weights(2) as world, gw.context() as ctx:
        weights["parameter"] = parameter
        y = call("worker1", own_parameter, ())
        assert type(y) is nn.Parameter
        gw.backward(ctx, [(y * y).sum()])
        local = (parameter * parameter).sum()
        check_gradients(world, ctx, local, [[], [parameter]])


def run_module(module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = module(x)
    return result


def test_the_parameters_of_a_module_that_travels_get_their_gradients() -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        module, x = nn.Linear(3, 2).double(), doubles(4, 3)
        y = gw.rpc_sync("worker1", run_module, (module, x))
        gw.backward(ctx, [(y**2).sum()])
        local = (module(x) ** 2).sum()
        check_gradients(world, ctx, local, [[*module.parameters(), x], []])


class Tagged(Tensor):
    """A tensor with a word on it."""

    tag: str


def tagged(tensor: Tensor, tag: str) -> Tagged:
    made = tensor.as_subclass(Tagged)
    made.tag = tag
    return made


def retag(x: Tagged) -> Tagged:
    assert type(x) is Tagged
    return tagged(apply_weight(x), x.tag + " again")


@two_ways
def test_subclasses_of_tensors_get_their_gradient(call: Way) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        leaf = tagged(torch.rand(3, dtype=torch.float64), "leaf").requires_grad_()
        x = doubles(3)
        y = call("worker1", retag, (leaf,))
        z = call("worker1", retag, (tagged(x * 2, "x"),))
        assert type(y) is type(z) is Tagged
        assert (y.tag, z.tag) == ("leaf again", "x again")
        gw.backward(ctx, [(y * z).sum().as_subclass(Tensor)])
        local = (applied_locally(leaf, 1) * applied_locally(x * 2, 1)).sum()
        check_gradients(world, ctx, local, [[leaf, x], [weights["worker1"]]])


class Sealed(Tensor):
    """Says itself how it is pickled."""

    seal = "none"

    def __reduce_ex__(self, protocol: Any) -> Any:
        inner = self.detach().as_subclass(Tensor)
        return sealed, (inner, self.seal, self.requires_grad)


def sealed(tensor: Tensor, seal: str, grad: bool = False) -> Sealed:
    made = tensor.as_subclass(Sealed).requires_grad_(grad or tensor.requires_grad)
    made.seal = seal
    return made


def reseal(x: Sealed) -> Sealed:
    assert type(x) is Sealed
    return sealed(apply_weight(x), x.seal + " again")


@two_ways
def test_subclasses_that_pickle_themselves_get_their_gradient(call: Way) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x, leaf = doubles(3), sealed(torch.rand(3, dtype=torch.float64), "leaf", True)
        y = call("worker1", reseal, (sealed(x * 2, "wax"),))
        z = call("worker1", reseal, (leaf,))
        assert type(y) is type(z) is Sealed
        assert (y.seal, z.seal) == ("wax again", "leaf again")
        gw.backward(ctx, [(y * z).sum().as_subclass(Tensor)])
        local = (applied_locally(x * 2, 1) * applied_locally(leaf, 1)).sum()
        check_gradients(world, ctx, local, [[x, leaf], [weights["worker1"]]])


def mix(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    a, b, c = tensors
    return a * b, [b * c, c]


def test_kinds_of_tensors_side_by_side() -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        leaf = tagged(torch.rand(3, dtype=torch.float64), "leaf").requires_grad_()
        x, p = doubles(3), nn.Parameter(torch.rand(3, dtype=torch.float64))
        ab, (bc, c) = gw.rpc_sync("worker1", mix, ([x, p, leaf],))
        gw.backward(ctx, [(ab * bc * c).sum().as_subclass(Tensor)])
        local = (x * p * p * leaf * leaf).sum()
        check_gradients(world, ctx, local, [[x, p, leaf], []])


def views(x: Tensor) -> list[Tensor]:
    return [x[0], x[1:], x.t(), x.expand(2, 3, 3), x.diagonal(), x.view(9)[::2]]


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("in_list", [False, True])
def test_views_as_arguments(index: int, in_list: bool) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x = doubles(3, 3)
        view = views(x * 2)[index]
        if in_list:
            y = gw.rpc_sync("worker1", torch.stack, ([view, view],))
        else:
            y = gw.rpc_sync("worker1", torch.mul, (view, view))
        gw.backward(ctx, [(y**2).sum()])
        view = views(x * 2)[index]
        local = torch.stack([view, view]) if in_list else view * view
        check_gradients(world, ctx, (local**2).sum(), [[x], []])


def weigh_views(x: Tensor) -> list[Tensor]:
    return views(x * weights["square"])


def test_views_as_results() -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x = doubles(3, 3)
        weights["square"] = doubles(3, 3)
        found = gw.rpc_sync("worker1", weigh_views, (x,))
        gw.backward(ctx, [sum((view**2).sum() for view in found)])  # type: ignore[list-item]
        local = sum((view**2).sum() for view in weigh_views(x))
        assert isinstance(local, Tensor)
        check_gradients(world, ctx, local, [[x], [weights["square"]]])


def change(tensors: list[Tensor]) -> list[Tensor]:
    """Changes in place what arrived."""
    a, b = tensors
    a.add_(b)
    b.mul_(3)
    return [a, b]


def change_one(x: Tensor) -> Tensor:
    x.mul_(3)
    x[0] = 7
    return x


@pytest.mark.parametrize("size", [3, LARGE])
def test_what_arrived_can_be_changed_in_place(size: int) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x, y = doubles(size), doubles(size)
        a, b = gw.rpc_sync("worker1", change, ([x * 1, y * 1],))
        c = gw.rpc_sync("worker1", change_one, (x * 1,))
        c.mul_(y)
        gw.backward(ctx, [(a * b + c).sum()])
        a, b = change([x * 1, y * 1])
        c = change_one(x * 1) * y
        check_gradients(world, ctx, (a * b + c).sum(), [[x, y], []])
        assert not any(found._is_view() for found in gw.get_gradients(ctx).values())


def change_views(tensors: list[Tensor]) -> Tensor:
    first, second, whole, constant = tensors
    whole.mul_(3)
    first.add_(second)
    constant.zero_()
    return first * second * whole[:2]


@pytest.mark.parametrize("size", [4, LARGE])
def test_views_of_one_tensor_do_not_share_memory_once_they_have_a_history(
    size: int,
) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x = doubles(size)
        h = x * 2
        views = [h[:2], h[1:3], h, h.detach()]
        y = gw.rpc_sync("worker1", change_views, (views,))
        gw.backward(ctx, [(y * y).sum()], retain_graph=True)
        local = change_views([view.clone() for view in views])
        close(y, local)
        check_gradients(world, ctx, (local * local).sum(), [[x], []])


def sparse(*, grad: bool = True) -> Tensor:
    places = torch.tensor([[0, 1, 1], [2, 0, 2]])
    made = torch.sparse_coo_tensor(
        places, torch.rand(3, dtype=torch.float64), (3, 3), check_invariants=False
    )
    return made.coalesce().detach().requires_grad_(grad)


@two_ways
def test_sparse_tensors_as_arguments_and_results(call: Way) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        s, t, constant = sparse(), sparse(), sparse(grad=False)
        y = call("worker1", torch.add, (s, t))
        z = call("worker1", torch.add, (s, constant))
        assert y.layout is z.layout is torch.sparse_coo
        gw.backward(ctx, [torch.sparse.sum(y) + torch.sparse.sum(z)])
        local = torch.sparse.sum(s + t) + torch.sparse.sum(s + constant)
        expected = torch.autograd.grad(local, [s, t])
        found = gw.get_gradients(ctx)
        assert set(found) == {s, t}
        for leaf, gradient in zip((s, t), expected, strict=True):
            close(found[leaf].to_dense(), gradient.to_dense())
        assert world[1].autograd.get_gradients(ctx) == {}


def test_sparse_times_dense() -> None:
    with world_with_weights(2), gw.context() as ctx:
        s, x = sparse(), doubles(3, 2)
        y = gw.rpc_sync("worker1", torch.sparse.mm, (s, x))
        gw.backward(ctx, [(y**2).sum()])
        gs, gx = torch.autograd.grad((torch.sparse.mm(s, x) ** 2).sum(), [s, x])
        found = gw.get_gradients(ctx)
        close(found[s].to_dense(), gs.to_dense())
        close(found[x], gx)


def test_gradients_of_leaves_in_other_sparse_layouts() -> None:
    with world_with_weights(2), gw.context() as ctx:
        s = torch.eye(3, dtype=torch.float64).to_sparse_csr().requires_grad_()
        x = doubles(3, 2)
        y = gw.rpc_sync("worker1", torch.matmul, (s, x))
        gw.backward(ctx, [(y**2).sum()])
        gs, gx = torch.autograd.grad((torch.matmul(s, x) ** 2).sum(), [s, x])
        found = gw.get_gradients(ctx)
        close(found[s].to_dense(), gs.to_dense())
        close(found[x], gx)


def test_a_value_fetched_without_gradients_has_no_history() -> None:
    with world_with_weights(2), gw.context():
        rref = gw.remote("worker1", torch.mul, (doubles(3), 2))
        assert rref.to_here().grad_fn is not None
        with torch.no_grad():
            assert rref.to_here().grad_fn is None


bags: list[nn.EmbeddingBag] = []


def look_up(words: Tensor, starts: Tensor) -> Tensor:
    result: Tensor = bags[0](words, starts)
    return result


def test_sparse_gradients_of_an_embedding_bag_add_up() -> None:
    bags[:] = [nn.EmbeddingBag(10, 4, mode="sum", sparse=True).double()]
    batches = [torch.tensor([1, 2, 4, 5]), torch.tensor([4, 3, 2, 9])]
    starts = torch.tensor([0, 2])
    with world_with_weights(2) as world, gw.context() as ctx:
        found = [gw.rpc_sync("worker1", look_up, (words, starts)) for words in batches]
        gw.backward(ctx, [(found[0] * found[1]).sum()], retain_graph=True)
        gw.backward(ctx, [found[0].sum()])
        a, b = (look_up(words, starts) for words in batches)
        weight = bags[0].weight
        (expected,) = torch.autograd.grad((a * b).sum() + a.sum(), [weight])
        assert gw.get_gradients(ctx) == {}
        ((leaf, gradient),) = world[1].autograd.get_gradients(ctx).items()
        assert leaf is weight
        assert gradient.is_sparse
        close(gradient.to_dense(), expected.to_dense())


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def widen(tensors: list[Tensor], numbers: Tensor) -> list[Tensor]:
    return [tensor * numbers for tensor in tensors]


def test_dtypes_side_by_side() -> None:
    with world_with_weights(2), gw.context() as ctx:
        leaves = [torch.rand(3).to(dtype).requires_grad_() for dtype in DTYPES]
        numbers = torch.tensor([1, 2, 3])
        found = gw.rpc_sync("worker1", widen, (leaves, numbers))
        assert [tensor.dtype for tensor in found] == DTYPES
        gw.backward(ctx, [(tensor.abs() ** 2).sum() for tensor in found])
        squares = [(tensor.abs() ** 2).sum() for tensor in widen(leaves, numbers)]
        expected = torch.autograd.grad(squares, leaves)
        close(gw.get_gradients(ctx), dict(zip(leaves, expected, strict=True)))


def test_a_gradient_in_another_dtype_than_what_it_flows_into() -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x = torch.rand(3, requires_grad=True)
        y = gw.rpc_sync("worker1", apply_weight, (x,))  # in double precision there
        assert y.dtype is torch.float64
        gw.backward(ctx, [y.sum()])
        local = applied_locally(x, 1).sum()
        check_gradients(world, ctx, local, [[x], [weights["worker1"]]])


def split(mixed: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Of four: with and without a gradient, and numbers."""
    a, b, c, numbers = mixed
    return a * b, c * 2, numbers + 1


@pytest.mark.parametrize("spread", [False, True])
def test_only_what_needs_a_gradient_is_recorded(spread: bool) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        a, b, c = doubles(3), doubles(3).detach(), doubles(3).detach()
        mixed = [a, b, c, torch.arange(3)]
        if spread:
            ab, c2, numbers = gw.rpc_sync("worker1", split_spread, mixed)
        else:
            ab, c2, numbers = gw.rpc_sync("worker1", split, (mixed,))
        assert (ab.requires_grad, c2.requires_grad) == (True, False)
        assert not numbers.requires_grad
        close(numbers, torch.arange(3) + 1)
        assert recorded(world, ctx) == [(1, 1), (1, 1)]
        for context in known(world, ctx):
            (send,), (recv,) = context.sends.values(), context.recvs.values()
            assert send.crossing.count == recv.crossing.count == 1
        gw.backward(ctx, [(ab * c2 * numbers).sum()])
        local = (a * b * c * 2 * (torch.arange(3) + 1)).sum()
        check_gradients(world, ctx, local, [[a], []])


def split_spread(*mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return split(list(mixed))


@two_ways
@pytest.mark.parametrize("in_list", [False, True])
def test_large_tensors(call: Way, in_list: bool) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x, y = doubles(LARGE), doubles(LARGE)
        if in_list:
            z = call("worker1", torch.stack, ([x * 2, y],))
            local = torch.stack([x * 2, y])
        else:
            z = call("worker1", torch.mul, (x * 2, y))
            local = x * 2 * y
        gw.backward(ctx, [(z**2).sum()])
        check_gradients(world, ctx, (local**2).sum(), [[x, y], []])


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3)])
def test_shapes_of_few_elements(shape: tuple[int, ...]) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x = torch.rand(shape, dtype=torch.float64, requires_grad=True)
        y = gw.rpc_sync("worker1", torch.exp, (x,))
        gw.backward(ctx, [y.sum()])
        check_gradients(world, ctx, torch.exp(x).sum(), [[x], []])


def twice(pair: list[Tensor]) -> Tensor:
    return pair[0] * torch.sin(pair[1])


@pytest.mark.parametrize("is_leaf", [False, True])
def test_the_same_tensor_twice(is_leaf: bool) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x = doubles(3)
        h = x if is_leaf else x * 2
        y = gw.rpc_sync("worker1", torch.mul, (h, h))
        z = gw.rpc_sync("worker1", twice, ([h, h],))
        a, b = gw.rpc_sync("worker1", same, ((h, h),))
        gw.backward(ctx, [(y * z + a * a * b).sum()], retain_graph=True)
        local = (h * h * h * torch.sin(h) + h**3).sum()
        check_gradients(world, ctx, local, [[x], []])


@two_ways
@pytest.mark.parametrize("is_leaf", [False, True])
@pytest.mark.parametrize("in_list", [False, True])
def test_a_tensor_that_is_passed_through(
    call: Way, is_leaf: bool, in_list: bool
) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x = doubles(3)
        h = x if is_leaf else x * 2
        y = call("worker1", same, ([h],))[0] if in_list else call("worker1", same, (h,))
        gw.backward(ctx, [(y * h * h).sum()], retain_graph=True)
        check_gradients(world, ctx, (h**3).sum(), [[x], []])


@orders
def test_a_tensor_that_goes_back_and_forth(seed: int | None) -> None:
    with world_with_weights(3, seed=seed) as world, gw.context() as ctx:
        x = doubles(3)
        y = x
        for round_trip in range(6):
            y = gw.rpc_sync(f"worker{1 + round_trip % 2}", apply_weight, (y + x,))
        gw.backward(ctx, [y.sum()])
        local = x
        for round_trip in range(6):
            local = applied_locally(local + x, 1 + round_trip % 2)
        own = [[x], [weights["worker1"]], [weights["worker2"]]]
        check_gradients(world, ctx, local.sum(), own)


class ByPickle:
    """A serializer of a user's own."""

    def dumps(self, obj: Any, tensors: list[Tensor]) -> bytes:
        def without(value: Any) -> Any:
            if isinstance(value, Tensor):
                tensors.append(value)
                return _Place(len(tensors) - 1)
            if type(value) in (list, tuple):
                return type(value)(map(without, value))
            return value

        return pickle.dumps(without(obj))

    def loads(self, data: bytes | memoryview, tensors: list[Tensor]) -> Any:
        def put_back(value: Any) -> Any:
            if isinstance(value, _Place):
                return tensors[value.index]
            if type(value) in (list, tuple):
                return type(value)(map(put_back, value))
            return value

        return put_back(pickle.loads(data))


@dataclass
class _Place:
    index: int


@pytest.mark.parametrize(
    "options",
    [{"allow": [torch]}, {"serializer": ByPickle()}],
    ids=["allow-list", "serializer"],
)
def test_gradients_through_other_encodings(options: dict[str, Any]) -> None:
    with world_with_weights(2, **options) as world, gw.context() as ctx:
        x, y, constant = doubles(3), doubles(3), doubles(3).detach()
        a = gw.rpc_sync("worker1", torch.mul, (x * 2, y))
        b = gw.rpc_sync("worker1", torch.stack, ([x, constant, a, y, a],))
        gw.backward(ctx, [(b**2).sum()])
        a = x * 2 * y
        local = (torch.stack([x, constant, a, y, a]) ** 2).sum()
        check_gradients(world, ctx, local, [[x, y], []])
