"""Random programs of calls between workers, to be compared with local autograd.

Every worker keeps the values of a program in a table of its own, by number; a step is told to the
worker that does it. The functions here are called by name, so they work within one process and
between several. A program is drawn by a function that chooses a number below a limit.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gradwire as gw
from gradwire.api import current_worker, enter
from tests.autograd.programs import Choose, compare
from tests.worlds import together

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda a, b: a * b,
    "mean": lambda a, b: (a + b) / 2,
    "tanh": lambda a, _: torch.tanh(a),
    "mm": lambda a, b: (a @ b) * 0.3,
    "detach": lambda a, _: a.detach(),
    "view": lambda a, b: a.t() * b,
    "in_place": lambda a, b: (a * 1).mul_(b),
}
"""What keeps numbers below 1 there."""

LEAVES = 2  # of each worker: its first values
DRIVER = 0  # the worker that begins the context and tells others what to do


@dataclass(frozen=True)
class Op:
    """A worker computes."""

    at: int
    name: str
    taken: tuple[int, int]
    made: int


@dataclass(frozen=True)
class Move:
    """Tensors go from one worker to another, in one of several `WAYS`."""

    source: int
    target: int
    way: str
    taken: tuple[int, ...]
    made: tuple[int, ...]


@dataclass(frozen=True)
class Fail:
    """A call with tensors that raises over there."""

    source: int
    target: int
    taken: tuple[int, ...]


@dataclass(frozen=True)
class Threads:
    """Steps that threads of one worker take at the same time, all in the same context."""

    at: int
    branches: tuple[tuple[Step, ...], ...]


Step = Op | Move | Fail | Threads


@dataclass(frozen=True)
class Program:
    """`roots`: the values that losses are made of, and `root_worker` has them."""

    workers: int
    steps: tuple[Step, ...]
    root_worker: int
    roots: tuple[int, ...]
    passes: int


# Drawing


class _Drawing:
    def __init__(self, choose: Choose, workers: int) -> None:
        self.choose = choose
        self.workers = workers
        self.count = workers * LEAVES
        self.has = [[at * LEAVES + i for i in range(LEAVES)] for at in range(workers)]
        """The values that a worker has where the next step is taken."""

    def steps(self, most: int, *, with_threads: bool = True) -> tuple[Step, ...]:
        return tuple(self._step(with_threads) for _ in range(1 + self.choose(most)))

    def _step(self, with_threads: bool) -> Step:
        at = self.choose(self.workers)
        kind = self.choose(14 if with_threads else 13)
        if kind < 6:
            name = list(OPS)[self.choose(len(OPS))]
            taken = self._pick(at), self._pick(at)
            return Op(at, name, taken, self._new(at))
        if kind == 13:
            return self._threads(at)
        to = self.choose(self.workers)
        some = tuple(self._pick(at) for _ in range(1 + self.choose(3)))
        if kind == 12:
            return Fail(at, to, some)
        way = list(WAYS)[self.choose(len(WAYS))]
        return Move(at, to, way, some, tuple(self._new(to) for _ in some))

    def _threads(self, at: int) -> Step:
        before, after = self.has, [list(own) for own in self.has]
        branches = []
        for _ in range(2 + self.choose(2)):
            self.has = [list(own) for own in before]
            branches.append(self.steps(4, with_threads=False))
            for own, now, then in zip(after, self.has, before, strict=True):
                own += now[len(then) :]
        self.has = after
        return Threads(at, tuple(branches))

    def _pick(self, at: int) -> int:
        own = self.has[at]
        return own[self.choose(len(own))]

    def _new(self, at: int) -> int:
        self.has[at].append(self.count)
        self.count += 1
        return self.has[at][-1]


def draw(choose: Choose, *, most_workers: int = 5, most_steps: int = 25) -> Program:
    drawing = _Drawing(choose, 2 + choose(most_workers - 1))
    steps = drawing.steps(most_steps)
    root_worker = choose(drawing.workers)
    own = drawing.has[root_worker]
    roots = tuple(own[-1 - choose(len(own))] for _ in range(1 + choose(3)))
    return Program(drawing.workers, steps, root_worker, roots, 1 + choose(2))


# What workers do

_tables: dict[tuple[str, int], dict[int, Tensor]] = {}
"""By worker, several of which may be here, and context."""


def _table(context: int) -> dict[int, Tensor]:
    return _tables[current_worker().name, context]


def begin(context: int, at: int) -> None:
    _tables[current_worker().name, context] = leaves(at)


def forget(context: int) -> None:
    del _tables[current_worker().name, context]


def put(context: int, made: tuple[int, ...], tensors: Sequence[Tensor]) -> None:
    _table(context).update(zip(made, tensors, strict=True))


def put_and_return(
    context: int, made: tuple[int, ...], tensors: Sequence[Tensor]
) -> list[Tensor]:
    put(context, made, tensors)
    return [tensor * 2 for tensor in tensors]


def get(context: int, taken: tuple[int, ...]) -> list[Tensor]:
    return [_table(context)[number] for number in taken]


def get_at(reference: gw.RRef[list[Tensor]], context: int, made: Any) -> None:
    put(context, made, reference.to_here())


class Refusal(Exception):
    """What `refuse` raises."""


def refuse(tensors: Sequence[Tensor]) -> None:
    raise Refusal(torch.stack(list(tensors)).sum().item())


def compute(context: int, op: Op) -> None:
    table = _table(context)
    a, b = op.taken
    table[op.made] = OPS[op.name](table[a], table[b])


def push(context: int, move: Move) -> None:
    gw.rpc_sync(move.target, put, (context, move.made, get(context, move.taken)))


def push_and_drop(context: int, move: Move) -> None:
    """What comes back is not used."""
    tensors = get(context, move.taken)
    gw.rpc_async(move.target, put_and_return, (context, move.made, tensors)).wait()


def push_each(context: int, move: Move) -> None:
    futures = [
        gw.rpc_async(move.target, put, (context, (made,), get(context, (taken,))))
        for taken, made in zip(move.taken, move.made, strict=True)
    ]
    for future in futures:
        future.wait()


def pull(context: int, move: Move) -> None:
    put(context, move.made, gw.rpc_sync(move.source, get, (context, move.taken)))


def pull_by_reference(context: int, move: Move) -> None:
    reference = gw.remote(move.source, get, (context, move.taken))
    put(context, move.made, reference.to_here())


def pass_reference(context: int, move: Move) -> None:
    reference = gw.remote(move.source, get, (context, move.taken))
    gw.rpc_sync(move.target, get_at, (reference, context, move.made))


def relay(context: int, move: Move) -> None:
    tensors = gw.rpc_sync(move.source, get, (context, move.taken))
    gw.rpc_sync(move.target, put, (context, move.made, tensors))


def push_to_fail(context: int, step: Fail) -> None:
    try:
        gw.rpc_sync(step.target, refuse, (get(context, step.taken),))
    except Refusal:
        return
    raise AssertionError("it was not refused")


SOURCE, TARGET, TELLER = "source", "target", "teller"
WAYS: dict[str, tuple[str, Callable[[int, Move], None]]] = {
    "push": (SOURCE, push),
    "push_and_drop": (SOURCE, push_and_drop),
    "push_each": (SOURCE, push_each),
    "pull": (TARGET, pull),
    "pull_by_reference": (TARGET, pull_by_reference),
    "pass_reference": (TELLER, pass_reference),
    "relay": (TELLER, relay),
}
"""Who does it, and how."""


def drive(context: int, steps: Sequence[Step]) -> None:
    """Have steps taken, one after the other."""
    for step in steps:
        if isinstance(step, Op):
            gw.rpc_sync(step.at, compute, (context, step))
        elif isinstance(step, Fail):
            gw.rpc_sync(step.source, push_to_fail, (context, step))
        elif isinstance(step, Threads):
            gw.rpc_sync(step.at, drive_threads, (context, step.branches))
        else:
            who, way = WAYS[step.way]
            if who == TELLER:
                way(context, step)
            else:
                gw.rpc_sync(getattr(step, who), way, (context, step))


def drive_threads(context: int, branches: Sequence[Sequence[Step]]) -> None:
    worker = current_worker()

    def branch(steps: Sequence[Step]) -> None:
        enter(worker)
        drive(context, steps)

    # A thread is in the context that it is given with `contextvars`.
    together(
        *(partial(contextvars.copy_context().run, branch, steps) for steps in branches)
    )


def differentiate(
    context: int, at: int, roots: tuple[int, ...], passes: int
) -> list[Tensor]:
    table = _table(context)
    losses = _losses(table, at, roots)
    for left in reversed(range(passes)):
        gw.backward(context, losses, retain_graph=left > 0)
    return [loss.detach() for loss in losses]


def gradients(context: int, at: int) -> list[Tensor | None]:
    found = gw.get_gradients(context)
    own = [_table(context)[at * LEAVES + i] for i in range(LEAVES)]
    assert found.keys() <= set(own)
    assert all(leaf.grad is None for leaf in own)
    return [found.get(leaf) for leaf in own]


def _losses(table: dict[int, Tensor], at: int, roots: Sequence[int]) -> list[Tensor]:
    own = table[at * LEAVES]
    return [(table[root] * (k + 1) * own).sum() for k, root in enumerate(roots)]


# Checking


def leaves(at: int) -> dict[int, Tensor]:
    chance = torch.Generator().manual_seed(at)
    kind = torch.float64
    return {
        at * LEAVES + i: torch.rand(2, 2, generator=chance, dtype=kind).requires_grad_()
        for i in range(LEAVES)
    }


def check(program: Program) -> None:
    """Run it here and over workers, as their driver; losses and gradients must be the same."""
    expected, wanted = _locally(program)
    with gw.context() as context:
        for at in range(program.workers):
            gw.rpc_sync(at, begin, (context, at))
        drive(context, program.steps)
        root, passes = program.root_worker, program.passes
        losses = gw.rpc_sync(
            root, differentiate, (context, root, program.roots, passes)
        )
        torch.testing.assert_close(losses, expected)
        for at in range(program.workers):
            found = gw.rpc_sync(at, gradients, (context, at))
            for one, other in zip(found, wanted[at], strict=True):
                compare(one, other)
            gw.rpc_sync(at, forget, (context,))


def _locally(program: Program) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """The losses, and the gradients of each worker's leaves."""
    own = [leaves(at) for at in range(program.workers)]
    values = {number: leaf for table in own for number, leaf in table.items()}
    _take_steps(values, program.steps)
    losses = _losses(values, program.root_worker, program.roots)
    total = torch.stack(losses).sum() * program.passes
    flat = [leaf for table in own for leaf in table.values()]
    found = iter(torch.autograd.grad(total, flat, allow_unused=True))
    return [loss.detach() for loss in losses], [[next(found) for _ in t] for t in own]


def _take_steps(values: dict[int, Tensor], steps: Sequence[Step]) -> None:
    for step in steps:
        if isinstance(step, Op):
            a, b = step.taken
            values[step.made] = OPS[step.name](values[a], values[b])
        elif isinstance(step, Move):
            values.update(
                (made, values[t]) for t, made in zip(step.taken, step.made, strict=True)
            )
        elif isinstance(step, Threads):
            for branch in step.branches:
                _take_steps(values, branch)
