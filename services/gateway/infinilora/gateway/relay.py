"""One sequence, from whatever engines it takes: pick, retry before the first token, continue after it.

Engines retry LoRA servers and this file retries engines; nobody else retries. A sequence that an engine lost
is continued elsewhere with its prompt and the tokens so far: noise depends on the seed and the token's index
only, so the continuation is the one the lost engine would have made. What fails for good: progress.py.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from infinilora.gateway.fleet import Engine, Fleet
from infinilora.gateway.prefixes import Chain
from infinilora.gateway.progress import Job, Progress
from infinilora.protocol.errors import InfiniLoraError, Internal, Unavailable
from infinilora.protocol.generate_pb2 import GenerateEvent


class Relay:
    """Runs jobs on a fleet. Holds nothing between them. `on_retry` hears of each move to another engine."""

    def __init__(self, fleet: Fleet, *, on_retry: Callable[[], None] = lambda: None) -> None:
        self._fleet = fleet
        self._on_retry = on_retry

    async def run(self, job: Job) -> AsyncGenerator[GenerateEvent, None]:
        """The engine's events as if one engine had made them all; close it early to cancel.

        Raises an InfiniLoraError when no engine can begin it within its patience, or go on with it.
        """
        progress = Progress(job, time.monotonic())
        while True:
            if end := progress.lost_end():
                yield end
                return
            chain = progress.chain()
            engine = await self._next_engine(progress, chain)
            self._fleet.note_prefix(engine, chain)
            try:
                async with aclosing(self._attempt(engine, progress)) as events:
                    async for event in events:
                        yield event
                        if event.HasField("finished"):
                            return
                raise Unavailable(f"engine {engine.id} ended the stream before the sequence")
            except InfiniLoraError as error:
                self._fleet.note_failure(engine, error)
                progress.note_failure(engine, error, time.monotonic())
                self._on_retry()

    async def _attempt(self, engine: Engine, progress: Progress) -> AsyncGenerator[GenerateEvent, None]:
        """One engine's events, noted; what it has computed by the end is remembered for those who come after."""
        request = progress.request(time.monotonic())
        async with aclosing(self._fleet.generate(engine, request, progress.job.deadline)) as events:
            async for event in events:
                yield progress.note(event)
                if event.HasField("finished"):
                    self._fleet.note_prefix(engine, progress.chain())

    async def _next_engine(self, progress: Progress, chain: Chain) -> Engine:
        """The best engine not tried in this round; while patience lasts, one that comes or comes back."""
        job = progress.job
        while True:
            if engine := self._fleet.pick(job.base, job.digest, progress.failed, chain=chain):
                return engine
            progress.check_patience(time.monotonic(), self._fleet.why_not(job.base))
            if not await self._fleet.changed(progress.pause_s):
                progress.begin_round()


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that a client is told of, of those that sequences run together have raised."""
    found = [first_error(e) if isinstance(e, BaseExceptionGroup) else e for e in group.exceptions]
    ours = [e for e in found if isinstance(e, InfiniLoraError)]
    plain = [e for e in found if not isinstance(e, asyncio.CancelledError)]
    return (ours or plain or [Internal("cancelled")])[0]
