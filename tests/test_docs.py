"""What the README shows is run, and has to print what the README says."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_SHOWN = re.compile(r"```python\n(.*?)```\s*```text\n(.*?)```", re.DOTALL)


def examples() -> list[tuple[str, str]]:
    return _SHOWN.findall((ROOT / "README.md").read_text())


def test_the_readme_has_examples() -> None:
    assert len(examples()) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(examples())))
def test_readme_example_prints_what_it_says(number: int, tmp_path: Path) -> None:
    code, shown = examples()[number]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        code = code.replace("29511", str(probe.getsockname()[1]))
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, shown), done.stderr
    assert done.stderr == ""


def test_every_option_is_documented() -> None:
    from gradwire import Options

    text = (ROOT / "docs" / "calls.md").read_text()
    assert [name for name in Options.names() if f"`{name}`" not in text] == []
