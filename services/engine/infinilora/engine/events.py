"""What the step thread tells about a sequence, in order. Plain values, safe to hand to another thread."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from infinilora.engine.sampler import TokenScore
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


Event = Produced | PromptScored | Ended | Failed

Sink = Callable[[Event], None]
"""Called from the step thread; returns at once and does not raise."""
