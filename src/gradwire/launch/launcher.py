"""One run of this node's workers: follows their output and exits, and stops them together."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from queue import Empty, SimpleQueue
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from .._transport.rendezvous import note_finished
from .._transport.stores import find_place
from ..cores import usable_cores
from .nodes import GONE, Elsewhere, Nodes
from .output import Console
from .plan import Plan, Recruit, recruits
from .processes import Ended, Printed, WorkerProcesses
from .run_state import TIMED_OUT, RunState
from .stderr_tail import (
    StderrTail,
    cut_dump,
    ends_by_interrupt,
    place_in_dump,
    place_of,
)
from .terminal import terminal_kept

_JOIN = 300.0  # seconds for the first node to come up
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BROKEN_PIPE = 128 + signal.SIGPIPE
_SCREEN = 40  # lines that are still to be seen


def launch(plan: Plan, address: tuple[str, int], timeout: float | None) -> int:
    """Run a world; the exit status of its first failure, or 0.

    Raises:
        GradwireError: this node cannot open its store, or reach the first node's.
    """
    events: SimpleQueue[Any] = SimpleQueue()
    url = f"tcp://{address[0]}:{address[1]}"
    store = find_place(url, None, plan.node, plan.nodes, _JOIN).store
    assert isinstance(store, TCPStore)
    inherited = dict(os.environ)
    given_keys = {"GRADWIRE_KEY", "GRADWIRE_KEY_FILE"} & {*inherited, *plan.settings}
    if plan.nodes == 1 and not given_keys:
        # Others on this machine can read the store, but not our environment.
        inherited["GRADWIRE_KEY"] = secrets.token_hex(32)
    cores = len(usable_cores())
    team = list(recruits(plan, (address[0], store.port), inherited, cores))
    terminal = terminal_kept() if plan.attached else nullcontext()
    with _signals_in(events), terminal:
        nodes = Nodes(store, plan.node, plan.nodes, events.put)
        try:
            status = _Launch(plan, team, events, nodes, store).run(timeout)
        finally:
            nodes.close()
    if status == 0 and nodes.has_lost_store:
        Console([recruit.name for recruit in team]).say(GONE)
        return 1
    return status


class _Launch:
    """One run of the workers of this node."""

    def __init__(
        self,
        plan: Plan,
        team: list[Recruit],
        events: SimpleQueue[Any],
        nodes: Nodes,
        store: Store,
    ) -> None:
        self._store = store
        self._team = team
        self._names = [recruit.name for recruit in team]
        self._events = events
        self._nodes = nodes
        self._console = Console(self._names)
        self._stderr_tails = [StderrTail() for _ in team]
        self._held: list[list[str]] | None = None
        """After Ctrl-C: what each worker wrote to standard error."""
        self._on_screen: deque[int | None] = deque(maxlen=_SCREEN)
        """By line: the worker to whose standard error it belongs; None: it is another one."""
        self._state = RunState(
            set(range(len(team))),
            most_restarts=plan.restarts,
            spare=0 if plan.needed is None else len(team) - plan.needed,
        )
        self._processes = WorkerProcesses(team, events)

    def run(self, timeout: float | None) -> int:
        """Follow the workers to their end; the exit status."""
        state = self._state
        limit = None if timeout is None else time.monotonic() + timeout
        try:
            while not state.is_over:
                if (event := self._next(limit)) is not None:
                    self._take(event)
                elif state.deadline is None:
                    limit = None
                    self._time_out(timeout)
                else:
                    self._send(state.elapsed(time.monotonic()))
        except BrokenPipeError:
            return _BROKEN_PIPE  # nobody reads on
        finally:
            self._processes.close()
        self._conclude()
        return state.status

    def _next(self, limit: float | None) -> Any:
        """The next event; None if there is none before the deadline."""
        deadline = self._state.deadline or limit
        if deadline is None:
            return self._events.get()
        try:
            return self._events.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            return None

    def _take(self, event: Printed | Ended | Elsewhere | signal.Signals) -> None:
        now = time.monotonic()
        if isinstance(event, Printed):
            self._said(event)
        elif isinstance(event, Ended):
            self._ended(event, now)
        elif isinstance(event, Elsewhere):
            self._console.say(f"{event.text}; stopping this node's workers")
            self._send(self._state.failed_elsewhere(event.status, now))
        else:
            self._console.say(f"{event.name}: stopping {self._running()}")
            self._nodes.failed(f"ended by {event.name}", 128 + event)
            if event == signal.SIGINT and self._held is None:
                self._held = [[] for _ in self._names]
            self._send(self._state.interrupted(event, now))

    def _said(self, said: Printed) -> None:
        if not said.is_error:
            self._on_screen.append(None)
            self._console.show(said.worker, said.line, is_error=False)
            return
        self._stderr_tails[said.worker].add(said.line)
        if self._held is None:
            self._on_screen.append(said.worker)
            self._console.show(said.worker, said.line, is_error=True)
        else:
            self._held[said.worker].append(said.line)

    def _ended(self, ended: Ended, now: float) -> None:
        state = self._state
        if state.restarts_now(ended.worker, ended.status):
            self._restart(ended)
            return
        if self._held is not None:
            self._show_interrupted(ended, self._held[ended.worker])
        is_echo = self._stderr_tails[ended.worker].is_echo
        number = state.ended(ended.worker, ended.status, now, is_echo=is_echo)
        if state.culprit is not None:
            self._nodes.failed(self._verdict(), state.status)
        if ended.status == 0 or ended.worker in state.spared:
            self._finish(self._team[ended.worker])
        if ended.worker in state.spared:
            verdict = _verdict(self._names[ended.worker], ended.status)
            others = self._running()
            self._console.say(
                f"{verdict}; continuing with {others}" if others else verdict
            )
        self._send(number)

    def _show_interrupted(self, ended: Ended, held: list[str]) -> None:
        """Where its main thread was; the traceback of its KeyboardInterrupt is no news."""
        written, dump = cut_dump(held)
        if ended.status == 128 + signal.SIGINT or ends_by_interrupt(written):
            place = place_of(written)
        else:
            for line in written:
                self._console.show(ended.worker, line, is_error=True)
            place = place_in_dump(dump)
        if place is not None:
            self._console.say(f"{self._names[ended.worker]} was at {place}")

    def _finish(self, recruit: Recruit) -> None:
        """Tell workers that serve not to wait any longer for a worker that will not come back."""
        env = recruit.environment
        world = env.get("GRADWIRE_WORLD", "default")
        note_finished(self._store, world, env["GRADWIRE_NAME"])

    def _restart(self, ended: Ended) -> None:
        worker, count = ended.worker, self._state.restarts[ended.worker]
        verdict = _verdict(self._names[worker], ended.status)
        most = self._state.most_restarts
        self._console.say(f"{verdict}; restarting it ({count} of {most})")
        self._stderr_tails[worker] = StderrTail()
        self._processes.restart(worker, self._team[worker].again(count))

    def _time_out(self, timeout: float | None) -> None:
        text = f"{self._running()} still run after {timeout:g} s (--timeout)"
        self._console.say(text + "; their stacks:")
        self._nodes.failed(text, TIMED_OUT)
        self._send(self._state.timed_out(time.monotonic()))

    def _send(self, number: signal.Signals | None) -> None:
        if number is not None:
            self._processes.signal(number, self._state.running)

    def _running(self) -> str:
        return ", ".join(self._names[worker] for worker in sorted(self._state.running))

    def _verdict(self) -> str:
        assert self._state.culprit is not None
        return _verdict(self._names[self._state.culprit], self._state.status)

    def _conclude(self) -> None:
        culprit = self._state.culprit
        if culprit is not None:
            others = "" if len(self._names) == 1 else "; the other workers were stopped"
            lines = self._stderr_tails[culprit].lines()
            errors = [worker for worker in self._on_screen if worker is not None]
            if lines and errors[-len(lines) :] == [culprit] * len(lines):
                self._console.say(f"{self._verdict()} (see above){others}")
            else:
                self._console.say(f"{self._verdict()}{others}", lines)


def _verdict(name: str, status: int) -> str:
    if status > 128 and status - 128 in {*signal.Signals}:
        return f"{name} was ended by {signal.Signals(status - 128).name}"
    return f"{name} failed with exit status {status}"


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
