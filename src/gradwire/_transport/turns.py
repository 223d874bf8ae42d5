"""Whose turn it is to read at one end of a lane: one thread's, or the poller's if there is none.

Who reads has the *role*. It hands out the answers, also those of others, and has requests started.
To take the role and to know who has it is one step, so that a Ctrl-C does not leave it to nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from .._wire.frames import Frame
from .endpoint import BROKEN, Station
from .framed_socket import Stream
from .questions import ANSWERS, Question

_ROLE = "reader"


class Turns:
    """What is known at one end of who waits for what, and who reads."""

    def __init__(self, station: Station, stream: Stream, peer: int) -> None:
        self.peer = peer
        self._station = station
        self._stream = stream
        self._frames = stream.reader.frames
        self._lock = threading.Lock()
        self._reader: dict[str, object] = {}
        self._questions: dict[int, Question] = {}
        self._owed: set[int] = set()  # questions given up, not yet answered
        self._jobs = 0  # requests that are being run
        self._stand_ins: set[object] = set()  # that look, or will
        self._resting = 0  # threads that wait without reading, for long
        self._tangled = False
        self._watched = False  # by the poller
        self._unattended = False  # no thread is here for longer: the poller reads
        self._error: BaseException | None = None
        self._over = False

    def fileno(self) -> int:
        return self._stream.sock.fileno()

    def ready(self) -> None:
        """The poller has something."""
        self._look()

    def _look(self) -> None:
        """Take in what is there, if no thread reads, and have the lane watched for more."""
        if not self._take_role(object()):
            return  # who reads has it watched again
        requests: list[Frame] = []
        try:
            try:
                if not self._stream.cease():  # who was interrupted may expect some
                    self._stream.reader.pull()
            except BlockingIOError:
                pass
            requests = self._take_in(None)
        except BROKEN as error:
            self.fail(error)
        finally:
            self._let_go()
        self._start(requests, None)

    def _take_in(self, reader: Question | None) -> list[Frame]:
        """With the role: hand out the answers that were read; the requests.

        Those are started without it: who runs one may ask back, and then has to have it.
        """
        requests = []
        frames = self._frames
        while frames:
            frame = frames.popleft()
            if frame.kind in ANSWERS:
                self._hand_out(frame, reader)
                continue
            requests.append(frame)
            with self._lock:
                self._jobs += 1
                if reader is not None:
                    reader.jobs += 1
                    reader.was_called_back = True
        return requests

    def _hand_out(self, answer: Frame, reader: Question | None) -> None:
        asked = self._questions.pop(answer.call, None)
        if asked is None:
            self._owed.discard(answer.call)  # who asked has given up
            return
        asked.answer = answer
        if asked is not reader:
            asked.bell.ring()

    # The role

    def _has_role(self, who: object) -> bool:
        return self._reader.get(_ROLE) is who

    def _take_role(self, who: object) -> bool:
        """Become the one who reads, if there is none."""
        if self._reader.setdefault(_ROLE, who) is not who:
            return False
        if self._watched:
            self._unwatch()
        return True

    def _pass_role(self, to: object) -> None:
        """Have another one read, who is not yet there. With the role."""
        self._reader[_ROLE] = to

    def _give_role(self, asker: Question) -> None:
        """Give the role to who handed a request over and sleeps: what comes next may be for it.

        It takes over when it wakes, and meanwhile there can be a letter.
        """
        giver = object()
        with self._lock:
            if self._tangled or asker.jobs > 1 or asker.number not in self._questions:
                return
            if self._reader.setdefault(_ROLE, giver) is giver:
                self._pause()
                self._stream.expect()
                self._reader[_ROLE] = asker  # which may wake up at once

    def _let_go(self) -> None:
        """Give up the role."""
        del self._reader[_ROLE]
        if self._resting or self._tangled or self._unattended:
            self._watch()
            self.settle()

    def _watch(self) -> None:
        with self._lock:  # its descriptor is not closed meanwhile
            if self._error is None and not self._over:
                self._watched = True
                self._station.poller.watch(self)

    def _unwatch(self) -> None:
        """A thread reads, or will at once: waking the poller, too, would only disturb."""
        with self._lock:
            self._pause()

    def _pause(self) -> None:
        if self._watched:
            self._watched = False
            if not self._over:
                self._station.poller.pause(self)

    # What is done with it

    def _start(self, requests: Iterable[Frame], asker: Question | None) -> None:
        """Have requests run that were taken in, each in a thread for it alone."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """The lane is of no more use: tell all who wait."""
        raise NotImplementedError

    def settle(self) -> None:
        """Something came to its end: perhaps it was the last."""
