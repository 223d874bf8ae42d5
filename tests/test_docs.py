"""What the README and the guides show is run, and has to print what they say.

A block of Python that is followed by a block of text is a program; its comment may name the command
that runs it. Others are pieces of one: they are run here, with what `BEFORE` puts before them, or
if that makes no sense at least looked at: every name of ours exists and takes these arguments.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import gradwire as gw
from gradwire.testing import World
from gradwire.tools.graph import capture
from gradwire.tools.graph.picture import draw
from tests.processes import PATHS
from tests.worlds import free_port

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(?:<!-- run: (.*?) -->\n)?```python\n(.*?)```", re.DOTALL)
_SHELL_THEN_TEXT = re.compile(r"\s*(?:```sh\n[^`]*```\s*)?```text\n(.*?)```", re.DOTALL)

BEFORE = {
    "recovery.md": "batch = torch.ones(2)\n",
    "autograd.md": "def first_layer(x): return x * w\n"
    "def second_layer(h, t): return (h - t).square().sum()\n"
    "w = torch.ones(2, requires_grad=True)\n"
    "x, target = torch.ones(2, requires_grad=True), torch.zeros(2)\n",
}
"""By page: what its pieces need. They run as worker0 of a world of three."""


class Block(NamedTuple):
    """A block of Python."""

    page: Path
    number: int
    code: str
    command: str
    shown: str | None
    """What it prints; None for a piece of a program."""


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for number, found in enumerate(_BLOCK.finditer(text)):
            after = _SHELL_THEN_TEXT.match(text, found.end())
            command = found[1] or "example.py"
            yield Block(page, number, found[2], command, after and after[1])


def named(blocks: list[Block]) -> Any:
    ids = [f"{block.page.name}-{block.number}" for block in blocks]
    return pytest.mark.parametrize("block", blocks, ids=ids)


PROGRAMS = [block for block in blocks() if block.shown is not None]
PIECES = [block for block in blocks() if block.shown is None]


def test_every_guide_has_a_program() -> None:
    having = {block.page.stem for block in PROGRAMS}
    guides = {"README", "calls", "references", "autograd", "training", "tools"}
    assert guides - having == set()


@pytest.mark.slow
@named(PROGRAMS)
def test_a_program_prints_what_the_page_says(block: Block, tmp_path: Path) -> None:
    code = block.code.replace("29511", str(free_port()))
    *launch, script = block.command.split()
    (tmp_path / script).write_text(code)
    module = ["-m", *launch] if launch else []
    done = subprocess.run(
        [sys.executable, *module, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, block.shown), done.stderr
    lines = done.stderr.splitlines()  # on a busy machine a worker may have to wait
    assert [line for line in lines if "waiting for ranks" not in line] == []


@pytest.mark.parametrize("page", BEFORE)
def test_the_pieces_of_a_page_run(page: str) -> None:
    pieces = [block.code for block in PIECES if block.page.name == page]
    assert pieces
    with World(3) as world, world.as_worker(0):
        for piece in pieces:
            names: dict[str, Any] = {}
            exec("import torch\nimport gradwire as gw\n" + BEFORE[page] + piece, names)


@named(PIECES)
def test_a_piece_uses_what_there_is(block: Block) -> None:
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("gw."):
            function: Any = gw
            for name in ast.unparse(node.func).split(".")[1:]:
                function = getattr(function, name)
            given = {keyword.arg or "": None for keyword in node.keywords}
            signature = inspect.signature(function)
            signature.bind(*node.args, **given)
            if "options" in signature.parameters:
                for option in given.keys() - signature.parameters.keys():
                    assert option in gw.Options.names(), option


def test_the_list_for_language_models_has_every_page() -> None:
    listed = re.findall(r"/docs/(\w+\.md)\)", (ROOT / "docs" / "llms.txt").read_text())
    assert sorted(listed) == sorted(page.name for page in PAGES[1:])


def test_every_page_is_in_the_navigation_and_nothing_is_fetched_from_elsewhere() -> (
    None
):
    site = (ROOT / "mkdocs.yml").read_text()
    assert sorted(re.findall(r"\w+\.md", site)) == sorted(p.name for p in PAGES[1:])
    assert "extra_javascript: [javascripts/mermaid.tiny.js]" in site
    assert "font: false" in site


def test_the_examples_page_shows_every_example() -> None:
    shown = re.findall(r'8<-- "(.*)"', (ROOT / "docs" / "examples.md").read_text())
    examples = sorted((ROOT / "examples").glob("*.py"))
    assert sorted(shown) == [f"examples/{path.name}" for path in examples]


def test_pages_that_are_linked_to_are_there() -> None:
    missing = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert missing == []


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "calls.md").read_text()
    assert [name for name in gw.Options.names() if f"`{name}`" not in text] == []


REFERENCE = (ROOT / "docs" / "reference.md").read_text()


def test_every_public_function_is_in_the_reference() -> None:
    listed = set(re.findall(r"^::: gradwire\.(\w+)$", REFERENCE, re.M))
    for line in re.findall(r"members: \[(.*)\]", REFERENCE):
        listed |= set(line.split(", "))
    functions = {n for n in gw.__all__ if callable(getattr(gw, n)) and not is_error(n)}
    assert functions - listed == set()


@pytest.mark.parametrize("kind", [gw.Worker, gw.RRef])
def test_the_reference_names_members_that_are_there_and_say_what_they_are(
    kind: type,
) -> None:
    (listed,) = re.findall(
        rf"::: gradwire\.{kind.__name__}\n    options:\n      members: \[(.*)\]",
        REFERENCE,
    )
    assert [
        name for name in listed.split(", ") if not getattr(kind, name).__doc__
    ] == []


FUNCTIONS = [n for n in gw.__all__ if inspect.isfunction(getattr(gw, n))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_explains_its_arguments(name: str) -> None:
    function = getattr(gw, name)
    text = inspect.getdoc(function) or ""
    if "those of `rpc_sync`" in text:
        text += inspect.getdoc(gw.rpc_sync) or ""
    parameters = inspect.signature(function).parameters
    assert [p for p in parameters if not re.search(rf"\b{p}\b", text)] == []


EXPLAINED = {
    **{name: getattr(gw, name) for name in gw.__all__ if callable(getattr(gw, name))},
    **{f"nn.{name}": getattr(gw.nn, name) for name in gw.nn.__all__},
    **{f"script.{name}": getattr(gw.script, name) for name in gw.script.__all__},
    "testing.World": World,
    "capture": capture,
    "draw": draw,
    "async_execution": gw.rpc.functions.async_execution,
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_public_name_has_an_example(name: str) -> None:
    value = EXPLAINED[name]
    if isinstance(value, type) and issubclass(value, (Exception, UserWarning)):
        return  # docs/errors.md has an entry for each
    text = inspect.getdoc(value) or ""
    assert ">>> " in text or re.search(r"\n\n    \w", text)


def is_error(name: str) -> bool:
    kind = getattr(gw, name)
    return isinstance(kind, type) and issubclass(kind, Exception)
