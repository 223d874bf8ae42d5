"""The command: `gradwire launch -n 4 train.py [args]`."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .._transport.rendezvous import find_place
from ..cores import usable_cores
from ..errors import GradwireError
from .nodes import Elsewhere, Nodes
from .output import Console
from .plan import Plan, Recruit, recruits
from .processes import Crew, Ended, Said
from .run_state import TIMED_OUT, Course
from .stderr_tail import LastWords

_JOIN = 300.0  # seconds for the first node to come up
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BROKEN_PIPE = 128 + signal.SIGPIPE


def main(arguments: Sequence[str]) -> int:
    """Run a world; the exit status of its first failure, or 0."""
    parser = _parser()
    given = parser.parse_args(arguments)
    plan = _plan(parser, given)
    address = _address(parser, given.rdzv)
    events: SimpleQueue[Any] = SimpleQueue()
    try:
        place = find_place(
            f"tcp://{address[0]}:{address[1]}", None, plan.node, plan.nodes, _JOIN
        )
    except GradwireError as error:
        parser.error(f"--rdzv {given.rdzv}: {error}")
    store = place.store
    assert isinstance(store, TCPStore)
    inherited = dict(os.environ)
    given_keys = {"GRADWIRE_KEY", "GRADWIRE_KEY_FILE"} & {*inherited, *plan.settings}
    if plan.nodes == 1 and not given_keys:
        # Others on this machine can read the store, but not our environment.
        inherited["GRADWIRE_KEY"] = secrets.token_hex(32)
    cores = len(usable_cores())
    team = list(recruits(plan, (address[0], store.port), inherited, cores))
    with _signals_in(events):
        nodes = Nodes(store, plan.node, plan.nodes, events.put)
        try:
            return _Launch(team, events, nodes).run(given.timeout)
        finally:
            nodes.close()


class _Launch:
    """One run of the workers of this node."""

    def __init__(
        self, team: list[Recruit], events: SimpleQueue[Any], nodes: Nodes
    ) -> None:
        self._names = [recruit.name for recruit in team]
        self._events = events
        self._nodes = nodes
        self._console = Console(self._names)
        self._words = [LastWords() for _ in team]
        self._held: list[list[str]] | None = None
        """After Ctrl-C: what each worker wrote to standard error."""
        self._course = Course(set(range(len(team))))
        self._crew = Crew(team, events)

    def run(self, timeout: float | None) -> int:
        """Follow the workers to their end; the exit status."""
        course = self._course
        limit = None if timeout is None else time.monotonic() + timeout
        try:
            while not course.is_over:
                if (event := self._next(limit)) is not None:
                    self._take(event)
                elif course.deadline is None:
                    limit = None
                    self._time_out(timeout)
                else:
                    self._send(course.elapsed(time.monotonic()))
        except BrokenPipeError:
            return _BROKEN_PIPE  # nobody reads on
        finally:
            self._crew.close()
        self._conclude()
        return course.status

    def _next(self, limit: float | None) -> Any:
        """What happens next; None if nothing does for as long as we should wait."""
        deadline = self._course.deadline or limit
        if deadline is None:
            return self._events.get()
        try:
            return self._events.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            return None

    def _take(self, event: Said | Ended | Elsewhere | signal.Signals) -> None:
        now = time.monotonic()
        if isinstance(event, Said):
            self._said(event)
        elif isinstance(event, Ended):
            self._ended(event, now)
        elif isinstance(event, Elsewhere):
            self._console.say(f"{event.text}; ending this node's workers")
            self._send(self._course.failed_elsewhere(event.status, now))
        else:
            self._console.say(f"{event.name}: ending {self._running()}")
            self._nodes.failed(f"ended by {event.name}", 128 + event)
            if event == signal.SIGINT and self._held is None:
                self._held = [[] for _ in self._names]
            self._send(self._course.interrupted(event, now))

    def _said(self, said: Said) -> None:
        if not said.is_error:
            self._console.show(said.worker, said.line, is_error=False)
            return
        self._words[said.worker].add(said.line)
        if self._held is None:
            self._console.show(said.worker, said.line, is_error=True)
        else:
            self._held[said.worker].append(said.line)

    def _ended(self, ended: Ended, now: float) -> None:
        # The traceback of a worker that Ctrl-C has ended is no news; anything else is.
        if self._held is not None and ended.status != 128 + signal.SIGINT:
            for line in self._held[ended.worker]:
                self._console.show(ended.worker, line, is_error=True)
        is_echo = self._words[ended.worker].is_echo
        number = self._course.ended(ended.worker, ended.status, now, is_echo=is_echo)
        if self._course.culprit is not None:
            self._nodes.failed(self._verdict(), self._course.status)
        self._send(number)

    def _time_out(self, timeout: float | None) -> None:
        text = f"{self._running()} still run after {timeout:g} s (--timeout)"
        self._console.say(text + "; their stacks:")
        self._nodes.failed(text, TIMED_OUT)
        self._send(self._course.timed_out(time.monotonic()))

    def _send(self, number: signal.Signals | None) -> None:
        if number is not None:
            self._crew.signal(number, self._course.running)

    def _running(self) -> str:
        return ", ".join(self._names[worker] for worker in sorted(self._course.running))

    def _verdict(self) -> str:
        assert self._course.culprit is not None
        name, status = self._names[self._course.culprit], self._course.status
        if status > 128 and status - 128 in {*signal.Signals}:
            return f"{name} was ended by {signal.Signals(status - 128).name}"
        return f"{name} failed with exit status {status}"

    def _conclude(self) -> None:
        culprit = self._course.culprit
        if culprit is not None:
            others = "" if len(self._names) == 1 else ", and so the others were ended"
            lines = self._words[culprit].lines()
            self._console.say(f"{self._verdict()}{others}", lines)


@contextmanager
def _signals_in(events: SimpleQueue[Any]) -> Iterator[None]:
    """Signals to this process are events; a handler may put into this kind of queue."""

    def put(number: int, frame: object) -> None:
        events.put(signal.Signals(number))

    wanted = [n for n in _SIGNALS if n != signal.SIGHUP or not _is_nohup()]
    before = {number: signal.signal(number, put) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_nohup() -> bool:
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradwire launch",
        description="Start the workers of a world: the same program in several processes. "
        "gradwire.init_rpc() finds its place in the environment (env://).",
    )
    add = parser.add_argument
    add("-n", "--workers", type=_count, default=1, help="workers on this machine")
    add("-m", "--module", action="store_true", help="the program is a module")
    add("--env", action="append", default=[], metavar="NAME=VALUE", type=_variable,
        help="a variable for the workers; may be repeated")  # fmt: skip
    add("--timeout", type=_seconds, metavar="SECONDS",
        help="end all workers after this time, and show their stacks")  # fmt: skip
    add("--nnodes", type=_count, default=1, help="machines, each with as many workers")
    add(
        "--node-rank", type=int, default=0, help="which of the machines this is, from 0"
    )
    add("--rdzv", metavar="HOST:PORT", help="where machine 0 can be reached")
    add("program", help="a script, or a module with --module")
    add("arguments", nargs=argparse.REMAINDER, help="what the program is given")
    return parser


def _plan(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Plan:
    if not 0 <= given.node_rank < given.nnodes:
        parser.error(f"--node-rank {given.node_rank}: must be in 0..{given.nnodes - 1}")
    if given.nnodes > 1 and given.rdzv is None:
        parser.error(f"--nnodes {given.nnodes} needs --rdzv HOST:PORT, of machine 0")
    if not given.module and not os.path.exists(given.program):
        parser.error(f"there is no file {given.program!r}; for a module add --module")
    return Plan(
        program=(given.program, *given.arguments),
        is_module=given.module,
        size=given.workers,
        nodes=given.nnodes,
        node=given.node_rank,
        settings=dict(given.env),
    )


def _address(parser: argparse.ArgumentParser, text: str | None) -> tuple[str, int]:
    host, _, port = (text or "127.0.0.1:0").rpartition(":")
    if not host or not port.isdigit():
        parser.error(f"--rdzv {text}: give HOST:PORT, such as 10.0.0.1:29500")
    return host, int(port)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number, at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return seconds


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=VALUE")
    return name, value
