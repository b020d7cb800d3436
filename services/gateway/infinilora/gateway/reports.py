"""What this gateway says of its traffic, once a second, and what the leading coordinator advises it.

Advice ends by itself (ADVICE_S after the last word), so that a coordinator's death leaves nothing behind.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from operator import itemgetter

from infinilora.gateway.answer import Pace
from infinilora.gateway.plan import Target
from infinilora.protocol import subjects
from infinilora.protocol.errors import Overloaded
from infinilora.protocol.ids import Digest, Fingerprint, SloClass
from infinilora.protocol.traffic import ADVICE_S, MOST_S, Advice, Tally, Traffic
from infinilora.runtime.bus import Bus

REPORT_S = 1.0
MOST_ADAPTERS = 256
"""Adapters of one report, the busiest; all are counted in their class."""
_NEXT: dict[SloClass, SloClass] = {"batch": "standard", "standard": "interactive", "interactive": "interactive"}

Key = tuple[Fingerprint, SloClass, Digest | None]


class Reports:
    """Of one life of one gateway. Arrivals are counted since its start, times since the report before."""

    def __init__(self, bus: Bus, *, gateway: str, incarnation: str) -> None:
        self._bus = bus
        self._gateway = gateway
        self._incarnation = incarnation
        self._arrivals: Counter[Fingerprint] = Counter()
        self._by_adapter: Counter[Digest] = Counter()
        self._tallies: dict[Key, Tally] = {}

    def arrived(self, target: Target) -> None:
        self._arrivals[target.base] += 1
        if target.digest is not None:
            self._by_adapter[target.digest] += 1

    def ended(self, target: Target, slo_class: SloClass, paces: list[Pace], started_s: float) -> None:
        """`paces` of the choices that have a first token."""
        for tally in self._tallies_of(target, slo_class):
            tally.ttft.add(min(pace.first_s for pace in paces) - started_s)
            for pace in paces:
                if pace.num_tokens > 1:
                    tally.tpot.add((pace.last_s - pace.first_s) / (pace.num_tokens - 1))

    def failed(self, target: Target, slo_class: SloClass) -> None:
        """It has no first token, and is not to blame for it: later than any objective has it."""
        for tally in self._tallies_of(target, slo_class):
            tally.ttft.add(MOST_S)

    def left(self, target: Target, slo_class: SloClass, waited_s: float) -> None:
        """Its client left, without a token, after so long."""
        for tally in self._tallies_of(target, slo_class):
            tally.left.add(waited_s)

    async def send(self) -> None:
        """At once, and then once a second. Runs for ever."""
        while True:
            await self._bus.publish(subjects.TRAFFIC, self.report())
            await asyncio.sleep(REPORT_S)

    def report(self) -> Traffic:
        """What has gathered; it gathers anew from here."""
        tallies, self._tallies = self._tallies, {}
        by_adapter, self._by_adapter = self._by_adapter, Counter()
        classes = [tally for key, tally in tallies.items() if key[2] is None]
        of_adapters = (tally for tally in tallies.values() if tally.digest)
        adapters = sorted(of_adapters, key=lambda tally: -tally.ttft.count - tally.left.count)
        return Traffic(
            gateway=self._gateway,
            incarnation=self._incarnation,
            arrivals=dict(self._arrivals),
            by_adapter=dict(sorted(by_adapter.items(), key=itemgetter(1), reverse=True)[:MOST_ADAPTERS]),
            tallies=(*classes, *adapters[:MOST_ADAPTERS]),
        )

    def _tallies_of(self, target: Target, slo_class: SloClass) -> list[Tally]:
        """Of its class, and of its adapter."""
        keys: list[Key] = [(target.base, slo_class, digest) for digest in dict.fromkeys((None, target.digest))]
        return [self._tallies.setdefault(key, Tally(*key)) for key in keys]


class Advised:
    """What the leader asks for now."""

    def __init__(self, bus: Bus, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._clock = clock
        self._advice: Advice | None = None
        self._heard_at = 0.0

    async def follow(self) -> None:
        """Hear it. Runs for ever."""
        async for advice in self._bus.subscribe(subjects.ADVICE, Advice):
            self.hear(advice)

    def hear(self, advice: Advice) -> None:
        """One of an earlier leader, still on its way, is not taken."""
        if self._advice is None or advice.epoch >= self._advice.epoch:
            self._advice, self._heard_at = advice, self._clock()

    def slo_class(self, asked: SloClass, target: Target) -> SloClass:
        """As asked, or one up for an adapter that has missed its SLO. Raises Overloaded for what is to come later."""
        advice = self._advice
        if advice is None or self._clock() - self._heard_at > ADVICE_S:
            return asked
        if asked == "batch" and target.base in advice.shed:
            raise Overloaded(
                "this base model is at its limit: batch requests are to come later; interactive and standard ones are "
                "served",
                retry_after_s=ADVICE_S,
            )
        return _NEXT[asked] if target.digest in advice.hurried else asked
