"""Regular expressions that strangers wrote, held against module names for a bounded time.

A pattern may backtrack for ever. A timer of processor time ends it, and the error names the pattern. Signals
reach the main thread of a process only: off it there is no timer, and the caller's own limits have to do.
"""

import re
import signal
import threading
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType

from infinilora.weights.refuse import invalid

MAX_SECONDS = 0.25
_SECONDS_EACH = 1e-4
"""What a question adds to the time that is left: a large adapter asks many, each of them short."""
_SECONDS_EACH_PATTERN = 2e-6
"""What each pattern of a question adds: one that does not match takes a fifth of a microsecond or so."""


class _TimeIsUp(Exception):
    """The timer ran out while a pattern was being tried."""


class Matcher:
    """The patterns of one configuration.

    Between calls: what was compiled, and the processor seconds that all questions may still take together.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._compiled: dict[str, re.Pattern[str]] = {}
        self._left_s = MAX_SECONDS
        self._trying = ""

    def check(self, pattern: str, form: str = "{}") -> None:
        """Raise AdapterInvalid, naming the pattern, unless `form` around it is a regular expression."""
        with self._bounded():
            self._regex(pattern, form)

    def fullmatch(self, pattern: str, name: str) -> bool:
        with self._bounded():
            return self._regex(pattern, "{}").fullmatch(name) is not None

    def first(self, patterns: Collection[str], form: str, name: str) -> tuple[str, re.Match[str]] | None:
        """The first pattern that, put into `form`, matches from the start of the name."""
        with self._bounded(len(patterns)):
            for pattern in patterns:
                if found := self._regex(pattern, form).match(name):
                    return pattern, found
        return None

    def _regex(self, pattern: str, form: str) -> re.Pattern[str]:
        self._trying = pattern
        text = form.format(pattern)
        if (known := self._compiled.get(text)) is None:
            known = self._compiled[text] = self._compile(pattern, text)
        return known

    def _compile(self, pattern: str, text: str) -> re.Pattern[str]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            # Without re's "at position": it counts what a form puts before the pattern as well.
            found = error.msg if isinstance(error, re.error) else str(error)
            what = f"pattern {pattern!r:.200}"
            raise invalid(self._file, what, found=found, wanted="a regular expression") from error

    @contextmanager
    def _bounded(self, num_patterns: int = 1) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGVTALRM, _ring)
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._left_s)
            try:
                yield
            finally:
                left_s, _ = signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            self._left_s = min(left_s + _SECONDS_EACH + num_patterns * _SECONDS_EACH_PATTERN, MAX_SECONDS)
        except _TimeIsUp:
            raise invalid(
                self._file,
                f"pattern {self._trying!r:.200}",
                found=f"more than {MAX_SECONDS} s of matching",
                wanted="a pattern that ends",
            ) from None
        finally:
            signal.signal(signal.SIGVTALRM, before)


def _ring(_signum: int, _frame: FrameType | None) -> None:
    raise _TimeIsUp
