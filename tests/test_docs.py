"""What the README and the guides show is run, and has to print what they say."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_SHOWN = re.compile(r"```python\n(.*?)```\s*```text\n(.*?)```", re.DOTALL)


PAGES = [ROOT / "README.md", ROOT / "docs" / "training.md"]


def examples() -> list[tuple[str, str]]:
    return [shown for page in PAGES for shown in _SHOWN.findall(page.read_text())]


def test_every_page_has_examples() -> None:
    assert all(_SHOWN.search(page.read_text()) for page in PAGES)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(examples())))
def test_an_example_prints_what_it_says(number: int, tmp_path: Path) -> None:
    code, shown = examples()[number]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        code = code.replace("29511", str(probe.getsockname()[1]))
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
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
