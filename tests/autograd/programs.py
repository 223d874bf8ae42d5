"""Random programs over several workers, to be compared with local autograd.

A program is drawn by a function that chooses a number below a limit, so that a seed can draw it as
well as hypothesis.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from gradwire.errors import GradwireError
from tests.autograd.functions import Raises
from tests.worlds import Autograds

Choose = Callable[[int], int]

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "tanh": lambda a, _: torch.tanh(a),
    "mm": lambda a, b: (a @ b) * 0.3,
    "detach": lambda a, _: a.detach(),
    "view": lambda a, b: a.t() + b,
    "fails": lambda a, _: Raises.apply(a),  # in its backward, while that is switched on
}


def watched(a: Tensor, runs: Counter[str], key: str) -> Tensor:
    """Something that must not be run where nothing flows back; counted where it is."""
    made: Tensor = Strict.apply(a, runs, key) * 1
    if made.requires_grad:

        def hook(gradient: Tensor) -> Tensor:
            runs[f"hook {key}"] += 1
            return gradient * 1  # not with None

        made.register_hook(hook)
    return made


class Strict(Function):
    """Refuses zeros: what torch makes of a gradient that is not there."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, runs: Counter[str], key: str) -> Tensor:
        ctx.runs, ctx.key = runs, key
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        assert gradients[0].any()
        ctx.runs[f"function {ctx.key}"] += 1
        return gradients[0], None, None


@dataclass(frozen=True)
class Program:
    """What is done, and where the roots are.

    Steps are `("op", worker, name, a, b)`, `("change", worker, a)` in place, `("send", source,
    target, indices)` or, for a send that never arrives, `("lose", source, target, indices)`.
    """

    workers: int
    steps: tuple[tuple[Any, ...], ...]
    root_worker: int
    roots: int


def draw(
    choose: Choose,
    *,
    most_workers: int = 5,
    most_steps: int = 30,
    is_watched: bool = False,
) -> Program:
    """A program. `is_watched`: with operations that are run only if something flows back to them.

    And with changes in place, which make what lies behind unfit to be run.
    """
    # What "fails" makes is a view, which may not be changed in place.
    ops = [*sorted(OPS.keys() - {"fails"}), "watched"] if is_watched else [*OPS]
    workers = (
        1 + choose(most_workers) if most_workers < 2 else 2 + choose(most_workers - 1)
    )
    counts = [2] * workers
    steps: list[tuple[Any, ...]] = []
    for _ in range(1 + choose(most_steps)):
        at = choose(workers)
        if choose(2):
            if is_watched and choose(6) == 0:
                steps.append(("change", at, choose(counts[at])))
                continue
            name = ops[choose(len(ops))]
            steps.append(("op", at, name, choose(counts[at]), choose(counts[at])))
            counts[at] += 1
        else:
            to = choose(workers)
            sent = [choose(counts[at]) for _ in range(1 + choose(3))]
            if choose(10) == 0:
                steps.append(("lose", at, to, sent))
                continue
            steps.append(("send", at, to, sent))
            counts[to] += len(sent)
    return Program(workers, tuple(steps), choose(workers), 1 + choose(3))


def run(
    program: Program,
    leaves: list[list[Tensor]],
    transfer: Callable[..., list[Tensor]],
    runs: Counter[str],
) -> list[Tensor]:
    """The roots; `transfer(source, target, tensors, is_lost)` carries tensors over.

    `runs` gets what is run of the backward, and how often.
    """
    values = [list(own) for own in leaves]
    for kind, at, *rest in program.steps:
        if kind == "change":
            changed = values[at][rest[0]]
            if changed.grad_fn is not None:
                changed.mul_(1.5)
            continue
        if kind == "op":
            name, a, b = rest
            if name == "watched":
                key = f"{at}.{len(values[at])}"
                values[at].append(watched(values[at][a], runs, key))
            else:
                values[at].append(OPS[name](values[at][a], values[at][b]))
            continue
        to, sent = rest
        arrived = transfer(at, to, [values[at][i] for i in sent], kind == "lose")
        values[to] += [] if kind == "lose" else arrived
    own = values[program.root_worker]
    last = own[-program.roots :] if program.roots <= len(own) else own
    return [(tensor * (k + 1) * own[0]).sum() for k, tensor in enumerate(last)]


