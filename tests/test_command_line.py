"""The `gradwire` command itself: what it says before any of its subcommands has work to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire

SOURCE = Path(gradwire.__file__).parents[1]
COMMANDS = "launch run key doctor demo bench".split()


def gradwire_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it where the modules in a folder take the place of installed ones."""
    path = os.pathsep.join(map(str, (folder, SOURCE)))
    return subprocess.run(
        [sys.executable, "-m", "gradwire", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.fixture
def without_torch(tmp_path: Path) -> Path:
    """A folder in which torch cannot be imported."""
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
    return tmp_path


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=str)
def test_alone_it_prints_what_it_can_do(
    arguments: list[str], without_torch: Path
) -> None:
    done = gradwire_command(without_torch, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: gradwire COMMAND")
    assert [c for c in COMMANDS if f"\n  {c} " not in done.stdout] == []


def test_it_tells_its_version(without_torch: Path) -> None:
    done = gradwire_command(without_torch, "--version")
    assert (done.returncode, done.stdout) == (0, f"gradwire {gradwire.__version__}\n")


def test_an_unknown_command_is_named(without_torch: Path) -> None:
    done = gradwire_command(without_torch, "lunch")
    assert done.returncode == 2
    assert done.stderr.startswith("gradwire: no command 'lunch'\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_defaults_and_an_example_and_does_not_import_torch(
    command: str, without_torch: Path
) -> None:
    done = gradwire_command(without_torch, command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    options = done.stdout.partition("\noptions:")[2].split("\n  -")[2:]
    assert options or command == "key"
    assert [
        option for option in options if "(default: " not in " ".join(option.split())
    ] == []
    assert f"\nexample: gradwire {command} " in done.stdout


@pytest.mark.parametrize(
    ("command", "package"), [("bench", "psutil"), ("demo", "matplotlib")]
)
def test_a_missing_extra_says_how_to_install_it(
    command: str, package: str, tmp_path: Path
) -> None:
    missing = (
        f"raise ModuleNotFoundError('No module named {package}', name='{package}')"
    )
    (tmp_path / f"{package}.py").write_text(missing)
    done = gradwire_command(tmp_path, command)
    assert done.returncode == 1
    assert done.stderr == (
        f"gradwire {command} needs {package}, which is not installed; to install it:\n"
        f"  {sys.executable} -m pip install 'gradwire[{command}]'\n"
    )
