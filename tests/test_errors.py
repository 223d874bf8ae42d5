"""Errors as users see them: short, with the lines of their own code, and what to do at the end."""

import ast
import pickle
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.testing import World

PACKAGE = str(Path(gw.__file__).parent)
PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
PUBLIC = [
    value
    for value in (getattr(gw, name) for name in gw.__all__)
    if isinstance(value, type) and issubclass(value, gw.GradwireError)
]


def mismatch(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.ones(3, 4)  # raises


def by_way_of(name: str, x: torch.Tensor) -> Any:
    return gw.rpc_sync(name, mismatch, (x,))


def deep(depth: int) -> None:
    if depth == 0:
        raise ValueError("at the bottom")
    deep(depth - 1)


X = torch.ones(2, 2)
WAYS = {
    "rpc_sync": lambda: gw.rpc_sync("worker1", mismatch, (X,)),
    "rpc_async": lambda: gw.rpc_async("worker1", mismatch, (X,)).wait(),
    "value": lambda: torch.futures.wait_all([gw.rpc_async("worker1", mismatch, (X,))]),
    "to_here": lambda: gw.remote("worker1", mismatch, (X,)).to_here(),
    "local_value": lambda: gw.remote("worker0", mismatch, (X,)).local_value(),
    "method": lambda: gw.remote("worker1", nn.Linear, (3, 4)).rpc_sync()(X),
    "module": lambda: gw.RemoteModule("worker1", nn.Linear, (3, 4))(X),
    "nested": lambda: gw.rpc_sync("worker1", by_way_of, ("worker2", X)),
    "deep": lambda: gw.rpc_sync("worker1", deep, (500,)),
    "no worker": lambda: gw.rpc_sync("worker7", mismatch, (X,)),
    "optimizer": lambda: gw.DistributedOptimizer(
        torch.optim.SGD, gw.nn.remote_parameters(module()), lr=-1
    ),
}
ways = pytest.mark.parametrize("way", WAYS)


def module() -> nn.Module:
    return gw.RemoteModule("worker1", nn.Linear, (3, 4))


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("GRADWIRE_DEBUG", raising=False)
    with World(3) as world, world.as_worker(0):
        yield


def printed(way: str) -> str:
    """What Python prints for an error that nobody catches."""
    try:
        WAYS[way]()
    except Exception as error:  # noqa: BLE001 whatever it is
        return "".join(traceback.format_exception(error))
    raise AssertionError("it works")


def own_frames(text: str) -> list[str]:
    return re.findall(rf'File "{re.escape(PACKAGE)}[^\n]*', text)


@ways
def test_our_own_frames_are_hidden_but_for_what_was_called(
    way: str,
) -> None:
    frames = own_frames(printed(way))
    assert len(frames) <= 1 + (way in ("optimizer", "value", "method")), frames


@ways
def test_debugging_shows_all_frames(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_DEBUG", "1")
    assert len(own_frames(printed(way))) > 2


@pytest.mark.parametrize("way", [w for w in WAYS if w not in ("deep", "no worker")])
def test_an_error_fits_on_a_screen(way: str) -> None:
    assert printed(way).count("\n") <= 40


@pytest.mark.parametrize(
    "way", ["rpc_sync", "rpc_async", "to_here", "local_value", "nested"]
)
def test_the_line_that_raised_is_shown_once(way: str) -> None:
    assert printed(way).count("# raises") == 1


def test_users_frames_on_all_workers_are_shown() -> None:
    text = printed("nested")
    assert [n for n in ("mismatch", "by_way_of") if f"in {n}\n" not in text] == []
    assert "worker1" in text
    assert "worker2" in text


def test_an_error_of_several_owners_has_the_traceback_of_each() -> None:
    modules = [gw.RemoteModule(f"worker{n}", nn.Linear, (3, 4)) for n in (1, 2)]
    parameters = [p for m in modules for p in gw.nn.remote_parameters(m)]
    with pytest.raises(gw.OwnersError) as caught:
        gw.DistributedOptimizer(torch.optim.SGD, parameters, lr=-1)
    error = caught.value
    assert error.traces.keys() == error.errors.keys() == {"worker1", "worker2"}
    assert all("in __init__" in trace for trace in error.traces.values())
    assert str(error).count("in __init__") == 1  # it is the same on both
    assert "on worker1, worker2: Traceback" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.traces) == (str(error), error.traces)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 prints no notes")
def test_the_last_line_says_what_to_do() -> None:
    with pytest.raises(gw.CallTimeout) as caught:
        raise gw.CallTimeout("f", "worker1", 3)
    last = traceback.format_exception(caught.value)[-1]
    assert (
        last.strip()
        == "to find out what it waits for, see CallTimeout in docs/errors.md"
    )


def fails(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda _: gw.backward(77, [x]))
    return y


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 prints no notes")
def test_the_last_line_of_a_failed_backward_says_what_to_do_once() -> None:
    with gw.context() as ctx:
        y = gw.rpc_sync("worker1", fails, (torch.ones(2, requires_grad=True),))
        with pytest.raises(gw.GradwireError, match="Error on Node 1") as caught:
            gw.backward(ctx, [y.sum()])
    assert "see" not in str(caught.value)
    last = traceback.format_exception(caught.value)[-1]
    assert last.strip() == "see GradwireError in docs/errors.md"


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_every_public_error_has_an_entry_in_the_docs(kind: type[Exception]) -> None:
    assert f"\n## {kind.__name__}\n" in PAGE.read_text()


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_what_an_error_advises_names_its_entry(kind: Any) -> None:
    assert f"see {kind.__name__} in docs/errors.md" in kind._advice


def texts() -> Iterator[str]:
    """All strings of the package except docstrings; `…` stands for what a string fills in."""
    for path in Path(PACKAGE).rglob("*.py"):
        within: set[ast.AST] = set()  # docstrings, and what an f-string consists of
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr):
                within.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                within.update(node.values)
                parts = (getattr(part, "value", None) for part in node.values)
                yield "".join(p if isinstance(p, str) else "…" for p in parts)
            elif isinstance(node, ast.Constant) and node not in within:
                yield node.value if isinstance(node.value, str) else ""


def test_messages_that_the_docs_quote_are_so_in_the_source() -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", PAGE.read_text(), flags=re.DOTALL)
    quoted = re.findall(r"\*([^*\s][^*\n]*)\*|\"([^\"\n]+)\"", prose)
    messages = ["".join(either) for either in quoted]
    assert len(messages) >= 8
    source = list(texts())

    def is_known(message: str) -> bool:
        pattern = ".*".join(re.escape(part) for part in message.split("…"))
        return any(re.search(pattern, text, re.IGNORECASE) for text in source)

    assert [message for message in messages if not is_known(message)] == []
