"""What the step thread tells about a sequence, in order. Plain values, safe to hand to another thread."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from infinilora.engine.sampler import TokenScore
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import InfiniLoraError

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Produced:
    """One more token; `score` where logprobs were asked for."""

    token_id: int
    score: TokenScore | None = None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Scores of prompt positions 1, 2, ...; sent once, before the first token."""

    scores: tuple[TokenScore, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a sequence that went well. `stop_token_id` is not among the produced tokens."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    degraded: bool
    stop_token_id: int | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a sequence that did not."""

    error: InfiniLoraError


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step in numbers. `cached_tokens`: found in the prefix cache by sequences that began in it.

    `started_s` is of time.perf_counter(). `waits`: exposed wait in seconds, by site. `trace`: see Outcome.
    """

    started_s: float
    seconds: float
    decode_rows: int
    prefill_rows: int
    cached_tokens: int
    num_preempted: int
    num_lost: int
    waits: Mapping[Site, float] = field(default_factory=dict)
    trace: bytes = b""


Event = Produced | PromptScored | Ended | Failed

Sink = Callable[[Event], None]
"""Called from the step thread; returns at once and does not raise."""


def _raise(error: BaseException) -> None:
    raise error


@dataclass(frozen=True, slots=True)
class Hooks:
    """What else the step thread calls: after each round, after each step, and as its last act if it dies."""

    flush: Callable[[], None] = lambda: None
    on_step: Callable[[StepReport], None] = lambda _: None
    on_crash: Callable[[BaseException], None] = _raise
