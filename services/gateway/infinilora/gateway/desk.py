"""Serves a generation request from its raw body to its answer: understand, admit, run, account.

Both routes pass through here; what differs between them is how a plan is read and how an answer is shaped.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Receive

from infinilora.gateway.accounting import Accounting
from infinilora.gateway.admission import Admission
from infinilora.gateway.answer import Answer, Part, Shape
from infinilora.gateway.bases import BaseShelf
from infinilora.gateway.catalog import Catalog
from infinilora.gateway.chat import ChatShape, plan_chat
from infinilora.gateway.completions import CompletionShape, plan_completion
from infinilora.gateway.plan import Limits, Plan
from infinilora.gateway.relay import Relay
from infinilora.gateway.schema import B, ChatBody, CompletionBody, read_body
from infinilora.gateway.sse import ClientGone, EventStream, Write, while_connected
from infinilora.gateway.underway import UnderWay
from infinilora.protocol.errors import InfiniLoraError
from infinilora.runtime.metrics import GatewayMetrics
from infinilora.runtime.problems import error_response, json_response
from infinilora.runtime.telemetry import Telemetry, attached, context_of, from_traceparent


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and how to hear that they have gone. `started_s`: when, by `time.perf_counter`."""

    tenant: str
    request_id: str
    traceparent: str | None
    started_s: float
    receive: Receive

    def received(self) -> "Caller":
        """The same, from the moment on at which the whole request is here."""
        return replace(self, started_s=time.perf_counter())


class Times(NamedTuple):
    """How long a request may take, and how long it may look for an engine."""

    request_s: float
    patience_s: float


class Desk:
    """Answers completions and chat completions. `under_way`: those that run now."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        shelf: BaseShelf,
        relay: Relay,
        admission: Admission,
        accounting: Accounting,
        metrics: GatewayMetrics,
        telemetry: Telemetry,
        times: Times,
    ) -> None:
        self._catalog = catalog
        self._shelf = shelf
        self._relay = relay
        self._admission = admission
        self._accounting = accounting
        self._metrics = metrics
        self._telemetry = telemetry
        self._times = times
        self.under_way = UnderWay()

    async def completions(self, caller: Caller, raw: bytes) -> Response:
        received = caller.received()
        plan = await self._plan(received, raw, CompletionBody, plan_completion)
        return await self._respond(received, "completions", plan, CompletionShape(plan))

    async def chat(self, caller: Caller, raw: bytes) -> Response:
        received = caller.received()
        plan = await self._plan(received, raw, ChatBody, plan_chat)
        return await self._respond(received, "chat", plan, ChatShape(plan))

    async def _plan(self, caller: Caller, raw: bytes, kind: type[B], make: Callable[..., Awaitable[Plan]]) -> Plan:
        body = read_body(kind, raw)
        target = self._catalog.resolve(body.model, caller.tenant)
        base = await self._shelf.get(target.base)
        self._catalog.check_base(target, base.card)
        slo_class = self._admission.slo_class(body.slo_class or "standard", target)
        limits = Limits(time.monotonic() + self._times.request_s, self._times.patience_s)
        plan = await make(body, request_id=caller.request_id, target=target, base=base, limits=limits)
        return replace(plan, slo_class=slo_class)

    async def _respond(self, caller: Caller, route: str, plan: Plan, shape: Shape) -> Response:
        answer = Answer(plan, shape, self._relay)
        created = int(datetime.now(UTC).timestamp())
        headers = {"x-request-id": caller.request_id}
        if plan.target.digest is not None:
            headers["x-adapter-digest"] = plan.target.digest
        if plan.body.stream:
            return EventStream(partial(self._stream, caller, route, answer, created), headers=headers)
        try:
            async with self._visit(caller, route, answer):
                whole = await while_connected(caller.receive, answer.whole(created))
        except InfiniLoraError as error:  # counted by the visit
            return error_response(error, headers)
        return json_response(whole, headers=headers | _warning(answer))

    async def _stream(self, caller: Caller, route: str, answer: Answer, created: int, write: Write) -> None:
        async def send(parts: list[Part]) -> None:
            # One choice a chunk: clients look at the first and at no other.
            await write([answer.chunk(created, [part]) for part in parts], headers=_warning(answer))

        async with self._visit(caller, route, answer):
            await answer.run(send)
            if answer.plan.wants_usage_chunk:
                await write([answer.usage_chunk(created)])

    @asynccontextmanager
    async def _visit(self, caller: Caller, route: str, answer: Answer) -> AsyncIterator[None]:
        """A request's time in the house: its places, its span, its numbers."""
        code = "internal"
        span = self._telemetry.start(
            f"gateway {route}", _attributes(caller, answer.plan), parent=from_traceparent(caller.traceparent)
        )
        try:
            with self._admission.admit(caller.tenant, answer.plan.num_choices), attached(context_of(span)):
                self._accounting.admitted(answer.plan.target)
                with self._metrics.in_flight.track_inprogress():
                    try:
                        async with self.under_way.one(answer.plan.limits.deadline):
                            yield
                        code = "ok"
                    finally:
                        await self._accounting.ended(
                            answer,
                            route=route,
                            tenant=caller.tenant,
                            started_s=caller.started_s,
                            ended_s=time.perf_counter(),
                        )
        except InfiniLoraError as error:
            code = error.code
            self._accounting.failed(answer, error)
            raise
        except (asyncio.CancelledError, ClientGone):
            code = "client_gone"
            self._accounting.left(answer, time.perf_counter() - caller.started_s)
            raise
        finally:
            self._metrics.requests.labels(route=route, code=code).inc()
            span.set_attribute("infinilora.code", code)
            span.set_attribute("gen_ai.usage.output_tokens", answer.totals.completion_tokens)
            span.end()


def _warning(answer: Answer) -> dict[str, str]:
    """Headers that tell base output in an adapter's place, and rows that a link may have narrowed."""
    return {f"x-infinilora-{key}": value for key, value in answer.totals.told().items()}


def _attributes(caller: Caller, plan: Plan) -> dict[str, Any]:
    return {
        "gen_ai.request.model": plan.target.requested,
        "gen_ai.usage.input_tokens": sum(len(prompt.ids) for prompt in plan.prompts),
        "infinilora.request_id": caller.request_id,
        "infinilora.tenant": caller.tenant,
        "infinilora.adapter_digest": plan.target.digest or "",
    }
