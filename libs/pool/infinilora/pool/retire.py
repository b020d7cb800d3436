"""Slots on their way out: each is kept until all that was launched with it has run.

    a holder's grant is revoked    its stream's event is noted       nothing launches with the slot from here on
    the slot is to be emptied      are its events over?  yes: now
                                                         no: a thread asks again, and says so when they are

On a host device every event is over at once and the thread is never started. Thread-safe; knows no pool.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from infinilora.pool.device import Event

POLL_S = 0.0005
"""Between two looks at events that are not over: what a step takes is of this size."""


@dataclass(slots=True, eq=False)
class _Leaving:
    events: list[Event]
    then: Callable[[], None] = field(repr=False)


class RetireQueue:
    """`_noted`: events of slots that may still be leased by others; `_leaving`: those to be emptied."""

    def __init__(self, on_death: Callable[[BaseException], None]) -> None:
        self._on_death = on_death
        self._changed = threading.Condition()
        self._noted: dict[int, list[Event]] = {}
        self._leaving: list[_Leaving] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def note(self, slot: int, events: Iterable[Event]) -> None:
        """What was launched before these events may read the slot; whoever launched it launches no more with it."""
        with self._changed:
            waiting = [event for event in (*self._noted.get(slot, ()), *events) if not event.is_over()]
            if waiting:
                self._noted[slot] = waiting
            else:
                self._noted.pop(slot, None)

    def hold(self, slot: int, then: Callable[[], None]) -> bool:
        """False: nothing that was launched reads the slot any more. True: `then` is called when that is so.

        `then` is called once, from a thread of this object with none of its locks held. What was noted of the slot
        belongs to this tenancy and is forgotten here.
        """
        with self._changed:
            events = [event for event in self._noted.pop(slot, ()) if not event.is_over()]
            if not events:
                return False
            self._leaving.append(_Leaving(events, then))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pool-retire", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    @property
    def num_leaving(self) -> int:
        """Slots that wait for what was launched."""
        with self._changed:
            return len(self._leaving)

    def close(self) -> None:
        """Stop; nobody is told anything more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        try:
            while (over := self._next()) is not None:
                for leaving in over:
                    leaving.then()
        except BaseException as error:
            self._on_death(error)
            raise

    def _next(self) -> list[_Leaving] | None:
        """Those whose launches have run by now, maybe none; None once closed."""
        with self._changed:
            self._changed.wait(POLL_S if self._leaving else None)
            if self._is_closed:
                return None
            over = [leaving for leaving in self._leaving if all(event.is_over() for event in leaving.events)]
            self._leaving = [leaving for leaving in self._leaving if leaving not in over]
            return over
