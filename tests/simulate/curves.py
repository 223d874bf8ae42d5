"""What a backward pass costs, in messages and in time, for programs of many shapes and sizes.

Time is in round trips: a message takes half of one, and computing takes none. A request and its
answer count as one message.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .passes import Graph, Pass, Source, World


@dataclass(frozen=True)
class Sent:
    """A message of the forward: a tensor that depends on these messages, which arrived before."""

    sender: int
    to: int
    uses: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """What a forward sent, in order; the loss is on worker 0, and depends on these messages."""

    workers: int
    sent: Sequence[Sent]
    loss: tuple[int, ...]

    @property
    def depth(self) -> int:
        """The longest chain of messages, each of which depends on the one before."""
        depths: list[int] = []
        for sent in self.sent:
            depths.append(1 + max((depths[used] for used in sent.uses), default=0))
        return max(depths)


class Cost(NamedTuple):
    """Of the backward pass through a program."""

    messages: int
    round_trips: float


def pipeline(workers: int) -> Program:
    """The last worker sends to the one before it, and so on; the first has the loss."""
    sent = [
        Sent(workers - 1 - i, workers - 2 - i, (i - 1,) if i else ())
        for i in range(workers - 1)
    ]
    return Program(workers, sent, (len(sent) - 1,))


def calls(depth: int, fan_out: int) -> Program:
    """Worker 0 calls so many others, each of which calls as many, and so on.

    What a worker was called with is sent on in its calls, and its result depends on all of theirs.
    """
    sent: list[Sent] = []
    workers = itertools.count(1)

    def send(sender: int, to: int, uses: tuple[int, ...]) -> int:
        sent.append(Sent(sender, to, uses))
        return len(sent) - 1

    def call(worker: int, given: tuple[int, ...], left: int) -> tuple[int, ...]:
        """What the result of a function depends on."""
        results = []
        for callee in itertools.islice(workers, fan_out if left else 0):
            argument = send(worker, callee, given)
            used = call(callee, (argument,), left - 1)
            results.append(send(callee, worker, used))
        return (*given, *results)

    loss = call(0, (), depth)
    return Program(next(workers), sent, loss)


def recorded(program: Program) -> World:
    """The graphs that such a forward leaves on the workers."""
    graphs = [Graph() for _ in range(program.workers)]
    for number, sent in enumerate(program.sent, start=1):
        reach = frozenset((used + 1, 0) for used in sent.uses)
        source = Source(reach, number, (number, 0), sent.to)
        graphs[sent.sender].sources.append(source)
        graphs[sent.to].recvs[number, 0] = sent.sender
    reach = frozenset((used + 1, 0) for used in program.loss)
    graphs[0].sources.append(Source(reach, 0))
    for graph in graphs:
        graph.join()
    return World(graphs)


def cost(program: Program) -> Cost:
    """What the pass costs, if nothing is late."""
    simulated = Pass(0, world=recorded(program), in_order=True)
    simulated.run()
    return Cost(simulated.messages, simulated.clock / 2)


Shape = Callable[[int], Program]

BY_WORKERS: dict[str, tuple[Shape, Sequence[int]]] = {
    "a pipeline": (pipeline, (2, 5, 10, 30, 100, 300, 1000)),
    "one calls all others": (
        lambda workers: calls(1, workers - 1),
        (2, 5, 10, 30, 100, 300, 1000),
    ),
    "calls nest, three each": (lambda depth: calls(depth, 3), (1, 2, 3, 4, 5, 6)),
}
BY_DEPTH: dict[str, tuple[Shape, Sequence[int]]] = {
    "a pipeline": (lambda depth: pipeline(depth + 1), range(1, 31)),
    "calls nest, one each": (lambda depth: calls(depth, 1), range(1, 16)),
    "calls nest, two each": (lambda depth: calls(depth, 2), range(1, 8)),
}
BY_FAN_OUT: dict[str, tuple[Shape, Sequence[int]]] = {
    "calls nest, 1 deep": (lambda fan_out: calls(1, fan_out), range(1, 31)),
    "calls nest, 2 deep": (lambda fan_out: calls(2, fan_out), range(1, 31, 2)),
    "calls nest, 3 deep": (lambda fan_out: calls(3, fan_out), range(1, 10)),
}


def draw(path: Path | str) -> None:
    """The curves, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4))
    for name, (shape, sizes) in BY_WORKERS.items():
        programs = [shape(size) for size in sizes]
        workers = [program.workers for program in programs]
        (line,) = left.plot(workers, [cost(p).messages for p in programs], "o-")
        line.set_label(name)
        most = [len(program.sent) + program.workers for program in programs]
        left.plot(workers, most, ":", color=line.get_color())
    left.plot([], [], "k:", label="edges + workers")
    left.set(xscale="log", yscale="log", xlabel="workers", title="messages of a pass")
    for name, (shape, sizes) in BY_DEPTH.items():
        programs = [shape(size) for size in sizes]
        trips = [cost(program).round_trips for program in programs]
        middle.plot([program.depth for program in programs], trips, ".-", label=name)
    middle.plot([0, 30], [0, 30], "k:", label="depth")
    middle.set(xlabel="depth: the longest chain of messages")
    for name, (shape, sizes) in BY_FAN_OUT.items():
        trips = [cost(shape(size)).round_trips for size in sizes]
        right.plot(sizes, trips, ".-", label=name)
    right.set(xlabel="fan-out: workers that each one calls")
    for axes in (middle, right):
        axes.set(title="round trips of a pass", ylim=(0, None))
    for axes in (left, middle, right):
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
