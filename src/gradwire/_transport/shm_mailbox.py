"""Letters: small frames that go by shared memory, from one end of a lane to the other.

Whoever reads a lane looks again and again for a short while before it sleeps (`busy_poll.py`).
While it
does, the other end may leave a frame where it looks, instead of sending it: that takes no call of
the system at either end, and these are most of what a small frame costs. Each direction has a box:

    offset  size  field
    0       4     looking: 0, or one more than the bytes that its reader has taken from the socket
    64      4     length of the letter; 0: there is none
    68      4     bytes that its writer has sent by the socket so far
    72            the letter: a whole frame

So who looks need not ask the system whether there is something in the socket, which takes longer
than a look, and slows down what is done next (a small pass by 7 %).

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
_LOOKING, _LENGTH, _SENT = 0, 16, 17  # words
_LETTER = 72
_MOST = _BOX - _LETTER
_ROUND = 1 << 31  # bytes are counted to here, and then again from 0
_GLANCES = range(96)  # at the letter, for one at the socket: most frames are letters
_LOOKS = range(25)  # about 60 microseconds


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

    def note(self, sent: int) -> None:
        """So many bytes have been sent by the socket."""
        self._words[_SENT] = sent % _ROUND

    def put(self, letter: bytes, sent: int) -> bool | None:
        """Leave a letter; whether it will be found. If not, the other end has to be rung.

        None: this has to go by the socket, as `sent` bytes have so far.
        """
        words, length = self._words, len(letter)
        if words[_LOOKING] != sent % _ROUND + 1 or words[_LENGTH] or length > _MOST:
            return None
        self._box[_LETTER : _LETTER + length] = letter
        words[_LENGTH] = length
        with self._fence:  # to take a lock is one
            pass
        return words[_LOOKING] != 0


class Inbox:
    """Where the other end looks for them. One thread at a time."""

    __slots__ = ("_box", "_fence", "_words")

    def __init__(self, box: memoryview) -> None:
        self._box = box
        self._fence = threading.Lock()
        self._words = box.cast("I")

    def begin(self, taken: int) -> None:
        """Say that someone looks, who has taken so many bytes from the socket."""
        self._words[_LOOKING] = taken % _ROUND + 1

    def end(self) -> bytes | None:
        """Say that nobody looks any more; the letter, if there is one."""
        self._words[_LOOKING] = 0
        with self._fence:
            pass
        return self.take()

    def take(self) -> bytes | None:
        """The letter, if there is one."""
        length = self._words[_LENGTH]
        if not length:
            return None
        letter = bytes(self._box[_LETTER : _LETTER + min(length, _MOST)])
        self._words[_LENGTH] = 0
        return letter

    def look(self, taken: int) -> bytes | None:
        """The letter, if one comes soon, and nothing by the socket before it.

        For so long it keeps Python's lock.
        """
        words, taken = self._words, taken % _ROUND
        for _ in _LOOKS:
            for _ in _GLANCES:
                if words[_LENGTH]:
                    return self.take()
            if words[_SENT] != taken:
                break
        return None


def boxes(memory: memoryview, *, offered: bool) -> tuple[Inbox, Outbox]:
    """Those of the end that offered this memory, which is zeroed, or of the other."""
    halves = memory[:_BOX], memory[_BOX:BOXES]
    mine, other = halves if offered else halves[::-1]
    return Inbox(other), Outbox(mine)
