"""One sequence, from whatever engines it takes: pick, retry before the first token, continue after it.

Engines retry LoRA servers and this file retries engines; nobody else retries. A sequence that an engine lost
is continued elsewhere with its prompt and the tokens so far: noise depends on the seed and the token's index
only, so the continuation is the one the lost engine would have made.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from infinilora.gateway.fleet import Engine, Fleet
from infinilora.protocol.errors import DeadlineExceeded, InfiniLoraError, Internal, Unavailable
from infinilora.protocol.generate_pb2 import Finished, GenerateEvent, GenerateRequest, Sampling
from infinilora.protocol.ids import PROTOCOL_VERSION, Digest, Fingerprint

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.25
"""Between two rounds over engines that have all failed."""
MAX_CONTINUATIONS = 8
"""A sequence that loses this many engines in mid-stream is given up: it may be what kills them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one sequence asks of the fleet. `deadline` and `patience_s` bound the whole and the search.

    `deadline` is in the seconds of `time.monotonic`; `patience_s` is how long to look for an engine that takes
    the sequence before its first token.
    """

    request_id: str
    base: Fingerprint
    digest: Digest | None
    prompt: tuple[int, ...]
    sampling: Sampling
    fallback_base: bool
    deadline: float
    patience_s: float

    def request(self, produced: list[int]) -> GenerateRequest:
        return GenerateRequest(
            protocol_version=PROTOCOL_VERSION,
            request_id=self.request_id,
            token_ids=[*self.prompt, *produced],
            num_prompt_tokens=len(self.prompt),
            digest=self.digest or "",
            slo_class="interactive",
            deadline_ms=max(1, int((self.deadline - time.monotonic()) * 1000)),
            sampling=self.sampling,
            fallback_base=self.fallback_base,
        )


class Relay:
    """Runs jobs on a fleet. Holds nothing between them. `on_retry` hears of each move to another engine."""

    def __init__(self, fleet: Fleet, *, on_retry: Callable[[], None] = lambda: None) -> None:
        self._fleet = fleet
        self._on_retry = on_retry

    async def run(self, job: Job) -> AsyncGenerator[GenerateEvent, None]:
        """The engine's events as if one engine had made them all; close it early to cancel.

        Raises an InfiniLoraError when no engine can begin it within its patience, or go on with it.
        """
        progress = _Progress(job)
        while True:
            engine = await self._next_engine(progress)
            try:
                async with aclosing(self._attempt(engine, progress)) as events:
                    async for event in events:
                        yield event
                        if event.HasField("finished"):
                            return
                raise Unavailable(f"engine {engine.id} ended the stream before the sequence")
            except InfiniLoraError as error:
                progress.note_failure(engine, error)
                self._fleet.note_failure(engine, error)
                self._on_retry()

    async def _attempt(self, engine: Engine, progress: "_Progress") -> AsyncGenerator[GenerateEvent, None]:
        """Events of one engine that the client has not had yet; produced tokens are noted."""
        job = progress.job
        if progress.is_complete:  # lost after its last token and before its end
            yield progress.finished()
            return
        async with aclosing(self._fleet.generate(engine, job.request(progress.produced), job.deadline)) as events:
            async for event in events:
                kind = event.WhichOneof("event")
                if kind == "prompt_logprobs" and progress.has_prompt_logprobs:
                    continue
                progress.note(event)
                yield event

    async def _next_engine(self, progress: "_Progress") -> Engine:
        """The best engine not tried yet; while patience lasts, one that comes or comes back."""
        job = progress.job
        while True:
            if time.monotonic() >= job.deadline:
                raise DeadlineExceeded("the request's deadline passed before it finished")
            if engine := self._fleet.pick(job.base, job.digest, progress.failed):
                return engine
            if progress.error is not None and not progress.may_wait:
                raise progress.error
            if time.monotonic() >= progress.patience_ends:
                raise progress.error or Unavailable("no engine of this base model is alive", retry_after_s=2.0)
            if not await self._fleet.changed(RETRY_PAUSE_S):
                progress.failed.clear()


class _Progress:
    """How far a job has come. `failed` holds keys of engines that failed it; a restarted one has a new key."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.produced: list[int] = []
        self.has_prompt_logprobs = False
        self.failed: set[str] = set()
        self.error: InfiniLoraError | None = None
        self.patience_ends = min(time.monotonic() + job.patience_s, job.deadline)
        self._continuations = 0

    @property
    def is_complete(self) -> bool:
        wanted = self.job.sampling.max_tokens
        return len(self.produced) >= wanted > 0

    @property
    def may_wait(self) -> bool:
        """Only before the first event, and only for what is away; a full engine is the client's to retry."""
        return not self.produced and not self.has_prompt_logprobs and isinstance(self.error, Unavailable)

    def note(self, event: GenerateEvent) -> None:
        match event.WhichOneof("event"):
            case "token":
                self.produced.append(event.token.id)
            case "prompt_logprobs":
                self.has_prompt_logprobs = True
            case _:
                return

    def note_failure(self, engine: Engine, error: InfiniLoraError) -> None:
        """Keep a failure that another engine may heal; raise the others."""
        if not error.retryable or isinstance(error, DeadlineExceeded):
            raise error
        if self.produced or self.has_prompt_logprobs:
            self._continuations += 1
            # What may be base output in an adapter's place must not go on as the adapter's, nor the other way round.
            if self._continuations > MAX_CONTINUATIONS or self.job.fallback_base:
                raise error
        self.failed.add(engine.key)
        self.error = error
        logger.info(
            "sequence lost its engine",
            extra={
                "request_id": self.job.request_id,
                "engine_id": engine.id,
                "code": error.code,
                "reason": error.message,
                "produced": len(self.produced),
            },
        )

    def finished(self) -> GenerateEvent:
        made = len(self.produced)
        return GenerateEvent(
            finished=Finished(reason="length", prompt_tokens=len(self.job.prompt), completion_tokens=made)
        )


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that a client is told of, of those that sequences run together have raised."""
    found = [first_error(e) if isinstance(e, BaseExceptionGroup) else e for e in group.exceptions]
    ours = [e for e in found if isinstance(e, InfiniLoraError)]
    plain = [e for e in found if not isinstance(e, asyncio.CancelledError)]
    return (ours or plain or [Internal("cancelled")])[0]
