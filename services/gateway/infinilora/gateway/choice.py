"""One choice of an answer as it grows: engine tokens in, released text and tokens out.

Text is held back while it may belong to a stop string or to half a character; a token is released together
with the first of its text, so that the lists of `logprobs` always match the text that was sent. Pure: the
caller moves events from an engine to here and what comes out to a client.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from infinilora.gateway.text import Cut, StopMatcher, TextDecoder, TokenTable


class Scored(NamedTuple):
    """A token with its logprob and the likeliest alternatives; `logprob` is None where none is known."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class Shown(NamedTuple):
    """A released token and where its text begins, counted in characters of the choice's own text."""

    token: Scored
    offset: int


class Delta(NamedTuple):
    """What one event adds to a choice. After a `finish_reason` nothing follows."""

    text: str
    tokens: tuple[Shown, ...]
    finish_reason: str | None = None


class Choice:
    """The state of one choice. `num_tokens` counts all that the engine made, shown or not."""

    def __init__(
        self,
        table: TokenTable | None,
        *,
        stops: Sequence[str] = (),
        stop_ids: Collection[int] = (),
        skip_special: bool = True,
    ) -> None:
        self._decoder = TextDecoder(table, skip_special=skip_special) if table else None
        self._matcher = StopMatcher(stops)
        self._stop_ids = frozenset(stop_ids)
        self._decoded = 0  # characters that came out of the decoder
        self._released = 0  # of these, how many were shown
        self._waiting: deque[Shown] = deque()
        self._last: Scored | None = None  # a token that may turn out to be the one that stopped the sequence
        self.num_tokens = 0

    def push(self, token: Scored) -> Delta:
        """Take the engine's next token. A delta with a finish reason means: cancel the rest."""
        self.num_tokens += 1
        if token.id in self._stop_ids:
            earlier, self._last = self._last, token
            return self._admit(earlier) if earlier else Delta("", ())
        if self._last is None:
            return self._admit(token)
        first, self._last = self._admit(self._last), None
        if first.finish_reason:
            return first
        second = self._admit(token)
        return Delta(first.text + second.text, first.tokens + second.tokens, second.finish_reason)

    def finish(self, reason: str) -> Delta:
        """The engine ended the sequence; a token that stopped it is not shown."""
        first = Delta("", ())
        if self._last is not None and reason != "stop":
            first = self._admit(self._last)
            if first.finish_reason:
                return first
        tail = self._decoder.flush() if self._decoder else ""
        self._decoded += len(tail)
        cut = self._matcher.push(tail)
        if not cut.stopped:
            rest = self._matcher.flush()
            cut = Cut(cut.text + rest.text, rest.stopped)
        tokens = first.tokens + self._release(cut.text, is_all=not cut.stopped)
        return Delta(first.text + cut.text, tokens, "stop" if cut.stopped else reason)

    def _admit(self, token: Scored) -> Delta:
        self._waiting.append(Shown(token, self._decoded))
        text = self._decoder.push(token.id) if self._decoder else ""
        self._decoded += len(text)
        cut = self._matcher.push(text)
        is_settled = not cut.stopped and not self._matcher.is_holding and not self._is_mid_character()
        return Delta(cut.text, self._release(cut.text, is_all=is_settled), "stop" if cut.stopped else None)

    def _is_mid_character(self) -> bool:
        return self._decoder is not None and self._decoder.is_mid_character

    def _release(self, text: str, *, is_all: bool) -> tuple[Shown, ...]:
        """Tokens whose text has begun to show; all that wait, when nothing is held back."""
        self._released += len(text)
        shown = []
        while self._waiting and (is_all or self._waiting[0].offset < self._released):
            shown.append(self._waiting.popleft())
        return tuple(shown)
