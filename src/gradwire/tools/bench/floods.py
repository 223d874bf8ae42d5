"""How long calls take while somebody floods the worker they go to: `gradwire bench --floods 10000`.

Three workers, over TCP and over TLS: one is called by another, and the third one floods when it is
its turn. All are processes of this machine, as are the strangers, who know no key. So what is
measured includes what they take from each other by using the same cores: one row shows what a
process does that floods nobody and only computes.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import gradwire as gw

from ... import api, worker  # noqa: F401 loaded before it is measured
from ...cores import usable_cores
from .group import free_port

_LIMIT = 300.0  # seconds for one attack
_SERVER, _CALLER, _FLOODER = range(3)
_CALLS = 5000  # at least, in each attack
_SLOW = 200  # strangers that say a byte at a time
_OUTSTANDING = 500  # requests of the member that floods
_LARGE = 1 << 18  # numbers: 1 MB
_ALLOWED = 10.0  # times the quiet p99

Address = tuple[str, int]


@dataclass
class _Attack:
    """What an attacker shares with who started it."""

    address: Address
    tls: bool
    over: Any
    count: Any

    def go_on(self) -> Iterator[None]:
        """Once for each stranger, or request."""
        while not self.over.is_set():
            yield
            self.count.value += 1

    @contextmanager
    def connection(self) -> Iterator[socket.socket]:
        with socket.create_connection(self.address, _LIMIT) as sock:
            yield sock


def _connect(attack: _Attack) -> None:
    """Strangers that connect, wait to be turned away for half a millisecond, and leave."""
    for _ in attack.go_on():
        with suppress(OSError), attack.connection() as sock:
            sock.settimeout(0.0005)
            sock.recv(1)


def _compute(attack: _Attack) -> None:
    """Nobody is bothered, but for the core that it takes."""
    for _ in attack.go_on():
        sum(range(1000))


def _begin(attack: _Attack) -> None:
    """Strangers that go as far as they can without a key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for _ in attack.go_on():
        with suppress(OSError), attack.connection() as sock:
            if attack.tls:
                with context.wrap_socket(sock) as stream:
                    stream.recv(1)
            else:
                sock.sendall(b"GRADWIRE" + bytes(64))
                sock.recv(1)


def _dribble(attack: _Attack) -> None:
    """Strangers that say one byte at a time, and come back when they are turned away."""
    said = b"\x16\x03\x01\x02\x00" if attack.tls else b"GRADWIRE"
    crowd: deque[tuple[socket.socket, int]] = deque()
    for _ in attack.go_on():
        if len(crowd) < _SLOW:
            with suppress(OSError):
                crowd.append((socket.create_connection(attack.address, _LIMIT), 0))
            continue
        sock, at = crowd.popleft()
        try:
            sock.send(said[at : at + 1] or b"\0")
            crowd.append((sock, at + 1))
        except OSError:
            sock.close()
        time.sleep(0.0001)
    for sock, _ in crowd:
        sock.close()


def _ask(attack: _Attack) -> None:
    """A member with as many small requests in flight as it likes."""
    _flood(attack, max, (1, 2), _OUTSTANDING)


def _send(attack: _Attack) -> None:
    """A member that sends large tensors."""
    _flood(attack, _take, (torch.ones(_LARGE),), 4)


def _flood(attack: _Attack, function: Any, args: Any, most: int) -> None:
    waiting: deque[Any] = deque()
    for _ in attack.go_on():
        waiting.append(gw.rpc_async(_SERVER, function, args))
        if len(waiting) >= most:
            waiting.popleft().wait()
    for call in waiting:
        call.wait()


def _take(x: torch.Tensor) -> None:
    pass


_NO_ATTACK = "a process computes"
STRANGERS: dict[str, Callable[[_Attack], None]] = {
    _NO_ATTACK: _compute,
    "strangers connect": _connect,
    "strangers begin the handshake": _begin,
    "strangers speak slowly": _dribble,
}
MEMBERS: dict[str, Callable[[_Attack], None]] = {
    "a member floods with requests": _ask,
    "a member floods with data": _send,
}


def _serve(rank: int, url: str, tls: bool, talk: Connection, attack: Any) -> None:
    """Be a worker: answer what the parent asks for, until it asks for nothing."""
    torch.set_num_threads(1)
    logging.getLogger("gradwire").setLevel(logging.ERROR)  # who was refused
    with gw.init_rpc(
        rank=rank, world_size=3, init_method=url, unix_sockets=False, tls=tls
    ) as member:
        talk.send(member.card.tcp)
        while (job := talk.recv()) is not None:
            over, count = attack
            if job == "call":
                talk.send(_call(count, talk.recv()))
            else:
                MEMBERS[job](_Attack(("", 0), tls, over, count))
                talk.send(None)


