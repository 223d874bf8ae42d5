"""`gradwire bench`: how figures are put together, and one short run."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import gradwire as gw
from gradwire._autograd.segments import walk
from gradwire.testing import World
from gradwire.tools.bench import ray_monarch
from gradwire.tools.bench.command import main
from gradwire.tools.bench.picture import draw
from gradwire.tools.bench.report import Samples, markdown, show, summarize
from gradwire.tools.bench.tasks import (
    TASKS,
    Caller,
    Sample,
    backward_over_local_nodes,
    local_nodes,
)
from gradwire.tools.bench.ways import available

PNG = b"\x89PNG"
GREEN, RED = "\x1b[32m", "\x1b[31m"


def samples() -> Samples:
    """Two rounds, the second on a machine that was twice as slow for a while."""
    return {
        "no-op call": {
            "torch": [{"median": 100e-6}, {"median": 200e-6}],
            "gradwire": [{"median": 10e-6}, {"median": 20e-6}],
            "Ray": [{"median": 200e-6}, {"median": 400e-6}],
        },
        "tiny forward and backward": {
            "torch": [{"median": 1e-3}, {"median": 1e-3}],
            "gradwire": [{"median": 0.2e-3}, {"median": 0.2e-3}],
            "Ray": [None, None],
        },
    }


def shown(summary: dict[str, Any], **options: Any) -> str:
    text = StringIO()
    show(summary, Console(file=text, width=120, **options))
    return text.getvalue()


LOCAL = "backward over 5,000 local nodes"


def local_samples(*ours: float) -> Samples:
    """Rounds of a local graph, which plain torch goes through in 20 ms."""

    def rounds(times: list[float]) -> list[Sample | None]:
        return [
            {"median": time, "local": 20e-3, "over_local": time / 20e-3 - 1}
            for time in times
        ]

    return {LOCAL: {"torch": rounds([21e-3] * len(ours)), "gradwire": rounds([*ours])}}


def test_ratios_are_those_of_the_same_round() -> None:
    row = summarize(samples())["no-op call"]
    assert [row[way]["ratio"] for way in row] == pytest.approx([1, 10, 0.5])
    assert row["gradwire"]["median"] == pytest.approx(15e-6)


def test_what_a_way_cannot_do_is_left_out(tmp_path: Path) -> None:
    summary = summarize(samples())
    assert summary["tiny forward and backward"]["Ray"] is None
    assert "–" in shown(summary)
    draw(summary, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(PNG)


def test_the_table_for_a_page_has_the_same_figures() -> None:
    assert markdown(summarize(samples())).splitlines() == [
        "| | torch | gradwire | Ray |",
        "|---|---|---|---|",
        "| no-op call | 150 µs | 15 µs, **×10** | 300 µs, ×0.5 |",
        "| tiny forward and backward | 1 ms | 200 µs, **×5** | – |",
    ]


def test_what_is_local_is_compared_with_plain_torch() -> None:
    summary = summarize(local_samples(24e-3, 22e-3, 23e-3))
    assert summary[LOCAL]["gradwire"]["over_local"] == pytest.approx(0.15)
    text = shown(summary)
    assert "│ 23.0 ms  +15 % │" in text
    assert f"{LOCAL}: 23.0 ms in a context, 20.0 ms without one, +15 %" in text
    assert markdown(summary).splitlines()[-1] == (
        f"| {LOCAL} | 21 ms, +5 % | 23 ms, **+15 %** |"
    )


def test_tls_is_compared_with_plain_tcp() -> None:
    found: Samples = {
        "send 64 MB": {
            "gradwire, TCP": [{"median": 10e-3}],
            "gradwire, TLS": [{"median": 16e-3}],
        }
    }
    text = shown(summarize(found))
    assert "gradwire, TLS: send 64 MB: 62% of the throughput of plain TCP" in text


@pytest.mark.parametrize(
    ("ours", "cell"), [(23e-3, f"{GREEN}+15 %"), (25e-3, f"{RED}+25 %")]
)
def test_a_promise_beside_plain_torch_is_shown_as_kept_or_broken(
    ours: float, cell: str
) -> None:
    text = shown(
        summarize(local_samples(ours)), force_terminal=True, color_system="standard"
    )
    assert "< +20 %" in text
    assert cell in text
    assert "│ 21.0 ms  +5 % │" in text  # torch has promised nothing: no colour


def test_the_local_graph_has_5000_nodes() -> None:
    reach = walk([(local_nodes().grad_fn, 0)], {})
    assert len(reach.nodes) + len(reach.leaves) == 5000


def test_a_local_pass_is_measured_beside_plain_torch() -> None:
    def call(func: object, args: object) -> None: ...

    with World(1) as world, world.as_worker(0):
        caller = Caller(sync=call, start=call, autograd=gw.autograd)
        sample = backward_over_local_nodes(caller, 2)
    assert sample["local"] > 0
    assert 0 < sample["median"] <= sample["p99"]
    more = sample["median"] / sample["local"] - 1
    assert sample["over_local"] == pytest.approx(more)


def test_a_way_runs_the_tasks_that_it_can() -> None:
    def call(func: object, args: object) -> None: ...

    plain = Caller(sync=call, start=call)
    left_out = {task.needs for task in TASKS if not task.can_run(plain)}
    assert left_out == {"remote", "autograd", "optimizer", "scripted"}


def test_rivals_are_measured_where_they_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_monarch, "find_spec", lambda package: package == "ray")
    assert available()[-1] == "Ray"
    monkeypatch.setattr(ray_monarch, "find_spec", lambda package: None)
    ours = ["gradwire", "gradwire, TCP", "gradwire, TLS"]
    assert available() == ["torch", "torch, huge pages", *ours]


@pytest.mark.slow
def test_a_short_run_writes_figures_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    only = ["--only", "no-op call", "local nodes", "--rounds", "1"]
    ways = ["--ways", "torch", "gradwire"]
    assert main([*only, *ways, "--json", str(figures), "--png", str(picture)]) == 0
    found = json.loads(figures.read_text())["loops"]
    assert found["no-op call"]["gradwire"]["ratio"] > 0
    assert found[LOCAL]["gradwire"]["local"] > 0
    assert picture.read_bytes().startswith(PNG)
    assert "no-op call" in capsys.readouterr().out


def test_a_word_that_names_no_task_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])
    assert "--only nonsense: part of none of" in capsys.readouterr().err
