"""A request's state inside an engine. Plain data: no tensors, no clock, no I/O.

known tokens     prompt, then what was produced (here, or by an engine that died before)
computed tokens  how many of them have keys and values in the cache; they catch up, step by step
"""

from dataclasses import dataclass, field
from enum import Enum

from infinilora.protocol.ids import Digest, SloClass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Defaults mean greedy, without limits but `max_tokens`; 0 or 1 switch a rule off."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class Phase(Enum):
    """Where a sequence is in the scheduler. Not a phase of its computation: there are none."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in this engine. The scheduler owns `phase`, `blocks`, `num_computed`, `is_parked`; the loop the rest.

    `digest` is the adapter every row is computed with: it changes only before the first token, to None, when
    the caller accepted base output (`degraded`). `chain` holds the cache keys of full blocks, grown as needed.
    """

    request_id: str
    tokens: list[int]
    num_prompt: int
    digest: Digest | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    fallback_base: bool = False
    degraded: bool = False
    may_narrow: bool = False
    """Whether a link may have narrowed rows of it, or of a prefix that it read."""
    slo_class: SloClass = "standard"
    due_s: float = 0.0
    """Its place in every order, before `arrival`: see sched/urgency.py."""
    trace: bytes = b""
    """Where its spans belong, for a step's LoRA work; empty when it is not traced."""

    phase: Phase = Phase.WAITING
    arrival: int = 0
    num_computed: int = 0
    num_cached: int = 0
    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    num_committed: int = 0
    times_bypassed: int = 0
    num_preemptions: int = 0
    holds_lease: bool = False
    is_parked: bool = False
    """Its rows are part way through the model, at a layer that its adapter does not have yet."""

    @property
    def num_known(self) -> int:
        return len(self.tokens)

    @property
    def num_missing(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_produced(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def reads_prefix_cache(self) -> bool:
        """Prompt logprobs need every position computed."""
        return self.params.prompt_logprobs is None

    def degrade(self) -> None:
        """Go on as base, from nothing: allowed before the first token only."""
        if self.num_produced or self.blocks:
            raise AssertionError(f"{self.request_id} cannot degrade: it has tokens or blocks")
        self.digest, self.degraded = None, True
        self.chain.clear()
