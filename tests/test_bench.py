"""`gradwire bench`: how figures are put together, and one short run."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from gradwire.tools.bench import rivals
from gradwire.tools.bench.command import main
from gradwire.tools.bench.contender import available
from gradwire.tools.bench.picture import draw
from gradwire.tools.bench.report import Samples, markdown, show, summarize
from gradwire.tools.bench.tasks import TASKS, Caller

PNG = b"\x89PNG"


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


def test_ratios_are_those_of_the_same_round() -> None:
    row = summarize(samples())["no-op call"]
    assert [row[way]["ratio"] for way in row] == pytest.approx([1, 10, 0.5])
    assert row["gradwire"]["median"] == pytest.approx(15e-6)


def test_what_a_way_cannot_do_is_left_out(tmp_path: Path) -> None:
    summary = summarize(samples())
    assert summary["tiny forward and backward"]["Ray"] is None
    text = StringIO()
    show(summary, Console(file=text, width=120))
    assert "–" in text.getvalue()
    draw(summary, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(PNG)


def test_the_table_for_a_page_has_the_same_figures() -> None:
    assert markdown(summarize(samples())).splitlines() == [
        "| | torch | gradwire | Ray |",
        "|---|---|---|---|",
        "| no-op call | 150 µs | 15 µs, **×10** | 300 µs, ×0.5 |",
        "| tiny forward and backward | 1 ms | 200 µs, **×5** | – |",
    ]


def test_a_way_runs_the_tasks_that_it_can() -> None:
    def call(func: object, args: object) -> None: ...

    plain = Caller(sync=call, start=call)
    left_out = {task.needs for task in TASKS if not task.can_run(plain)}
    assert left_out == {"remote", "autograd", "optimizer"}


def test_rivals_are_measured_where_they_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rivals, "find_spec", lambda package: package == "ray")
    assert available()[-1] == "Ray"
    monkeypatch.setattr(rivals, "find_spec", lambda package: None)
    assert available() == ["torch", "torch, huge pages", "gradwire", "gradwire, TCP"]


@pytest.mark.slow
def test_a_short_run_writes_figures_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    only = ["--only", "no-op call", "--rounds", "1", "--ways", "torch", "gradwire"]
    assert main([*only, "--json", str(figures), "--png", str(picture)]) == 0
    assert json.loads(figures.read_text())["no-op call"]["gradwire"]["ratio"] > 0
    assert picture.read_bytes().startswith(PNG)
    assert "no-op call" in capsys.readouterr().out


def test_a_word_that_names_no_task_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])
    assert "--only nonsense: part of none of" in capsys.readouterr().err
