"""Whether a peer may be called: one breaker for each. Pure: time comes in as an argument.

    CLOSED --(a call ended without an answer)--> OPEN --(a health call was answered)--> CLOSED
                                                  |  ^
                                                  +--+  not answered: asked again after twice as long

An open breaker lets nobody through but those who ask for health, one at a time: whoever else is sent to a peer that
hangs would wait for a connection that is never made.
"""

FIRST_PAUSE_S = 0.25
LAST_PAUSE_S = 2.0


class Breakers:
    """The open breakers, by key. A key that is not known is closed: so are new lives of a process."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[float, float]] = {}  # when health is asked next, and the pause before that

    def is_open(self, key: str) -> bool:
        return key in self._open

    def note_silence(self, key: str, now: float) -> None:
        """A call ended without an answer."""
        if key not in self._open:
            self._open[key] = (now + FIRST_PAUSE_S, FIRST_PAUSE_S)

    def note_answer(self, key: str) -> None:
        self._open.pop(key, None)

    def due(self, now: float) -> list[str]:
        """Whose health is to be asked now; the next time is set at once, so that nobody is asked twice."""
        due = sorted(key for key, (at, _) in self._open.items() if at <= now)
        for key in due:
            pause_s = min(2 * self._open[key][1], LAST_PAUSE_S)
            self._open[key] = (now + pause_s, pause_s)
        return due

    def keep(self, keys: set[str]) -> None:
        """Forget all others: they have left for good."""
        self._open = {key: state for key, state in self._open.items() if key in keys}
