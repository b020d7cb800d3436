"""How long to leave alone what has just failed. Pure: told the time and the dice.

Everybody who waits for the same thing is told of one failure; whoever asks again within the pause is told the same
without another attempt. An adapter that is broken is left alone for longer and longer; a store that is away, only for
a moment: the next request is to find out whether it is back. What the store does not have is asked for every few
seconds, however often it was missing: it may be registered anew, under any name. Whoever hears of that says so
(`forgive`), and the next request is to find it.
"""

from dataclasses import dataclass
from itertools import islice

from infinilora.protocol.control import LoadFailure
from infinilora.protocol.errors import AdapterFailed, InfiniLoraError, Overloaded, Unavailable
from infinilora.protocol.ids import Digest

MAX_REMEMBERED = 4096
MAX_TOLD = 32
MAX_WORDS = 300
"""Of the failures that every beat carries."""
RETRY_S = 3.0
MOST_RETRIES = 20.0
"""Times the first pause, the longest."""


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


AWAY = Backoff(0.25, 0.25)
"""A store that does not answer, or not for us; memory that others have."""


@dataclass(slots=True)
class _Failure:
    error: InfiniLoraError
    attempts: int
    until: float


class Failures:
    """What failed when it was last tried, and until when it is not to be tried again.

    At most MAX_REMEMBERED, the oldest forgotten first.
    """

    def __init__(self, retry_s: float = RETRY_S) -> None:
        """`retry_s`: the pause after a first failure, unless the store is only away."""
        self._failures: dict[Digest, _Failure] = {}
        self._broken = Backoff(retry_s, MOST_RETRIES * retry_s)
        self._missing = Backoff(retry_s, retry_s)

    def note(self, digest: Digest, error: InfiniLoraError, now: float, dice: float) -> None:
        before = self._failures.pop(digest, None)
        attempts = before.attempts + 1 if before else 0
        self._failures[digest] = _Failure(error, attempts, now + self._backoff(error).pause_s(attempts, dice))
        if len(self._failures) > MAX_REMEMBERED:
            del self._failures[next(iter(self._failures))]

    def known(self, digest: Digest, now: float) -> InfiniLoraError | None:
        """Why it failed, if that is too recent for another attempt."""
        failure = self._failures.get(digest)
        return failure.error if failure and now < failure.until else None

    def told(self) -> tuple[LoadFailure, ...]:
        """The latest, whether or not they may be tried again by now."""
        latest = islice(reversed(self._failures.items()), MAX_TOLD)
        return tuple(LoadFailure(d, f.error.code, f.error.message[:MAX_WORDS]) for d, f in latest)

    def forgive(self, digest: Digest) -> None:
        """It was had after all, is deleted or registered anew: its next failure is its first."""
        self._failures.pop(digest, None)

    def _backoff(self, error: InfiniLoraError) -> Backoff:
        """A store or memory that is away, an adapter that the store does not have, or one that does not fit."""
        match error:
            case Unavailable() | Overloaded():
                return AWAY
            case NotStored():
                return self._missing
            case _:
                return self._broken
