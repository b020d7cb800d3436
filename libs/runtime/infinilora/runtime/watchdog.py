"""Ends a process in which something stands still: a kernel, a device, a call that does not come back.

    moves --(nothing moved for `limit_s`)--> stuck: others are told --(WORD_S)--> the process ends, status 1

Whoever is watched counts how far it has come; nobody has to say that it is stuck, and nothing is measured on its way.
What holds Python's own lock while it hangs keeps this thread from looking as well: for that case a thread of the
interpreter's, which needs no lock, ends the process unless it is put off in time, with the stacks of all threads in the
log. A supervisor starts the process again.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

logger = logging.getLogger(__name__)

CPU_LIMIT_S = 8.0
"""Of what takes milliseconds, at most a second or two. Short of the ten seconds within which a gateway is to know."""
DEVICE_LIMIT_S = 60.0
"""Where the first steps compile kernels."""
LOOKS = 8
"""At what is watched, within one limit."""
WORD_S = 1.0
"""For the word to get out: a beat, and an error to every open call."""
DEAF_LIMITS = 2.0
"""Limits in which this thread must have been awake once. A process that is stopped by a signal for longer ends, too."""

Progress = Callable[[], int | None]
"""How far it has come, a number that changes with each piece of work; None: it has nothing to do."""


class Stillness:
    """How long a count has stood still, as far as somebody was there to look. Pure: told what is seen and when."""

    def __init__(self) -> None:
        self._seen: int | None = None
        self.still_s = 0.0

    def look(self, count: int | None, since_last_s: float, *, most_s: float) -> float:
        """Seconds without a change. Of a longer time between two looks (the process was stopped) `most_s` count."""
        moved = count is None or count != self._seen
        self._seen = count
        self.still_s = 0.0 if moved else self.still_s + min(since_last_s, most_s)
        return self.still_s


class _Watched(NamedTuple):
    name: str
    progress: Progress
    stillness: Stillness


def limit_s(wanted: float, device: str) -> float:
    """What a setting says; 0: by the kind of device."""
    return wanted or (CPU_LIMIT_S if device == "cpu" else DEVICE_LIMIT_S)


class Watchdog:
    """A thread of its own, inside `with`. `on_stuck` is called there, once: it must not wait."""

    def __init__(self, limit_s: float, on_stuck: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._on_stuck = on_stuck
        self._watched: dict[str, _Watched] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def watch(self, name: str, progress: Progress) -> None:
        """From now on. `name` is that of the thread at work. Any thread."""
        self._watched[name] = _Watched(name, progress, Stillness())

    def forget(self, name: str) -> None:
        """It has ended. Any thread."""
        self._watched.pop(name, None)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        tick_s = self._limit_s / LOOKS
        looked_at = time.monotonic()
        while True:
            faulthandler.dump_traceback_later(DEAF_LIMITS * self._limit_s, exit=True, file=sys.stderr)
            if self._stopped.wait(tick_s):
                return
            now = time.monotonic()
            stuck = self._look(now - looked_at, 2 * tick_s)
            looked_at = now
            if stuck is not None:
                self._end(stuck)

    def _look(self, since_last_s: float, most_s: float) -> str | None:
        for name, progress, stillness in list(self._watched.values()):
            if stillness.look(progress(), since_last_s, most_s=most_s) >= self._limit_s:
                return name
        return None

    def _end(self, name: str) -> None:
        extra = {"watched": name, "limit_s": self._limit_s, "stack": _stack(name)}
        logger.error("stuck: nothing has moved for too long; the process ends", extra=extra)
        self._on_stuck()
        time.sleep(WORD_S)
        logging.shutdown()
        os._exit(1)


def _stack(name: str) -> str:
    """Where a thread of this name is."""
    frames = sys._current_frames()  # noqa: SLF001 - documented, for exactly this
    found = [frames[t.ident] for t in threading.enumerate() if t.name == name and t.ident in frames]
    return "".join(line for frame in found for line in traceback.format_stack(frame))
