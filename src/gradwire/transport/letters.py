"""Letters: small frames that go by shared memory, from one end of a lane to the other.

Whoever reads a lane looks again and again for a short while before it sleeps (`spin.py`). While it
does, the other end may leave a frame where it looks, instead of sending it: that takes no call of
the system at either end, and these are most of what a small frame costs. Each direction has a box:

    offset  size  field
    0       4     looking: 0, or one more than the bytes that its reader has taken from the socket
    64      4     length of the letter; 0: there is none
    68            the letter: a whole frame

Frames stay in order, and none is left lying:

* A letter is left only for one who has taken all bytes that were ever sent by the socket. So all
  that is older has been taken; and what is taken from the socket while a letter lies there is
  younger.
* Whoever ceases to look says so, and then looks once more. Whoever has left a letter looks whether
  someone still looks, and rings by the socket if not. Each writes one word and then reads the
  other's, with a fence in between: so at least one of them sees what the other wrote.

This needs a processor that lets others see what it writes in the order in which it wrote it (x86);
elsewhere there are no letters. Nothing here waits, and the other end is not trusted: what it wrote
is copied before it is looked at.
"""

from __future__ import annotations

import platform
import threading

BOXES = 64 << 10
"""Bytes of memory for both directions."""

_BOX = BOXES // 2
_LOOKING, LENGTH = 0, 16  # words
_LETTER = 68
_MOST = _BOX - _LETTER
_ROUND = 1 << 31  # bytes are counted to here, and then again from 0


def are_possible() -> bool:
    """Whether this processor can have them."""
    return platform.machine() in ("x86_64", "AMD64")


class Outbox:
    """Where one end leaves letters. One thread at a time."""

    __slots__ = ("_box", "_fence", "_words")

    def __init__(self, box: memoryview) -> None:
        self._box = box
        self._words = box.cast("I")
        self._fence = threading.Lock()

    def put(self, letter: bytes, sent: int) -> bool | None:
        """Leave a letter; whether it will be found. If not, the other end has to be rung.

        None: this has to go by the socket, as `sent` bytes have so far.
        """
        words, length = self._words, len(letter)
        if words[_LOOKING] != sent % _ROUND + 1 or words[LENGTH] or length > _MOST:
            return None
        self._box[_LETTER : _LETTER + length] = letter
        words[LENGTH] = length
        with self._fence:  # to take a lock is one
            pass
        return words[_LOOKING] != 0


class Inbox:
    """Where the other end looks for them. One thread at a time."""

    __slots__ = ("_box", "_fence", "words")

    def __init__(self, box: memoryview) -> None:
        self._box = box
        self._fence = threading.Lock()
        self.words = box.cast("I")
        """That of `LENGTH` is not 0 when there is a letter; for those who look often."""

    def begin(self, taken: int) -> None:
        """Say that someone looks, who has taken so many bytes from the socket."""
        self.words[_LOOKING] = taken % _ROUND + 1

    def end(self) -> bytes | None:
        """Say that nobody looks any more; the letter, if there is one."""
        self.words[_LOOKING] = 0
        with self._fence:
            pass
        return self.take()

    def take(self) -> bytes | None:
        """The letter, if there is one."""
        length = self.words[LENGTH]
        if not length:
            return None
        letter = bytes(self._box[_LETTER : _LETTER + min(length, _MOST)])
        self.words[LENGTH] = 0
        return letter


def boxes(memory: memoryview, *, offered: bool) -> tuple[Inbox, Outbox]:
    """Those of the end that offered this memory, which is zeroed, or of the other."""
    halves = memory[:_BOX], memory[_BOX:BOXES]
    mine, other = halves if offered else halves[::-1]
    return Inbox(other), Outbox(mine)
