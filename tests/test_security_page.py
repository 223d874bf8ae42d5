"""Every promise of docs/security.md is kept by tests, which exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text()
PROMISES = re.findall(r"^\| \d+ \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)


def test_there_are_promises() -> None:
    assert len(PROMISES) == len(re.findall(r"^\| \d+ \|", PAGE, re.MULTILINE)) > 10


@pytest.mark.parametrize(("promise", "tests"), PROMISES)
def test_a_promise_is_kept_by_tests(promise: str, tests: str) -> None:
    named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", tests)
    assert named, f"nothing keeps: {promise}"
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / file).read_text(), f"no {name} in {file}"