def _call(count: Any, wanted: int) -> list[float]:
    """Call until so much of the attack was seen; the seconds that each call took."""
    taken: list[float] = []
    begin = time.monotonic()
    while len(taken) < _CALLS or count.value < wanted:
        if time.monotonic() - begin > _LIMIT:
            raise TimeoutError(f"{count.value} of {wanted} within {_LIMIT:g} s")
        before = time.perf_counter()
        gw.rpc_sync(_SERVER, max, (1, 2))
        taken.append(time.perf_counter() - before)
    return taken


def _attack_from_outside(name: str, attack: _Attack) -> None:
    STRANGERS[name](attack)


class _World:
    """The three workers, and who attacks them."""

    def __init__(self, context: ForkServerContext, tls: bool, stack: ExitStack) -> None:
        self._context = context
        self._tls = tls
        self._over, self._count = context.Event(), context.Value("q", 0)
        url = f"tcp://127.0.0.1:{free_port()}"
        self._talks: list[Connection] = []
        for rank in range(3):
            mine, theirs = context.Pipe()
            args = (rank, url, tls, theirs, (self._over, self._count))
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join, 10)
            self._talks.append(mine)
        for (
            talk
        ) in self._talks:  # before any of them is waited for: they leave together
            stack.callback(self._send, talk, None)
        self._address: Address = [self._answer(talk) for talk in self._talks][_SERVER]

    def measure(self, name: str, count: int) -> list[float]:
        """The seconds of calls while this goes on, so often; while it is quiet if that is zero."""
        self._over.clear()
        self._count.value = 0
        attacker = None
        if name in STRANGERS:
            attack = _Attack(self._address, self._tls, self._over, self._count)
            attacker = self._context.Process(
                target=_attack_from_outside, args=(name, attack), daemon=True
            )
            attacker.start()
        elif name in MEMBERS:
            self._talks[_FLOODER].send(name)
        self._talks[_CALLER].send("call")
        self._talks[_CALLER].send(count)
        taken: list[float] = self._answer(self._talks[_CALLER])
        self._over.set()
        if attacker is not None:
            attacker.join()
        elif name in MEMBERS:
            self._answer(self._talks[_FLOODER])
        return taken

    def _answer(self, talk: Connection) -> Any:
        if not talk.poll(_LIMIT + 60):
            raise TimeoutError("a worker of the benchmark did not answer")
        return talk.recv()

    def _send(self, talk: Connection, what: None) -> None:
        with suppress(OSError):
            talk.send(what)


def _summary(taken: list[float]) -> dict[str, float]:
    ranked = sorted(taken)
    at = {"p50": 0.5, "p99": 0.99}
    found = {name: ranked[int(share * len(ranked))] for name, share in at.items()}
    return {"calls": len(ranked), **found, "longest": ranked[-1]}


def measure(count: int, tls: bool) -> dict[str, dict[str, float]]:
    """What calls take while it is quiet, and in each attack by so many strangers or requests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ExitStack() as stack:
        world = _World(context, tls, stack)
        world.measure("warm up", 0)
        found = {"quiet": _summary(world.measure("quiet", 0))}
        for name in [*STRANGERS, *MEMBERS]:
            # A megabyte counts as a hundred requests.
            wanted = max(1, count // 100) if name.endswith("data") else count
            found[name] = _summary(world.measure(name, wanted))
    return found


def too_slow(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """The attacks in which the p99 is above ten times the quiet one, and how many times it is."""
    ratios = {name: of["p99"] / found["quiet"]["p99"] for name, of in found.items()}
    attacks = {*STRANGERS, *MEMBERS} - {_NO_ATTACK}
    return {
        n: ratio for n, ratio in ratios.items() if n in attacks and ratio > _ALLOWED
    }


def report(count: int, path: Path) -> int:
    """Measure, show and write down; 1 if an attack slows calls down by too much."""
    console, figures, status = Console(), {}, 0
    for way, tls in {"TCP": False, "TCP, TLS": True}.items():
        found = figures[way] = measure(count, tls)
        cores = len(usable_cores())
        table = Table(title=f"calls in floods of {count} over {way}, {cores} cores")
        for column in ("", "calls", "median", "p99", "p99, quiet = 1", "longest"):
            table.add_column(column, justify="right" if column else "left")
        for name, taken in found.items():
            times = [f"{1e3 * taken[of]:.2f} ms" for of in ("p50", "p99", "longest")]
            ratio = taken["p99"] / found["quiet"]["p99"]
            times.insert(2, f"{ratio:.1f}")
            table.add_row(name, f"{taken['calls']:.0f}", *times)
        console.print(table)
        for name, ratio in too_slow(found).items():
            console.print(
                f"too slow: {name}: p99 is {ratio:.1f} times the quiet one, "
                f"the limit is {_ALLOWED:g}"
            )
            status = 1
    path.write_text(json.dumps({"floods": {count: figures}}, indent=1))
    console.print(f"figures: {path}")
    return status
