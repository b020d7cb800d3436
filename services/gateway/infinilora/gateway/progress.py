"""How far one sequence has come on its way through engines, and what its failures mean. No I/O, no clock of its own."""

import logging
from dataclasses import dataclass

from infinilora.gateway.fleet import Engine
from infinilora.gateway.prefixes import Chain, chain_of
from infinilora.protocol.errors import DeadlineExceeded, InfiniLoraError, Overloaded, Unavailable
from infinilora.protocol.generate_pb2 import Finished, GenerateEvent, GenerateRequest, Sampling
from infinilora.protocol.ids import PROTOCOL_VERSION, Digest, Fingerprint, SloClass
from infinilora.runtime.rpc import Unreachable

logger = logging.getLogger(__name__)

MAX_LOSSES = 8
"""A sequence under which so many engines fell silent is given up: it may be what kills them."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.25, 2.0
"""Between two rounds over engines that have all failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one sequence asks of the fleet. `deadline` and `patience_s` bound the whole and the search.

    `deadline` is in the seconds of `time.monotonic`; `patience_s` is how long to look for an engine that takes
    the sequence, from its start and again from each loss.
    """

    request_id: str
    base: Fingerprint
    digest: Digest | None
    prompt: tuple[int, ...]
    sampling: Sampling
    slo_class: SloClass
    fallback_base: bool
    deadline: float
    patience_s: float


class Progress:
    """A job's produced tokens and failures. Whatever the next engine is to know is here.

    `failed` holds keys of engines that failed it in this round; a restarted engine has a new key.
    """

    def __init__(self, job: Job, now: float) -> None:
        self.job = job
        self.failed: set[str] = set()
        self.error: InfiniLoraError | None = None
        self.pause_s = FIRST_PAUSE_S
        self._produced: list[int] = []
        self._has_begun = self._is_running = False
        self._has_scores = False
        self._is_base = False  # base output in the adapter's place, as its first event said
        self._num_losses = 0
        self._patience_ends = now + job.patience_s

    @property
    def tokens(self) -> list[int]:
        return [*self.job.prompt, *self._produced]

    def chain(self) -> Chain:
        return chain_of(None if self._is_base else self.job.digest, self.tokens)

    def request(self, now: float) -> GenerateRequest:
        """What to ask the next engine for. A sequence that has begun goes on as what it began as, and nothing else."""
        job, sampling = self.job, self.job.sampling
        if self._has_scores:
            sampling = Sampling()
            sampling.CopyFrom(job.sampling)
            sampling.prompt_logprobs = -1
        return GenerateRequest(
            protocol_version=PROTOCOL_VERSION,
            request_id=job.request_id,
            token_ids=self.tokens,
            num_prompt_tokens=len(job.prompt),
            digest="" if self._is_base or job.digest is None else job.digest,
            slo_class=job.slo_class,
            deadline_ms=max(1, int((job.deadline - now) * 1000)),
            sampling=sampling,
            fallback_base=job.fallback_base and not self._has_begun,
        )

    def lost_end(self) -> GenerateEvent | None:
        """The end of a sequence that was lost after its last token, when nothing is left to compute."""
        made, wanted = len(self._produced), self.job.sampling.max_tokens
        if made < wanted or not self._has_begun:
            return None
        finished = Finished(reason="length", prompt_tokens=len(self.job.prompt), completion_tokens=made)
        return self.note(GenerateEvent(finished=finished))

    def note(self, event: GenerateEvent) -> GenerateEvent:
        """Keep what a continuation needs. Returns the event as the client is to see it."""
        if event.WhichOneof("event") == "finished" and event.finished.reason == "abort":
            raise Unavailable("the engine gave the sequence up")
        if not self._has_begun:
            self._has_begun, self._is_base = True, event.degraded
        elif self._is_base:  # an engine that goes on with base output was asked for the base, and does not know
            event.degraded = True
        self._is_running = True
        match event.WhichOneof("event"):
            case "token":
                self._produced.append(event.token.id)
            case "prompt_logprobs":
                self._has_scores = True
            case "finished":
                event.finished.degraded = event.degraded
        return event

    def note_failure(self, engine: Engine, error: InfiniLoraError, now: float) -> None:
        """Keep a failure that another engine may heal; raise the others."""
        if not error.retryable or isinstance(error, DeadlineExceeded):
            raise error
        self._num_losses += isinstance(error, Unreachable)
        if self._num_losses >= MAX_LOSSES:
            raise error
        if self._is_running:  # until now: the search begins anew
            self._is_running = False
            self._patience_ends, self.pause_s = now + self.job.patience_s, FIRST_PAUSE_S
            self.failed.clear()
        self.failed.add(engine.key)
        self.error = error
        logger.info(
            "sequence lost its engine",
            extra={
                "request_id": self.job.request_id,
                "engine_id": engine.id,
                "code": error.code,
                "reason": error.message,
                "produced": len(self._produced),
            },
        )

    def check_patience(self, now: float, why: str) -> None:
        """No engine is left for now: raise what the client is told (`why` if none refused), unless waiting helps."""
        if now >= self.job.deadline:
            raise DeadlineExceeded("the request's deadline passed before it finished")
        waits_for = (Unavailable, Overloaded) if self._has_begun else Unavailable
        if self.error is not None and not isinstance(self.error, waits_for):
            raise self.error
        if now >= self._patience_ends:
            raise self.error or Unavailable(why, retry_after_s=2.0)

    def begin_round(self) -> None:
        """Every engine may be asked again."""
        self.failed.clear()
        self.pause_s = min(2 * self.pause_s, LAST_PAUSE_S)
