"""Programs written for torch.distributed.rpc, run unmodified: the same losses as on torch.

They are in `programs/`, and print a loss a line. Losses are compared by value, because torch's
optimizers there are other ones than `torch.optim`'s, which round differently in the last digit.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem != "programs")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def run_on_torch(program: str) -> subprocess.CompletedProcess[str]:
    """torch's own shutdown may fail: the rank that has the store does not wait for the others."""
    for _ in range(3):
        done = run(program)
        if "DistNetworkError: Connection reset by peer" not in done.stderr:
            break
    return done


def test_there_is_a_program_of_each_shape() -> None:
    shapes = "actors batching ddp_and_rpc notes parameter_server pipeline rnn"
    assert shapes.split() == NAMES


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", NAMES)
def test_a_program_gives_the_same_losses_as_on_torch(name: str) -> None:
    program = str(PROGRAMS / f"{name}.py")
    with ThreadPoolExecutor() as both:
        on_torch = both.submit(run_on_torch, program)
        on_gradwire = both.submit(run, "-m", "gradwire", "run", program)
    ours = losses(on_gradwire.result())
    assert len(ours) >= 3
    assert ours == pytest.approx(losses(on_torch.result()), rel=1e-4)
