"""What a pass costs: what docs/design.md says of it."""

from pathlib import Path

import pytest

from tests.simulate import curves
from tests.simulate.curves import calls, cost, pipeline


@pytest.mark.parametrize("workers", [2, 3, 10, 50])
def test_gradients_go_along_a_pipeline_once(workers: int) -> None:
    assert cost(pipeline(workers)) == (workers - 1, workers - 1)


@pytest.mark.parametrize("fan_out", [1, 2, 10, 50])
def test_workers_that_one_has_called_are_asked_at_once(fan_out: int) -> None:
    assert cost(calls(1, fan_out)) == (fan_out, 1)


@pytest.mark.parametrize(("depth", "fan_out"), [(2, 1), (2, 5), (3, 3), (6, 1)])
def test_nested_calls_cost_what_edges_workers_and_depth_say(
    depth: int, fan_out: int
) -> None:
    program = calls(depth, fan_out)
    messages, round_trips = cost(program)
    assert messages <= len(program.sent) + program.workers
    assert round_trips == program.depth + 2


def test_the_curves_can_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BY_WORKERS", "BY_DEPTH", "BY_FAN_OUT"):
        few = {
            key: (shape, (2, 3)) for key, (shape, _) in getattr(curves, name).items()
        }
        monkeypatch.setattr(curves, name, few)
    curves.draw(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