def make_leaves(program: Program) -> list[list[Tensor]]:
    torch.manual_seed(len(program.steps))
    shape, kind = (2, 2), torch.float64
    return [
        [torch.rand(shape, dtype=kind, requires_grad=True) for _ in range(2)]
        for _ in range(program.workers)
    ]


def check(program: Program, autograds: Autograds, passes: int = 1) -> None:
    """Run it locally and over the world: the gradients must be the same, and what is run for them.

    If torch refuses to, because of a change in place, so must we.
    """
    leaves = make_leaves(program)
    flat = [leaf for own in leaves for leaf in own]
    here: Counter[str] = Counter()
    local_roots = run_here(program, leaves, here)
    root = autograds[program.root_worker]
    there: Counter[str] = Counter()
    with recorded(program, leaves, autograds, there) as (context, roots):
        try:
            expected = torch.autograd.grad(local_roots, flat, allow_unused=True)
        except RuntimeError as error:
            text = str(error)
            with pytest.raises(GradwireError, match="modified by an inplace operation"):
                root.backward(context, roots)
            if "modified by an inplace operation" not in text:
                raise
            return
        for number in range(passes):
            root.backward(context, roots, retain_graph=number < passes - 1)
        wanted = [g if g is None else g * passes for g in expected]
        compare_all(autograds, context, leaves, wanted)
        assert there == Counter({key: count * passes for key, count in here.items()})


def check_twice(program: Program, autograds: Autograds) -> None:
    """Differentiate the gradients on the worker with the roots once more."""
    leaves = make_leaves(program)
    flat = [leaf for own in leaves for leaf in own]
    own = leaves[program.root_worker]
    here = torch.autograd.grad(
        run_here(program, leaves), own, create_graph=True, allow_unused=True
    )
    root = autograds[program.root_worker]
    with recorded(program, leaves, autograds) as (context, roots):
        found = root.grad(context, roots, own, create_graph=True, allow_unused=True)
        for one, other in zip(found, here, strict=True):
            compare(one, other)
        squares = squared(found)
        if squares.requires_grad:
            root.backward(context, [squares])
            wanted = torch.autograd.grad(squared(here), flat, allow_unused=True)
            compare_all(autograds, context, leaves, wanted)


def squared(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.stack([(t**2).sum() for t in tensors if t is not None]).sum()


def run_here(
    program: Program, leaves: list[list[Tensor]], runs: Counter[str] | None = None
) -> list[Tensor]:
    def transfer(
        source: int, target: int, tensors: list[Tensor], is_lost: bool
    ) -> list[Tensor]:
        return [tensor.clone() for tensor in tensors]  # each may be changed in place

    return run(program, leaves, transfer, Counter() if runs is None else runs)


@contextmanager
def recorded(
    program: Program,
    leaves: list[list[Tensor]],
    autograds: Autograds,
    runs: Counter[str] | None = None,
) -> Iterator[tuple[int, list[Tensor]]]:
    """The program run over the world: its context and its roots."""
    with autograds[program.root_worker].context() as context:

        def transfer(
            source: int, target: int, tensors: list[Tensor], is_lost: bool
        ) -> list[Tensor]:
            if not is_lost:
                return autograds.transfer(source, target, context, tensors)
            autograds.leave(source, target, context, tensors)
            return []

        counted = Counter() if runs is None else runs
        yield context, run(program, leaves, transfer, counted)
    for service in autograds.services:
        service.release(context)  # workers that no path connects do not hear of it


def compare_all(
    autograds: Autograds,
    context: int,
    leaves: list[list[Tensor]],
    wanted: Sequence[Tensor | None],
) -> None:
    rest = iter(wanted)
    for worker, own in enumerate(leaves):
        found = gradients(autograds, worker, context)
        for leaf in own:
            compare(found.get(leaf), next(rest))


def gradients(autograds: Autograds, worker: int, context: int) -> dict[Tensor, Tensor]:
    """What a worker has; nothing if it has not heard of the context."""
    try:
        return autograds[worker].get_gradients(context)
    except GradwireError:
        return {}


def compare(found: Tensor | None, expected: Tensor | None) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        torch.testing.assert_close(found, expected)
