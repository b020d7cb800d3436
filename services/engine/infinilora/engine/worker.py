"""The engine as others see it: `Engine.Generate` over gRPC, one span a request, commands of the coordinator.

Owns the asyncio side; the step thread is loop.py's. Knows the wire, not how a token is made.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from infinilora.engine.events import Ended, Event, Failed
from infinilora.engine.job import Job
from infinilora.engine.loop import EngineLoop
from infinilora.engine.mailboxes import Mailbox, Mailboxes
from infinilora.engine.sequence import Sequence
from infinilora.engine.wire import ModelFacts, read_request, write_event
from infinilora.protocol import generate_pb2
from infinilora.protocol.control import Command, CommandReply, Drain, Forget
from infinilora.protocol.errors import InvalidRequest, Unavailable
from infinilora.protocol.ids import Digest
from infinilora.runtime import telemetry
from infinilora.runtime.fence import Fence
from infinilora.runtime.rpc import Call
from infinilora.runtime.telemetry import Telemetry

logger = logging.getLogger(__name__)

SERVICE = generate_pb2.DESCRIPTOR.services_by_name["Engine"]
HEALTH_SERVICE = generate_pb2.DESCRIPTOR.services_by_name["EngineHealth"]


class Engine:
    """Implements both gRPC services. `is_draining`: no new work, what runs finishes. `idle`: no call is open."""

    def __init__(self, loop: EngineLoop, mailboxes: Mailboxes, facts: ModelFacts, traces: Telemetry) -> None:
        self._loop = loop
        self._mailboxes = mailboxes
        self._facts = facts
        self._traces = traces
        self.is_draining = False
        self.is_stopping = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._open: set[Mailbox] = set()

    def stop(self) -> None:
        """The process is asked to end: drain, and no command undoes it."""
        self.is_stopping = self.is_draining = True

    def abandon(self) -> None:
        """The step thread does not come back: every sequence goes on elsewhere, and no other begins here."""
        self.stop()
        for mailbox in self._open:
            mailbox.put_nowait(Failed(Unavailable("this engine's step does not end; ask another", retry_after_s=1.0)))

    async def generate(self, request: Any, call: Call) -> AsyncGenerator[Any, None]:
        """Stream a sequence's events. However this ends, the sequence is gone from the engine after it."""
        if self.is_draining:
            raise Unavailable("this engine is draining; ask another", retry_after_s=1.0)
        sequence = read_request(request, self._facts)
        with self._traces.span("engine.generate", {"request_id": sequence.request_id}) as span:
            sequence.trace = telemetry.to_wire()
            async with aclosing(self._stream(sequence, _time_left_s(request, call), span)) as events:
                async for event in events:
                    yield event

    async def check(self, _: Any, __: Call) -> Any:
        """That there is an answer is the answer."""
        return generate_pb2.HealthReply(is_draining=self.is_draining)

    async def _stream(self, sequence: Sequence, deadline_s: float | None, span: Any) -> AsyncGenerator[Any, None]:
        received = time.perf_counter()
        mailbox, sink = self._mailboxes.open()
        job = self._loop.submit(sequence, sink, deadline_s=deadline_s)
        self._open.add(mailbox)
        self.idle.clear()
        last: Event | None = None
        first_token: float | None = None
        try:
            while not isinstance(last, Ended):
                last = await mailbox.get()
                first_token = first_token or time.perf_counter()
                # A sequence degrades before its first event or never: what is read here is what the event is.
                # What a link narrowed is noted before what came of it is told.
                event = write_event(last, is_degraded=sequence.degraded)
                event.narrow = sequence.may_narrow
                yield event
        finally:
            self._loop.abort(job)
            self._open.remove(mailbox)
            if not self._open:
                self.idle.set()
            if span.is_recording():
                span.set_attributes(_attributes(job, last))
                self._record_parts(job, received, first_token)

    def _record_parts(self, job: Job, received: float, first: float | None) -> None:
        """Within the request's span: its wait, its prefill, its decode."""
        end = time.perf_counter()
        started = job.first_step_at or end
        self._traces.record("engine.queue", received, started)
        if job.first_step_at is not None:
            self._traces.record("engine.prefill", started, first or end)
        if first is not None:
            self._traces.record("engine.decode", first, end)


def _attributes(job: Job, last: Event | None) -> dict[str, str | bool | int | float]:
    sequence = job.sequence
    return {
        "adapter_id": sequence.digest or "",
        "prompt_tokens": sequence.num_prompt,
        "completion_tokens": sequence.num_produced,
        "cached_tokens": sequence.num_cached,
        "preemptions": sequence.num_preemptions,
        "degraded": sequence.degraded,
        "outcome": _outcome(last),
    }


def _time_left_s(request: Any, call: Call) -> float | None:
    """The earlier of the request's own deadline and the call's."""
    limits = [request.deadline_ms / 1000.0] if request.deadline_ms else []
    left = call.time_left_s()
    return min([*limits, left]) if left is not None else min(limits, default=None)


def _outcome(last: Event | None) -> str:
    match last:
        case Ended():
            return last.reason
        case Failed():
            return last.error.code
        case _:
            return "cancelled"


class Commands:
    """Answers the coordinator. A command of an epoch lower than one seen is refused."""

    def __init__(self, engine: Engine, forget: Callable[[Digest], None]) -> None:
        """`forget` lets go of a deleted adapter's bytes in this process, if it has any."""
        self._engine = engine
        self._forget = forget
        self.fence = Fence()

    async def handle(self, command: Command) -> CommandReply:
        self.fence.check(command)
        match command.body:
            case Drain(draining=draining):
                self._engine.is_draining = draining or self._engine.is_stopping
                logger.info("drain command", extra={"draining": draining, "epoch": command.epoch})
            case Forget(digest=digest):
                self._forget(digest)
                logger.info("forget command", extra={"adapter_id": digest, "epoch": command.epoch})
            case other:
                wanted = "drain or forget"
                raise InvalidRequest(f"an engine takes no {type(other).__name__.lower()} command; wanted {wanted}")
        return CommandReply(command_id=command.command_id)
