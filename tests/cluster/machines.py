"""Machines of one network, on this one: network namespaces, each with an address and a name.

What they send to each other goes through a thread of this process, which delays it, loses some of
it, and lets nothing pass to or from a machine that is cut off. (The kernel can do the same with
netem, but not everywhere.) Needs root, iproute2 and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from tests.processes import PATHS
from tests.worlds import LIMIT, wait_until

_TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001  # IP packets, with nothing before them
_SETTINGS = Path("/etc/netns")
"""Where `ip netns exec` looks for what replaces files of /etc."""
_PACKET = 2048
_IDLE = 0.1  # seconds


def what_is_missing() -> str:
    """Why there can be no machines here; nothing, if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"needs `{program}` (Debian's iproute2, util-linux)"
    return "" if _TUN.exists() else f"needs {_TUN}"


class Started:
    """A command under way, and what it has printed so far."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Wait until it has printed that."""
        wait_until(
            lambda: text in self.output or self._process.poll() is not None,
            show=lambda: f"{text!r} was not printed",
        )
        assert text in self.output, f"ended with {self._process.poll()}"

    def wait(self, limit: float = LIMIT) -> int:
        """Its exit code, once it has ended by itself."""
        return self._process.wait(limit)


class Machines:
    """`node1`, `node2`, … at 10.0.0.1, 10.0.0.2, … and the network between them."""

    def __init__(self, count: int, folder: Path) -> None:
        self.delay = 0.0
        """Seconds that each packet takes."""
        self.loss = 0.0
        """How many of the packets are lost, of 1."""
        self._cut_off: set[int] = set()
        self._folder = folder
        self._chance = random.Random(1)
        self._started: list[Started] = []
        self._devices: list[int] = []
        self._names = [f"gw{os.getpid()}n{number + 1}" for number in range(count)]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._forward)
        try:
            for number in range(count):
                self._make(number)
        except BaseException:
            self._remove()
            raise
        self._thread.start()

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            self._end_all(name)
        for process in self._started:
            process.wait()
        self._closing.set()
        self._thread.join()
        self._remove()
        for log in sorted(self._folder.glob("*.log")):  # pytest shows them on failure
            sys.stdout.write(f"--- {log.name}:\n{log.read_text(errors='replace')}")

    @property
    def hosts(self) -> list[str]:
        return [f"node{number + 1}" for number in range(len(self._names))]

    def cut_off(self, number: int) -> None:
        """From now on nothing passes to or from `node<number>`, and nobody is told."""
        self._cut_off.add(number - 1)

    def reconnect(self, number: int) -> None:
        self._cut_off.discard(number - 1)

    def start(self, number: int, *command: object, **environment: str) -> Started:
        """Run a command on `node<number>`, until the end at the latest."""
        log = self._folder / f"{len(self._started):02}-node{number}.log"
        with log.open("w") as output:
            process = self._popen(number, command, environment, output)
        self._started.append(Started(process, log))
        return self._started[-1]

    def run(self, number: int, *command: object, **environment: str) -> str:
        """What a command prints on `node<number>`, once it has succeeded."""
        process = self._popen(number, command, environment, subprocess.PIPE)
        try:
            output, _ = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
        assert process.returncode == 0, output
        return output

    def _popen(
        self,
        number: int,
        command: tuple[object, ...],
        environment: dict[str, str],
        output: IO[str] | int,
    ) -> subprocess.Popen[str]:
        name = f'hostname node{number}; exec "$@"'
        inside = ["unshare", "--uts", "sh", "-c", name, "sh", *map(str, command)]
        return subprocess.Popen(
            ["ip", "netns", "exec", self._names[number - 1], *inside],
            env={**os.environ, **self._environment(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }

    def _end_all(self, name: str) -> None:
        """Kill what runs on a machine, also what is nobody's child any more."""
        found = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
        )
        for process in map(int, found.stdout.split()):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has just ended

    def _make(self, number: int) -> None:
        name, device = self._names[number], f"gw{os.getpid()}t{number + 1}"
        _ip("netns", "add", name)
        settings = _SETTINGS / name
        settings.mkdir(parents=True)
        every = [f"10.0.0.{i + 1} {host}" for i, host in enumerate(self.hosts)]
        hosts = "\n".join(["127.0.0.1 localhost", *every])
        (settings / "hosts").write_text(hosts + "\n")
        # Asks nobody for names that are not there: not the machine's own name server either.
        (settings / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        tun = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._devices.append(tun)
        fcntl.ioctl(
            tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN_NO_PI)
        )
        _ip("link", "set", device, "netns", name)
        _ip("-n", name, "addr", "add", f"10.0.0.{number + 1}/24", "dev", device)
        for each in (device, "lo"):
            _ip("-n", name, "link", "set", each, "up")

    def _remove(self) -> None:
        for device in self._devices:
            os.close(device)  # which removes it
        for name in self._names:
            settings = _SETTINGS / name
            if settings.exists():
                shutil.rmtree(settings)
            subprocess.run(["ip", "netns", "del", name], check=False)

    def _forward(self) -> None:
        order = itertools.count()
        waiting: list[tuple[float, int, int, bytes]] = []
        while not self._closing.is_set():
            pause = waiting[0][0] - time.monotonic() if waiting else _IDLE
            ready, _, _ = select.select(
                self._devices, [], [], min(max(pause, 0), _IDLE)
            )
            for device in ready:
                packet = os.read(device, _PACKET)
                to = self._target(self._devices.index(device), packet)
                if to is not None:
                    due = time.monotonic() + self.delay
                    heapq.heappush(waiting, (due, next(order), to, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(waiting)
                _write(self._devices[to], packet)

    def _target(self, source: int, packet: bytes) -> int | None:
        """The machine a packet goes to; None if it is lost on the way."""
        if packet[0] >> 4 != 4 or packet[16:19] != b"\x0a\x00\x00":
            return None  # not IPv4, or to none of ours
        to = packet[19] - 1
        if to not in range(len(self._devices)) or {source, to} & self._cut_off:
            return None
        return None if self._chance.random() < self.loss else to


def _write(device: int, packet: bytes) -> None:
    try:
        os.write(device, packet)
    except BlockingIOError:
        pass  # its queue is full: lost, as in any network


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
