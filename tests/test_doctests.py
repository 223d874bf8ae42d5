"""The examples in docstrings are run, on a loopback world, and say what really comes out."""

import doctest
import importlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed import HashStore

import gradwire
from gradwire.testing import World

SOURCE = Path(__file__).parents[1] / "src"
SKIPPED = {"gradwire": 1, "gradwire.local": 1, "gradwire.serving": 1}
"""Examples that need a second process, by module."""


def modules_with_examples() -> list[str]:
    """Found in their text, so that only these are imported."""
    return [
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        for path in sorted(SOURCE.rglob("*.py"))
        if ">>> " in path.read_text()
    ]


def examples(module: ModuleType, world: World) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    known = {"torch": torch, "threading": threading, "gw": gradwire}
    known |= {"world": world, "HashStore": HashStore}
    return [t for t in finder.find(module, extraglobs=known) if t.examples]


@pytest.fixture
def world() -> Iterator[World]:
    with World(2) as world, world.as_worker(0):
        yield world


def test_the_modules_that_users_read_first_have_examples() -> None:
    first = {
        "gradwire",
        "gradwire.api",
        "gradwire._rpc.function_runner",
        "gradwire.testing.world",
    }
    assert first - set(modules_with_examples()) == set()


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_do_what_they_say(name: str, world: World) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    written = 0
    for test in examples(importlib.import_module(name), world):
        runner.run(test, out=report.append)
        written += len(test.examples)
    assert runner.failures == 0, "".join(report)
    assert runner.tries == written - SKIPPED.get(name, 0)
