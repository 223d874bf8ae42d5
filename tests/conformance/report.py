"""What came out: the table of suites, and whether it is what `misses.py` says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from misses import MISSES

if TYPE_CHECKING:
    from bodies import Outcome

BEGIN, END = "<!-- table: make conformance -->", "<!-- end of table -->"


def table(ended: list[Outcome]) -> str:
    """A line for each suite."""
    lines = ["| suite | tests | pass | skipped by PyTorch | miss | seconds |"]
    lines.append("|---|---|---|---|---|---|")
    for suite in dict.fromkeys(outcome.suite for outcome in ended):
        lines.append(_line(suite, [o for o in ended if o.suite == suite]))
    lines.append(_line("**all**", ended))
    return "\n".join(lines)


def _line(name: str, ended: list[Outcome]) -> str:
    counts = Counter(outcome.status for outcome in ended)
    misses = len(ended) - counts["pass"] - counts["skip"]
    seconds = sum(outcome.seconds for outcome in ended)
    cells = (name, len(ended), counts["pass"], counts["skip"], misses, f"{seconds:.0f}")
    return "| " + " | ".join(map(str, cells)) + " |"


def judge(ended: list[Outcome], *, known: bool) -> int:
    """0 if the misses are the known ones; says what is not as expected."""
    misses = MISSES if known else {}
    failed = [o for o in ended if o.status in ("fail", "timeout")]
    new = [o for o in failed if _name(o) not in misses]
    passed = [o for o in ended if o.status == "pass" and _name(o) in misses]
    for outcome in new:
        print(f"{outcome.status}: {_name(outcome)}: {outcome.why}")
    for outcome in passed:
        print(f"passes, so it is no miss any more: {_name(outcome)}")
    return 1 if new or passed else 0


def put_into(page: Path, ended: list[Outcome]) -> None:
    """Replace the table in a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table(ended)}\n{END}{after}")


def _name(outcome: Outcome) -> str:
    return f"{outcome.suite}.{outcome.test}"
