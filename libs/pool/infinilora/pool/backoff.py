"""How long to leave alone what has just failed. Pure: told the time and the dice.

Everybody who waits for the same thing is told of one failure; whoever asks again within the pause is told the same
without another attempt. An adapter that is broken is left alone for longer and longer; a store that is away, only for
a moment: the next request is to find out whether it is back. What the store does not have is asked for every few
seconds, however often it was missing: it may be registered anew, under any name. Whoever hears of that says so
(`forgive`), and the next request is to find it.
"""

from dataclasses import dataclass

from infinilora.protocol.errors import AdapterFailed, InfiniLoraError, Unavailable
from infinilora.protocol.ids import Digest

MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double from `first_s` to `most_s`."""

    first_s: float
    most_s: float

    def pause_s(self, attempt: int, dice: float) -> float:
        """After the failed attempt of this number (from 0). `dice` in [0, 1) spreads it over the upper half."""
        whole = min(self.most_s, self.first_s * 2.0 ** min(attempt, 64))
        return whole * (0.5 + 0.5 * dice)


class NotStored(AdapterFailed):
    """The store has no object of this digest: it was deleted, or is not there yet."""


BROKEN = Backoff(3.0, 60.0)
"""An adapter that is damaged or does not fit."""
MISSING = Backoff(3.0, 3.0)
"""An adapter that the store does not have."""
AWAY = Backoff(0.25, 0.25)
"""A store that does not answer, or not for us."""


@dataclass(slots=True)
class _Failure:
    error: InfiniLoraError
    attempts: int
    until: float


class Failures:
    """What failed and is not to be tried again yet; at most MAX_REMEMBERED, the oldest forgotten first."""

    def __init__(self) -> None:
        self._failures: dict[Digest, _Failure] = {}

    def note(self, digest: Digest, error: InfiniLoraError, now: float, dice: float) -> None:
        before = self._failures.pop(digest, None)
        attempts = before.attempts + 1 if before else 0
        self._failures[digest] = _Failure(error, attempts, now + _backoff(error).pause_s(attempts, dice))
        if len(self._failures) > MAX_REMEMBERED:
            del self._failures[next(iter(self._failures))]

    def known(self, digest: Digest, now: float) -> InfiniLoraError | None:
        """Why it failed, if that is too recent for another attempt."""
        failure = self._failures.get(digest)
        return failure.error if failure and now < failure.until else None

    def forgive(self, digest: Digest) -> None:
        """It was had after all, is deleted or registered anew: its next failure is its first."""
        self._failures.pop(digest, None)


def _backoff(error: InfiniLoraError) -> Backoff:
    match error:
        case Unavailable():
            return AWAY
        case NotStored():
            return MISSING
        case _:
            return BROKEN
