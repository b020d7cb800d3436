"""What gateways report, gathered: demand by base, times by class and adapter, who comes when. Decides nothing.

Leader and standbys gather alike, so that a new leader knows what the one before it knew.
"""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from infinilora.coordinator.demand import Demand, Meters
from infinilora.coordinator.prefetch import Calendar
from infinilora.coordinator.slo import Window
from infinilora.protocol import subjects
from infinilora.protocol.control import EngineLoad
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.protocol.traffic import DemandHistory, Traffic
from infinilora.runtime.bus import Bus
from infinilora.runtime.members import Members

logger = logging.getLogger(__name__)

HORIZON = 6
"""Buckets of a lead time."""
PARTS, PART_S, SHORT_PARTS = 60, 5.0, 12
"""The window of the SLO: five minutes, and the latest of them."""


class Watched:
    """All that is known of the traffic. `now` is of a monotonic clock."""

    def __init__(
        self,
        bus: Bus,
        members: Members,
        *,
        lead_s: float,
        season_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = lambda: datetime.now(UTC).timestamp(),
    ) -> None:
        self._bus = bus
        self._members = members
        self._lead_s = lead_s
        self._season_s = season_s
        self.clock = clock
        self.wall = wall
        self._meters = Meters()
        self._bucket_ends = clock() + self.bucket_s
        self._part_ends = clock() + PART_S
        self.demands: dict[Fingerprint, Demand] = {}
        self.window = Window(PARTS, SHORT_PARTS)
        self.calendar = Calendar(season_s)

    @property
    def bucket_s(self) -> float:
        return self._lead_s / HORIZON

    async def follow(self) -> None:
        """Hear every report. Runs for ever."""
        async for report in self._bus.subscribe(subjects.TRAFFIC, Traffic):
            self.hear(report)

    def hear(self, report: Traffic) -> None:
        for base, count in self._meters.read(report).items():
            self.demand(base).arrived(count)
        for base in report.arrivals:
            self.demand(base)
        self.window.add(report.tallies)
        self.calendar.note(report.by_adapter, self.wall())

    def demand(self, base: Fingerprint) -> Demand:
        if base not in self.demands:
            season = max(2, round(self._season_s / self.bucket_s))
            self.demands[base] = Demand(bucket_s=self.bucket_s, horizon=HORIZON, season=season)
        return self.demands[base]

    def history(self, base: Fingerprint) -> DemandHistory:
        """What is known here of a base, up to the last bucket that is over."""
        demand = self.demand(base)
        since_s = self.clock() - (self._bucket_ends - self.bucket_s)
        return DemandHistory(
            bucket_s=self.bucket_s,
            ended_at=self.wall() - since_s,
            counts=tuple(demand.counts),
            in_flight=tuple(demand.in_flight),
        )

    def tick(self) -> bool:
        """Once a second: look at the engines, close what is over. Whether a bucket was closed."""
        now = self.clock()
        for base, in_flight in self._in_flight().items():
            self.demand(base).sample(in_flight)
        while now >= self._part_ends:
            self._part_ends = max(self._part_ends + PART_S, now - PARTS * PART_S)
            self.window.turn()
        if now < self._bucket_ends:
            return False
        # One that is late by more than a bucket was stopped: what came meanwhile is not known to have been nothing.
        self._bucket_ends = max(self._bucket_ends + self.bucket_s, now)
        for demand in self.demands.values():
            demand.step()
        return True

    def expected(self) -> dict[Digest, float]:
        """The adapters that came one season before at the end of a lead time from now, and their rate then."""
        return self.calendar.expected(self.wall(), self._lead_s)

    def _in_flight(self) -> dict[Fingerprint, int]:
        found: dict[Fingerprint, int] = {}
        for member in self._members.all():
            load = member.beat.load
            if member.beat.base and member.health != "dead" and isinstance(load, EngineLoad):
                found[member.beat.base] = found.get(member.beat.base, 0) + load.running + load.waiting
        return found
