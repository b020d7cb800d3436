"""Counts of requests by bucket, of the shapes that public traces of such services have. Seeded; nothing is downloaded.

flat       Poisson
ramp       a rate that doubles within ten lead times and stays
day        day and night: Azure Functions' invocations (Shahrad et al., USENIX ATC 2020) repeat by the day, and timers
           make a peak at whole hours
bursts     BurstGPT's arrivals (Wang et al., arXiv 2401.17644) come in Gamma-distributed gaps whose coefficient of
           variation is above one, and whose rate itself wanders
spikes     rare jumps to several times the rate that decay within minutes
"""

import math
import random

LEAD = 6
"""Buckets of a lead time, as the coordinator counts them."""
DAY = 480
"""Buckets of a day here: of three minutes each."""


def flat(dice: random.Random, buckets: int) -> list[float]:
    return [_poisson(dice, 40.0) for _ in range(buckets)]


def ramp(dice: random.Random, buckets: int) -> list[float]:
    begin, length = buckets // 2, 10 * LEAD
    return [_poisson(dice, 40.0 * (1 + min(max(t - begin, 0) / length, 1.0))) for t in range(buckets)]


def day(dice: random.Random, buckets: int) -> list[float]:
    hour = DAY // 24
    rates = (
        40.0 * (1 + 0.7 * math.sin(2 * math.pi * t / DAY)) + (30.0 if t % hour == 0 else 0) for t in range(buckets)
    )
    return [_poisson(dice, rate) for rate in rates]


def bursts(dice: random.Random, buckets: int) -> list[float]:
    log_rate, counts = math.log(40.0), []
    for _ in range(buckets):
        log_rate += dice.gauss(0, 0.08) - 0.02 * (log_rate - math.log(40.0))
        # A Gamma-distributed mean makes the count's spread wider than a Poisson's, as clustered arrivals are.
        counts.append(_poisson(dice, math.exp(log_rate) * dice.gammavariate(4.0, 0.25)))
    return counts


def spikes(dice: random.Random, buckets: int) -> list[float]:
    extra, counts = 0.0, []
    for _ in range(buckets):
        extra = extra * 0.8 + (160.0 if dice.random() < 0.01 else 0.0)
        counts.append(_poisson(dice, 40.0 + extra))
    return counts


SHAPES = {"flat": flat, "ramp": ramp, "day": day, "bursts": bursts, "spikes": spikes}


def _poisson(dice: random.Random, mean: float) -> float:
    """Counts exponential gaps; exact, and quick enough for such means."""
    total, count = dice.expovariate(1.0), 0
    while total < mean:
        total += dice.expovariate(1.0)
        count += 1
    return float(count)
