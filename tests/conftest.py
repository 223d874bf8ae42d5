"""What every test gets: a check that it leaks nothing, and how many cases to try.

GRADWIRE_FUZZ multiplies the cases, of hypothesis and of tests that take `fuzz_seed`. By itself, a
fifth of the usual number is tried, so that `make test` is quick; `make fuzz` tries all of them.
"""

import faulthandler
import gc
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import is_hypothesis_test, settings
from torch.distributed import TCPStore

# Threads and sockets end a little after what closed them returns.
GRACE = 5.0
FUZZ = float(os.environ.get("GRADWIRE_FUZZ", "0.2"))


def cases(usual: int) -> int:
    """How many to try where that many are usual."""
    return max(1, round(usual * FUZZ))


settings.register_profile(
    "gradwire",
    deadline=None,  # the per-test timeout is the limit; a slow machine is no bug
    print_blob=True,
    derandomize=os.environ.get("CI") == "true",  # CI fails for the change at hand only
    max_examples=cases(100),
)
settings.load_profile("gradwire")


def pytest_sessionstart() -> None:
    # Each of these opens a pipe on first use and keeps it for the life of the process;
    # used once here, it is not taken for a leak of the first test that needs it.
    resource_tracker.ensure_running()  # multiprocessing
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # libuv, in torch
    torch.ones((), requires_grad=True).backward()  # torch's engine, and CUDA with it


STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a process of pytest-xdist's
        with config.pluginmanager.getplugin(
            "capturemanager"
        ).global_and_fixture_disabled():
            config.stash[STDERR] = os.dup(2)


# What pytest-timeout prints there is lost, and a test that hangs says nothing but that its process
# is gone.
@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    stderr = item.config.stash.get(STDERR, None)
    if stderr is None:
        return None
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=stderr)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    if STDERR not in item.config.stash:
        return None
    faulthandler.cancel_dump_traceback_later()
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # One test per seed: each has its own timeout and leak check, and its own id.
    if "fuzz_seed" in metafunc.fixturenames:
        metafunc.parametrize("fuzz_seed", range(cases(20)))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        by_seed = "fuzz_seed" in getattr(item, "fixturenames", ())
        # Not by the marker `hypothesis`: its plugin adds that after this.
        if by_seed or is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("fuzz")


@pytest.fixture(autouse=True, scope="module")
def what_is_loaded_stays() -> None:
    """A collection need not look at torch and the tests, and takes 20 ms instead of 500 ms."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread, a descriptor or a shared segment behind."""
    before = _held()
    had_cuda = torch.cuda.is_initialized()
    failures = request.session.testsfailed
    yield
    if request.session.testsfailed > failures:
        return  # the traceback keeps the frames, and they keep what they held
    if torch.cuda.is_initialized() and not had_cuda:
        return  # the driver keeps what it has opened, and nobody can tell that from ours
    deadline = time.monotonic() + GRACE
    # Collecting takes far longer than looking, so only where something is left.
    while leaked := _held() - before:
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + ", ".join(sorted(leaked)), pytrace=False)
        gc.collect()
        time.sleep(0.01)


def _held() -> set[str]:
    return {*_threads(), *_descriptors(), *_segments()}


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        # torch's own threads get such an object when they first run Python code,
        # and keep it.
        if not isinstance(thread, threading._DummyThread):
            yield f"thread {thread.name} ({thread.ident})"


def _descriptors() -> Iterator[str]:
    folder = "/proc/self/fd"
    if not os.path.isdir(folder):
        return
    for number in os.listdir(folder):
        try:
            path = os.readlink(f"{folder}/{number}")
            # The driver's own, and matplotlib's, which reads each font once.
            if not path.startswith("/dev/nvidia") and not path.endswith(".ttf"):
                yield f"descriptor {number} ({path})"
        except FileNotFoundError:
            continue  # closed meanwhile, as the one that lists the folder always is


def _segments() -> Iterator[str]:
    maps = Path("/proc/self/maps")
    # The prefixes matter: the checkout's path may well have our name in it too.
    names = (b"/memfd:gradwire", b"/dev/shm/gradwire")
    content = maps.read_bytes() if maps.exists() else b""
    if not any(name in content for name in names):
        return  # the common case, without splitting hundreds of lines
    for line in content.splitlines():
        _, _, _, _, inode, *path = line.split(maxsplit=5)
        if path and path[0].startswith(names):
            yield f"segment {path[0].decode()} ({inode.decode()})"
