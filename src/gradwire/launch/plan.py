"""What is started on one node: a command and an environment for each worker. Pure.

The environment is the one that `env://` and torch's own launcher use, so that a program runs under
either. The launcher hosts the store (`TORCHELASTIC_USE_AGENT_STORE`): no free port has to be
guessed, and the store lives as long as the world.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

_HERE = __name__.rpartition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the user asked for."""

    program: tuple[str, ...]
    """A script or a module, and its arguments."""
    is_module: bool = False
    size: int = 1
    """Workers on each node."""
    nodes: int = 1
    node: int = 0
    """Which of the nodes this is."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The user's own variables, for all workers."""
    attached: str | None = None
    """The worker that has the launcher's standard input and output."""
    restarts: int = 0
    """How often each worker is started again after a failure."""
    needed: int | None = None
    """With restarts: how many workers the world goes on with; None for all."""

    @property
    def is_elastic(self) -> bool:
        """Whether a worker may exit or restart while the others keep running."""
        return self.restarts > 0 or self.needed is not None

    def names(self) -> list[str]:
        """The workers of this node."""
        first = self.node * self.size
        return [f"worker{rank}" for rank in range(first, first + self.size)]


@dataclass(frozen=True, slots=True)
class Recruit:
    """A worker to start."""

    name: str
    command: list[str]
    environment: dict[str, str]
    is_attached: bool = False

    def again(self, count: int) -> Recruit:
        """The same worker for its `count`-th restart."""
        told = {"TORCHELASTIC_RESTART_COUNT": str(count)}
        return replace(self, environment=self.environment | told)


def recruits(
    plan: Plan, address: tuple[str, int], inherited: Mapping[str, str], cores: int
) -> Iterator[Recruit]:
    """The workers of a node, in a world whose store is at `address`."""
    command = [sys.executable, *(["-m"] if plan.is_module else []), *plan.program]
    # Output that waits in a buffer is lost when a worker is killed; a crash in C shows
    # where in Python it was.
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    alone = {"PYTHONBREAKPOINT": f"{_HERE}.breakpoints.pass_over"}
    given = {**inherited, **plan.settings}
    if not {"GRADWIRE_TORCH_THREADS", "MKL_NUM_THREADS"} & {*given}:
        # Each worker's torch would take all cores, also before it joins the world.
        defaults["OMP_NUM_THREADS"] = str(max(1, cores // plan.size))
    for local, name in enumerate(plan.names()):
        is_attached = name == plan.attached
        environment = {
            **defaults,
            **({} if is_attached else alone),
            **inherited,
            **_place(plan, local, address),
            **plan.settings,
        }
        yield Recruit(name, command, environment, is_attached)


def _place(plan: Plan, local: int, address: tuple[str, int]) -> dict[str, str]:
    rank = plan.node * plan.size + local
    total = plan.nodes * plan.size
    elastic = {"GRADWIRE_MIN_WORKERS": str(plan.needed or total)}
    return {
        **(elastic if plan.is_elastic else {}),
        "GRADWIRE_NAME": plan.names()[local],
        "RANK": str(rank),
        "WORLD_SIZE": str(total),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(plan.size),
        "GROUP_RANK": str(plan.node),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",  # torch reads it where it sees the line above
    }
