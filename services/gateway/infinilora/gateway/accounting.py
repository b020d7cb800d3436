"""What a request leaves behind: heat and a report for the coordinator, a usage event for whoever bills, metrics.

Heat is gathered for a second and may be lost; usage events are kept until the broker has them.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from infinilora.gateway.answer import Answer
from infinilora.gateway.plan import Target
from infinilora.gateway.reports import Reports
from infinilora.protocol import keys, subjects
from infinilora.protocol.control import UsageEvent
from infinilora.protocol.errors import (
    AdapterLoading,
    DeadlineExceeded,
    InfiniLoraError,
    Internal,
    Overloaded,
    Unavailable,
)
from infinilora.protocol.ids import Digest
from infinilora.runtime.bus import Bus
from infinilora.runtime.metrics import GatewayMetrics
from infinilora.runtime.store import Store

logger = logging.getLogger(__name__)

HEAT_FLUSH_S = 1.0
MAX_LABELS = 20
OURS = (AdapterLoading, DeadlineExceeded, Internal, Overloaded, Unavailable)
"""Failures that say how the system is, and nothing of the request or its adapter."""


class Accounting:
    """Writes for all requests of this process."""

    def __init__(
        self,
        store: Store,
        bus: Bus,
        metrics: GatewayMetrics,
        reports: Reports,
        *,
        half_lives_s: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._bus = bus
        self._metrics = metrics
        self._reports = reports
        self._half_lives = keys.heats(half_lives_s)
        self._clock = clock
        self._heat: Counter[Digest] = Counter()
        self._gathers_since = clock()
        self._labels: list[str] = []  # adapters with a metric label of their own: the first to be asked for

    def admitted(self, target: Target) -> None:
        """A request was let in. Counted once, whatever its number of choices."""
        self._reports.arrived(target)
        if target.digest is None:
            return
        self._heat[target.digest] += 1
        if len(self._labels) < MAX_LABELS and target.full_name not in self._labels:
            self._labels.append(target.full_name)
            self._metrics.adapters.set(self._labels)

    def failed(self, answer: Answer, error: InfiniLoraError) -> None:
        """A request was refused, or given up. One that failed for us before its first token has missed its SLO."""
        if isinstance(error, OURS) and not answer.totals.completion_tokens:
            self._reports.failed(answer.plan.target, answer.plan.body.slo_class or "standard")

    def left(self, answer: Answer, waited_s: float) -> None:
        """The client of a request left. Whoever waited in vain for longer than was promised has seen an SLO missed."""
        if not answer.totals.completion_tokens:
            self._reports.left(answer.plan.target, answer.plan.body.slo_class or "standard", waited_s)

    async def write_heat(self) -> None:
        """Add what has gathered, once a second. Runs for ever."""
        while True:
            await asyncio.sleep(HEAT_FLUSH_S)
            await self.flush_heat()

    async def flush_heat(self) -> None:
        gathered, self._heat = self._heat, Counter()
        # They came one by one since the last time: on average, half of that ago.
        now = self._clock()
        age_s, self._gathers_since = (now - self._gathers_since) / 2, now
        if not gathered:
            return
        try:
            await self._store.add_heat(self._half_lives, gathered, age_s=age_s)
        except Unavailable:
            logger.debug("heat lost", extra={"adapters": len(gathered)})
        except Internal as error:  # a person must mend what lies there; requests are served without it
            logger.error("heat lost", extra={"reason": error.message})  # noqa: TRY400 - no traceback

    async def ended(self, answer: Answer, *, route: str, tenant: str, started_s: float, ended_s: float) -> None:
        """A request is over, however it ended."""
        self._observe(answer, route, started_s, ended_s)
        plan, totals = answer.plan, answer.totals
        event = UsageEvent(
            request_id=plan.request_id,
            tenant=tenant,
            model=plan.target.requested,
            digest=plan.target.digest,
            prompt_tokens=totals.prompt_tokens,
            completion_tokens=totals.completion_tokens,
            finish_reason=",".join(sorted(set(totals.reasons))) if answer.is_complete else "abort",
            degraded=totals.degraded,
        )
        try:
            await self._bus.durable_publish(subjects.USAGE, event)
        except Unavailable:
            logger.error("usage event lost", extra={"request_id": plan.request_id})  # noqa: TRY400 - no traceback

    def _observe(self, answer: Answer, route: str, started_s: float, ended_s: float) -> None:
        target, paces = answer.plan.target, [pace for pace in answer.totals.paces if pace.num_tokens]
        adapter = self._metrics.adapters.label(target.full_name if target.digest else None)
        self._metrics.duration.labels(route=route, adapter=adapter).observe(ended_s - started_s)
        self._metrics.tokens.labels(direction="in", adapter=adapter).inc(answer.totals.prompt_tokens)
        self._metrics.tokens.labels(direction="out", adapter=adapter).inc(answer.totals.completion_tokens)
        if paces:
            self._reports.ended(target, answer.plan.body.slo_class or "standard", paces, started_s)
            first_s = min(pace.first_s for pace in paces)
            self._metrics.ttft.labels(route=route, adapter=adapter).observe(first_s - started_s)
        for pace in paces:
            if pace.num_tokens > 1:
                tpot_s = (pace.last_s - pace.first_s) / (pace.num_tokens - 1)
                self._metrics.tpot.labels(route=route, adapter=adapter).observe(tpot_s)
