"""Says aloud when an SLO is missed, and advises gateways while it is. What counts as missed is slo.py's."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from infinilora.coordinator.leader import Leadership
from infinilora.coordinator.slo import Alarms, Judged, Metric, Objective, judge
from infinilora.coordinator.traffic import Watched
from infinilora.protocol import subjects
from infinilora.protocol.ids import Digest, Fingerprint, SloClass
from infinilora.protocol.traffic import Advice, SloAlert
from infinilora.runtime.bus import Bus
from infinilora.runtime.metrics import CoordinatorMetrics

logger = logging.getLogger(__name__)

ROUND_S = 1.0
MOST_HURRIED = 100
SHOWN = 100


class SloControl:
    """`judged` as of the last look. Every coordinator looks; the leader alone speaks."""

    def __init__(
        self,
        *,
        bus: Bus,
        leadership: Leadership,
        watched: Watched,
        objective: Objective,
        alarms: Alarms,
        can_grow: Callable[[Fingerprint], bool],
        metrics: CoordinatorMetrics,
    ) -> None:
        self._bus = bus
        self._leadership = leadership
        self._watched = watched
        self._objective = objective
        self._can_grow = can_grow
        self._metrics = metrics
        self._alarms = alarms
        self._spoke_under: int | None = None
        """The epoch under which all alerts that last have been said here."""
        self.judged: list[Judged] = []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            await self.round()

    async def round(self) -> None:
        """Look; say what has begun or ended; advise, again and again, while something lasts."""
        self.judged = list(judge(self._watched.window, self._objective))
        changes = self._alarms.look(self.judged)
        self._measure()
        epoch = self._leadership.holding
        if epoch is None:
            return
        if epoch != self._spoke_under:  # what began under another leader, or under none, may be unsaid
            changes = [(one, True) for one in self._alarms.firing.values()]
            self._spoke_under = epoch
        for one, begins in changes:
            await self._say(one, epoch, is_firing=begins)
        advice = self._advice(epoch)
        if advice.hurried or advice.shed:
            await self._bus.publish(subjects.ADVICE, advice)

    def show(self) -> list[dict[str, Any]]:
        """For a person: the classes, then the adapters that are worst off."""
        ordered = sorted(self.judged, key=lambda one: (one.subject.digest is not None, one.long.share))
        return [
            {
                **one.subject._asdict(),
                "requests": one.long.requests,
                "attainment": round(one.long.share, 4),
                "budget_left": round(1 - one.long.burn_rate, 2),
                "burn_rate": round(one.long.burn_rate, 2),
                "burn_rate_of_late": round(one.short.burn_rate, 2),
                "is_firing": one.subject in self._alarms.firing,
            }
            for one in ordered[:SHOWN]
        ]

    def _advice(self, epoch: int) -> Advice:
        firing = sorted(self._alarms.firing.items(), key=lambda pair: -pair[1].long.burn_rate)
        hurried = dict.fromkeys(subject.digest for subject, _ in firing if subject.digest)
        bases = {subject.base for subject, _ in firing if subject.digest is None}
        shed = sorted(base for base in bases if self._alarms.misses_first_tokens(base) and not self._can_grow(base))
        return Advice(epoch=epoch, hurried=tuple(map(Digest, list(hurried)[:MOST_HURRIED])), shed=tuple(shed))

    async def _say(self, one: Judged, epoch: int, *, is_firing: bool) -> None:
        subject = one.subject
        words = {"base": subject.base, "slo_class": subject.slo_class, "adapter_id": subject.digest}
        numbers = {"metric": subject.metric, "attainment": round(one.long.share, 4)}
        logger.warning("SLO missed" if is_firing else "SLO kept again", extra={**words, **numbers})
        alert = SloAlert(
            base=subject.base,
            slo_class=subject.slo_class,
            digest=subject.digest,
            metric=subject.metric,
            is_firing=is_firing,
            attainment=one.long.share,
            burn_rate=one.long.burn_rate,
            epoch=epoch,
        )
        await self._bus.publish(subjects.SLO_ALERTS, alert)

    def _measure(self) -> None:
        """Of classes, each of the base that fares worst; adapters are no labels. What nobody asks for has none."""
        shares: dict[tuple[SloClass, Metric], float] = {}
        for one in self.judged:
            if one.subject.digest is None:
                key = one.subject.slo_class, one.subject.metric
                shares[key] = min(one.long.share, shares.get(key, 1.0))
        self._metrics.attainment.clear()
        for (slo_class, metric), share in shares.items():
            self._metrics.attainment.labels(slo_class=slo_class, metric=metric).set(share)
        self._metrics.alerts.set(len(self._alarms.firing))
