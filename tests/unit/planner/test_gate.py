"""The admission curve against requests played one by one, and what strict order does to such a pool."""

import random
from collections.abc import Callable
from statistics import mean

import numpy as np
import pytest

from infinilora.coordinator.provision.admission import curve
from infinilora.coordinator.provision.popularity import zipf
from support.slot_gate import share_admitted_at_once, share_with_room

IN_FLIGHT, LEAST, TARGET = 512, 135, 0.95
WITH_MARGIN = 149
SEEDS, NUM_REQUESTS = (1, 2), 12_000
WEIGHTS = zipf(512, 1.2)


def promised(slots: int) -> float:
    return 1 - curve(WEIGHTS * IN_FLIGHT, np.ones(512, dtype=np.int64)).refused_with(slots)


def played(slots: int, *, bypass: bool) -> float:
    return mean(
        share_admitted_at_once(
            WEIGHTS.tolist(), in_flight=IN_FLIGHT, slots=slots, bypass=bypass, seed=seed, num_requests=NUM_REQUESTS
        )
        for seed in SEEDS
    )


def two_kinds(dice: random.Random) -> float:
    """Nine short ones for each that is long: far from exponential, one second on average."""
    return 0.5 if dice.random() < 0.9 else 5.5


def exponential(dice: random.Random) -> float:
    return dice.expovariate(1.0)


@pytest.mark.parametrize("residence", [two_kinds, exponential])
@pytest.mark.parametrize(("in_flight", "capacity"), [(20.0, 40), (20.0, 55), (60.0, 100)])
def test_the_curve_is_what_arrivals_find_whatever_the_residence(
    residence: Callable[[random.Random], float], in_flight: float, capacity: int
) -> None:
    weights, sizes = zipf(60, 1.0), np.resize(np.array([1, 2, 5], dtype=np.int64), 60)
    want = 1 - curve(weights * in_flight, sizes).refused_with(capacity)
    got = share_with_room(
        weights.tolist(),
        sizes.tolist(),
        in_flight=in_flight,
        capacity=capacity,
        residence=residence,
        seed=5,
        num_requests=30_000,
    )
    assert got == pytest.approx(want, abs=0.012)


def test_bypass_keeps_the_promise() -> None:
    """At the bare minimum those that wait add to what is in use; the formula does not see them, the margin does."""
    assert played(WITH_MARGIN, bypass=True) == pytest.approx(promised(WITH_MARGIN), abs=0.015)
    assert played(WITH_MARGIN, bypass=True) >= TARGET
    assert promised(LEAST) - 0.1 < played(LEAST, bypass=True) <= promised(LEAST)


def test_strict_order_breaks_it() -> None:
    assert played(LEAST, bypass=False) < promised(LEAST) - 0.25
