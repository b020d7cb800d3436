"""Loads of a known law on a virtual clock, and a fleet that is scaled for them by the coordinator's own policy.

An engine takes LEAD_S to come and serves EACH sequences; a request stays for RESIDENCE_S. Too few engines are there
when the sequences that the law gives are more than those that are ready serve.
"""

import math
import random
from collections.abc import Callable

from infinilora.coordinator.demand import Demand
from infinilora.coordinator.scale import Bounds, Tier, for_load

LEAD_S, HOLD_S, BUCKET_S = 60.0, 600.0, 10.0
EACH, RESIDENCE_S = 16.0, 4.0
BOUNDS = Bounds(least=1, most=8, hold_s=HOLD_S, lead_s=LEAD_S)
RISE_S = 1200.0
BEFORE_RPS = 5.6
"""70 % of what two engines serve."""
DAY_S = 14_400.0
Rate = Callable[[float], float]


def ramp(times: float) -> Rate:
    """To so many times the load within ten lead times."""
    return lambda now: BEFORE_RPS * (1 + (times - 1) * min(max(now - RISE_S, 0) / (10 * LEAD_S), 1.0))


def step(times: float) -> Rate:
    """At once, for half an hour."""
    return lambda now: BEFORE_RPS * (times if RISE_S <= now < RISE_S + 1800 else 1.0)


def day(now: float) -> float:
    """Day and night, of four hours: from 2 to 16 requests a second."""
    return 9 - 7 * math.cos(2 * math.pi * now / DAY_S)


def wander(seed: int, seconds: float) -> Rate:
    """Around 8 requests a second, by a fifth in a lead time, as BurstGPT's rate does."""
    dice, off, rates = random.Random(seed), 0.0, []
    for _ in range(math.ceil(seconds / BUCKET_S)):
        off += dice.gauss(0, 0.08) - 0.02 * off
        rates.append(8.0 * math.exp(off))
    return lambda now: rates[int(now / BUCKET_S)]


def spikes(seed: int, seconds: float) -> Rate:
    """Rare jumps from 6 to 22 requests a second that are over in less than a lead time."""
    dice, extra, rates = random.Random(seed), 0.0, []
    for _ in range(math.ceil(seconds / BUCKET_S)):
        extra = 0.8 * extra + (16.0 if dice.random() < 0.003 else 0.0)
        rates.append(6.0 + extra)
    return lambda now: rates[int(now / BUCKET_S)]


def engines_for(rate: float, dispersion: float = 1.0) -> int:
    """What a flat load settles at."""
    return for_load((1 + 0.1 * math.sqrt(dispersion)) * rate * RESIDENCE_S, EACH).now


class ScaledFleet:
    """`changes`: when its count changed, and to what. `missed`: when too few were there. In seconds, by bucket."""

    def __init__(self, engines: int) -> None:
        self.demand = Demand(bucket_s=BUCKET_S, horizon=6, season=round(DAY_S / BUCKET_S))
        self.tier = Tier(BOUNDS)
        self.count = engines
        self.ready = [0.0] * engines
        self.changes: list[tuple[float, int]] = []
        self.missed: list[float] = []
        self.engine_hours = 0.0

    def live(self, rate: Rate, seconds: float, dice: random.Random, *, dispersion: float = 1.0) -> None:
        """`dispersion`: variance over mean of a bucket's count; 4 of gaps whose coefficient of variation is 2."""
        for index in range(int(seconds / BUCKET_S)):
            now = index * BUCKET_S
            mean, in_flight = rate(now) * BUCKET_S, rate(now) * RESIDENCE_S
            if in_flight > EACH * sum(at <= now for at in self.ready):
                self.missed.append(now)
            if dispersion > 1:
                mean *= dice.gammavariate(mean / (dispersion - 1), (dispersion - 1) / mean)
            self.demand.arrived(sum(dice.random() < mean / 1000 for _ in range(1000)))
            for _ in range(3):  # a bucket is two and a half residences: so many looks are independent
                self.demand.sample(max(0, round(dice.gauss(in_flight, math.sqrt(dispersion * in_flight)))))
            self.demand.step()
            self._decide(now)
            self.engine_hours += self.count * BUCKET_S / 3600

    @property
    def is_in_time(self) -> bool:
        """Whether it grew before too few were there."""
        return bool(self.changes) and self.changes[0][0] < min(self.missed, default=math.inf)

    @property
    def flaps(self) -> bool:
        """Whether a flat load changed it more than once."""
        return len(self.changes) > 1

    def _decide(self, now: float) -> None:
        demand = self.demand
        wanted = for_load(demand.in_flight_ahead(), EACH, by_noise=demand.in_flight_by_noise())
        count = self.tier.decide(self.count, wanted, now).num
        if count != self.count:
            self.changes.append((now, count))
            self.ready = [*self.ready[:count], *[now + LEAD_S] * (count - self.count)]
        self.count = count


def on_a_ramp(times: float, seed: int) -> ScaledFleet:
    fleet = ScaledFleet(2)
    fleet.live(ramp(times), RISE_S + 14 * LEAD_S, random.Random(seed))
    return fleet


def on_a_flat_load(rate: float, seed: int, *, seconds: float = 7200, dispersion: float = 1.0) -> ScaledFleet:
    fleet = ScaledFleet(engines_for(rate, dispersion))
    fleet.live(lambda _: rate, seconds, random.Random(seed), dispersion=dispersion)
    return fleet
