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


def losses(*command: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def test_there_is_a_program_of_each_shape() -> None:
    shapes = "actors batching ddp_and_rpc notes parameter_server pipeline rnn"
    assert shapes.split() == NAMES


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", NAMES)
def test_a_program_gives_the_same_losses_as_on_torch(name: str) -> None:
    program = str(PROGRAMS / f"{name}.py")
    with ThreadPoolExecutor() as both:
        torchs = both.submit(losses, program)
        ours = both.submit(losses, "-m", "gradwire", "run", program)
    assert len(ours.result()) >= 3
    assert ours.result() == pytest.approx(torchs.result(), rel=1e-4)
