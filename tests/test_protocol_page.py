"""What docs/protocol.md says in numbers is what the code has."""

import re
from pathlib import Path

from gradwire._transport import handshake
from gradwire._transport.handshake import Purpose, Verdict
from gradwire._wire import codec, dense_tensors, frames
from gradwire._wire.messages import GOODBYE, NOTES, PING, PONG
from gradwire.options import Options
from gradwire.testing import World

PAGE = (Path(__file__).parents[1] / "docs" / "protocol.md").read_text()


def numbers(cells: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", cells)]


def kinds() -> dict[str, int]:
    """The kinds of messages of the page, by name."""
    found = {}
    for codes, names in re.findall(r"^\| ([\d, ]+) \| ([\w, ]+) \| .*\|$", PAGE, re.M):
        if not re.fullmatch(r"[\d, ]+", names):
            found |= dict(zip(names.split(", "), numbers(codes), strict=True))
    return found


def test_the_versions() -> None:
    assert (
        f"Handshake version {handshake.VERSION}, frame version {frames.VERSION}."
        in PAGE
    )


def test_the_sizes_of_a_handshake() -> None:
    assert f"hello ({handshake.HELLO_SIZE} bytes)" in PAGE
    assert f"challenge ({handshake.CHALLENGE_SIZE} bytes)" in PAGE
    assert f"proof ({handshake.PROOF_SIZE} bytes)" in PAGE
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line[:2] == "| "]
    sizes = [(row[1].strip(), row[4].strip()) for row in rows if len(row) == 5]
    sizes = sizes[1:]  # the first row is the head
    assert sum(int(mine) for mine, _ in sizes) == handshake.HELLO_SIZE
    assert sum(int(theirs or 0) for _, theirs in sizes) == handshake.CHALLENGE_SIZE


def test_purposes_and_verdicts() -> None:
    purposes = ", ".join(f"{one.value} {one.name.lower()}" for one in Purpose)
    assert f"purpose: {purposes}" in PAGE
    (verdicts,) = re.findall(r"verdict: ([^|]*?) \|", PAGE)
    known = [f"{one.value} {one.name.lower().replace('_', ' ')}" for one in Verdict]
    assert verdicts.lower().split(", ") == known


def test_the_places_of_strangers() -> None:
    options = Options()
    assert options.handshake_timeout == 5
    assert f"most {options.max_strangers} may be in a handshake" in PAGE
    assert f"and {options.max_strangers_per_address} of one IP address" in PAGE


def test_the_fields_of_a_frame() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| [^|]+ \|$", PAGE, re.M)
    ends = [0]
    for offset, size in rows:
        assert int(offset) == ends[-1]
        ends.append(int(offset) + int(size))
    assert ends[-1] == frames.HEADER.size
    codes = {1: "B", 2: "H", 4: "I", 8: "Q"}
    assert frames.HEADER.format == "<" + "".join(codes[int(size)] for _, size in rows)


def test_the_kinds_of_messages() -> None:
    with World(1) as world:
        known = world.workers[0]._agent._codec._codec._types
    expected = {kind.__name__: number for number, kind in known.items()}
    assert kinds() == {**expected, "ping": PING, "pong": PONG, "goodbye": GOODBYE}
    assert {PING, PONG, GOODBYE} == NOTES


def test_encodings_and_bounds() -> None:
    for number, name in [
        (codec.COMPILED, "compiled"),
        (codec.PICKLED, "pickled"),
        (codec.CUSTOM, "custom"),
    ]:
        assert f"| {number} {name} |" in PAGE
    assert f"| {codec.SAFE_COMPILED}, {codec.SAFE} |" in PAGE
    assert f"up\nto {dense_tensors.INLINE >> 10} KiB" in PAGE
    assert f"multiple of {frames.ALIGNMENT} bytes" in PAGE
