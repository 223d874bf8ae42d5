"""Passes that need no protocol: gradients go from worker to worker like calls.

Where each send that gradients arrive for has its piece of the graph to itself (a *strand*), nobody
has to wait for anything else, nor be told what will not come. So the gradients of a message are run
at once, and what that yields for other workers is sent on to them. The answer is given when all
that followed is done everywhere, and takes along what there is for the asker. Such a pass ends like
a call, and leaves nothing on other workers but a note of what was run.

A value may have gone to a worker and come back as it was, as results do that are handed through
nested calls. Then its gradients would go there only to come back. Whoever asks therefore lists its
sends that are like that (*shortcuts*), unless someone there watches what came; whoever is asked
goes on with what lies behind, and says which shortcuts it has taken.

Not every graph is that simple. Whoever gets gradients that it cannot run at once *parks* them: it
keeps them for the pass, and says so with the answer, which is passed on to the worker that leads.
If that hears of any, it goes on by the full protocol (`pass_state.py`). To that, what was run and
what
has left is over and done with, and what is parked has arrived.

This costs a fraction of the full protocol, and most passes over small graphs are that simple.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from ..errors import GradwireError
from .contexts import Context, Contexts, unknown
from .desk import Desk
from .engine import ones_for
from .failures import describe
from .messages import (
    ACCUMULATE,
    RETAIN,
    Direct,
    Trip,
    pack,
    pack_followed,
    read_direct,
)
from .rounds import Failing, Record, Round
from .strands import Strands, strands_of

_DEEPEST = 16  # workers that wait for each other, one behind the other
_OTHERS = ~(RETAIN | ACCUMULATE)  # flags that may not be set here


class DirectPasses:
    """Those of one worker."""

    def __init__(self, desk: Desk, contexts: Contexts) -> None:
        self._desk = desk
        self._contexts = contexts

    def lead(
        self, context: Context, trip: Trip, strands: Strands, roots: Sequence[Tensor]
    ) -> Collection[int] | None:
        """Run a pass; the workers that parked something. None: it cannot be run like this.

        Raises:
            Failing: it failed; the cause is the error, if that was here.
        """
        if trip.flags & _OTHERS:
            return None
        record = Record(strands)
        reach = strands.of_roots(roots) if record.is_simple else None
        if reach is None:
            return None
        number = trip.number
        context.records[number] = record
        current = Round(self._desk, context, record, trip)
        try:
            current.run(reach, (*roots,), [*map(ones_for, roots)])
            current.follow(-1, [])
        except Failing as error:
            current.abandon(error.failed)
            raise
        except BaseException as error:
            failed = self._describe(error)
            current.abandon(failed)
            raise Failing(failed) from error
        finally:
            if record.failed is None and not current.parked:
                context.records.pop(number, None)
            else:
                record.running.pop()
        return current.parked

    def answer(self, sender: int, message: Direct) -> Any:
        """What follows from the gradients of another worker."""
        trip, arrived, shortcuts = read_direct(message)
        context = self._contexts.arrived(trip.context)
        context.known.add(sender)
        try:
            record = self._join(context, trip.number, trip.since)
        except GradwireError as error:
            return pack(self._describe(error))
        if record is None:
            return None
        current = Round(self._desk, context, record, trip, sender)
        if shortcuts:
            current.shortcuts = shortcuts
        try:
            if record.is_simple and trip.depth < _DEEPEST:
                current.follow(sender, arrived)
            else:
                for number, gradients in arrived:
                    current.park(sender, number, gradients)
            found = current.leaving.get(sender, ())
            return pack_followed(found, current.parked, current.taken)
        except Failing as error:
            failed = error.failed
        except BaseException as error:  # noqa: BLE001 user code
            failed = self._describe(error)
        finally:
            record.running.pop()
        current.abandon(failed)
        return pack(failed)

    def _join(self, context: Context, number: int, since: int) -> Record | None:
        """Take part in a pass; None: it is over.

        Raises:
            GradwireError: the context is.
        """
        with context.lock:
            if context.is_released:
                raise unknown(context.id)
            record: Record | None = context.records.get(number)
            if record is not None:
                record.running.append(True)
            elif not context.has_ended(number):
                if context.records:
                    context.forget_records(number, since)
                record = context.records[number] = Record(strands_of(context))
            return record

    def _describe(self, error: BaseException) -> Any:
        return describe(error, self._desk.me, pickles=self._desk.pickles)
