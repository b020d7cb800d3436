"""The soak of scaling: whether it is in time and does not flap, on many seeds that no constant was chosen on.

Constants were chosen on seeds 1000 to 1099 and 10000 to 10299. `-s` prints the figures of docs/decisions/0012.
"""

import math
import random
from statistics import fmean, median

import pytest

from support.made_load import (
    BUCKET_S,
    RISE_S,
    Rate,
    ScaledFleet,
    day,
    engines_for,
    on_a_flat_load,
    on_a_ramp,
    spikes,
    step,
    wander,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

KNOWN_BEFORE = [*range(40), *range(100, 140), *range(200, 240)]
"""Seeds that an earlier policy was measured on."""
FRESH = list(range(3000, 3200))
RATES = (7.0, 7.9, 8.0, 8.4, 12.0)


@pytest.mark.parametrize(("times", "in_time"), [(2.0, 0.99), (4.0, 0.97)])
@pytest.mark.parametrize("seeds", [KNOWN_BEFORE, FRESH])
def test_ramps_are_met_in_time(seeds: list[int], times: float, in_time: float) -> None:
    fleets = [on_a_ramp(times, seed) for seed in seeds]
    met = [fleet.is_in_time for fleet in fleets]
    early = sum(fleet.changes[0][0] < RISE_S for fleet in fleets)
    short = [len(fleet.missed) * BUCKET_S for fleet in fleets]
    print(f"\nramp x{times:g}: {sum(met)} of {len(met)} in time, {early} by noise before it rose,", end=" ")
    print(f"seconds with too few: median {median(short):g}, most {max(short):g}")
    assert fmean(met) >= in_time
    assert early <= 0.08 * len(met)


@pytest.mark.parametrize(
    ("seeds", "hours", "dispersion"),
    [(KNOWN_BEFORE, 2, 1.0), (FRESH[:40], 2, 1.0), (FRESH[:20], 2, 4.0), (FRESH[:4], 24, 1.0), (FRESH[:4], 24, 4.0)],
)
def test_flat_loads_do_not_flap(seeds: list[int], hours: int, dispersion: float) -> None:
    """After an hour to settle, where a count is not what the fleet began with."""
    warm_s = 3600 if dispersion > 1 else 0
    fleets = [
        on_a_flat_load(rate, seed, seconds=3600 * hours + warm_s, dispersion=dispersion)
        for rate in RATES
        for seed in seeds
    ]
    changes = [sum(at >= warm_s for at, _ in fleet.changes) for fleet in fleets]
    calm, engines = sum(count <= 1 for count in changes), fmean(fleet.engine_hours / hours for fleet in fleets)
    print(f"\nflat, dispersion {dispersion:g}: {calm} of {len(fleets)} with at most one change in {hours} h,", end=" ")
    print(f"{fmean(changes) / hours:.4f} changes an hour, most {max(changes)}, {engines:.2f} engines")
    assert fmean(changes) / hours <= 0.5
    assert hours > 2 or calm >= (0.995 if dispersion == 1 else 0.9) * len(fleets)


@pytest.mark.parametrize("name", ["step", "day", "bursts", "clustered bursts", "spikes"])
def test_other_loads_are_served(name: str) -> None:
    fleets, hours = [], load(name, 0)[1]
    for seed in FRESH[:10]:
        rate, _ = load(name, seed)
        fleet = ScaledFleet(engines_for(rate(0.0)))
        fleet.live(rate, 3600 * hours, random.Random(seed), dispersion=4.0 if "clustered" in name else 1.0)
        fleets.append(fleet)
    short, engine_hours = (
        fmean(v) for v in zip(*((len(f.missed) * BUCKET_S, f.engine_hours) for f in fleets), strict=True)
    )
    print(f"\n{name}: {short:.0f} s with too few, {engine_hours:.2f} engine hours,", end=" ")
    print(f"{fmean(len(fleet.changes) for fleet in fleets):.1f} changes in {hours:g} h")
    assert short <= 0.02 * 3600 * hours
    assert math.isfinite(engine_hours)


def load(name: str, seed: int) -> tuple[Rate, float]:
    """A load, and for how many hours."""
    match name:
        case "step":
            return step(3.0), 4 / 3
        case "day":
            return day, 12
        case "spikes":
            return spikes(seed, 6 * 3600), 6
        case _:
            return wander(seed, 6 * 3600), 6
