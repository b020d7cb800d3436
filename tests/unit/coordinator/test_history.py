"""Demand that is taken up from an earlier leader: what both know is put together, and forecasts are as if one had."""

import pytest

from infinilora.coordinator.demand import Demand
from infinilora.coordinator.history import AVERAGED, KEPT_SEASONS, joined
from infinilora.protocol.traffic import DemandHistory

BUCKET_S, SEASON = 10.0, 5


def ends(at: float, *counts: int, in_flight: tuple[float, ...] = (), bucket_s: float = BUCKET_S) -> DemandHistory:
    return DemandHistory(bucket_s=bucket_s, ended_at=at, counts=counts, in_flight=in_flight)


@pytest.mark.parametrize(
    ("name", "earlier", "own", "counts"),
    [
        ("nothing was left", ends(100), ends(100, 1, 2), (1, 2)),
        ("own begins where the earlier ends", ends(100, 1, 2), ends(120, 3, 4), (1, 2, 3, 4)),
        ("and a little later: buckets are whole", ends(100, 1, 2), ends(124.9, 3, 4), (1, 2, 3, 4)),
        ("nothing is over here yet", ends(100, 1, 2), ends(101), (1, 2)),
        ("both heard the same", ends(100, 1, 2, 3), ends(110, 20, 30, 4), (1, 20, 30, 4)),
        ("own knows all that was left", ends(100, 1, 2), ends(110, 10, 20, 3), (10, 20, 3)),
        ("own knows more", ends(100, 2), ends(110, 10, 20, 3), (10, 20, 3)),
        ("nobody heard two buckets: as just before", ends(100, 1, 2), ends(130, 5), (1, 2, 2, 2, 5)),
        (
            "nobody heard two: as one season before",
            ends(100, 1, 2, 3, 4, 5, 6),
            ends(130, 9),
            (1, 2, 3, 4, 5, 6, 2, 3, 9),
        ),
        ("a season ago is as now", ends(100, 1), ends(150), (1, 1, 1, 1, 1, 1)),
        ("longer ago is of no use", ends(100, 1), ends(160), ()),
        ("of other buckets", ends(100, 1, 2, bucket_s=20.0), ends(110, 3), (3,)),
        ("no more than is worth keeping", ends(100, *range(10)), ends(110, 10), tuple(range(1, 11))),
    ],
)
def test_what_is_known_of_both(name: str, earlier: DemandHistory, own: DemandHistory, counts: tuple[int, ...]) -> None:
    both = joined(earlier, own, SEASON)
    assert (both.counts, both.ended_at, both.bucket_s) == (counts, own.ended_at, BUCKET_S), name


@pytest.mark.parametrize(
    ("name", "left", "own_ends", "own", "in_flight"),
    [
        ("one after the other", (1.0, 2.0), 110, (3.0,), (1.0, 2.0, 3.0)),
        ("nobody heard one", (1.0, 2.0), 120, (3.0,), (1.0, 2.0, 2.0, 3.0)),
        ("both heard one", (1.0, 2.0), 100, (3.0,), (1.0, 3.0)),
        ("fewer were left than both heard", (2.0,), 100, (3.0, 4.0), (3.0, 4.0)),
    ],
)
def test_sequences_at_once_are_of_the_same_buckets(
    name: str, left: tuple[float, ...], own_ends: float, own: tuple[float, ...], in_flight: tuple[float, ...]
) -> None:
    earlier = ends(100, 1, 1, 1, in_flight=left)
    both = joined(earlier, ends(own_ends, *(5 for _ in own), in_flight=own), SEASON)
    assert both.in_flight == in_flight, name


def test_no_more_sequences_are_kept_than_weigh_in_the_mean() -> None:
    many = tuple(float(number) for number in range(100))
    both = joined(ends(1000, *range(100), in_flight=many), ends(1010, 7, in_flight=(7.0,)), 60)
    assert len(both.in_flight) == AVERAGED
    assert both.in_flight[-2:] == (99.0, 7.0)


def a_demand(counts: list[int]) -> Demand:
    demand = Demand(bucket_s=BUCKET_S, horizon=6, season=SEASON * 8)
    for number, count in enumerate(counts):
        demand.arrived(count)
        demand.sample(2.0 * (number % 3))
        demand.step()
    return demand


@pytest.mark.parametrize("num_buckets", [3, 30, KEPT_SEASONS * SEASON * 8])
def test_who_takes_it_up_forecasts_as_who_has_seen_it(num_buckets: int) -> None:
    seen = a_demand([10 + (7 * number) % 11 for number in range(num_buckets)])
    taken_up = Demand(bucket_s=BUCKET_S, horizon=6, season=SEASON * 8)
    taken_up.remember(tuple(seen.counts), tuple(seen.in_flight))
    assert taken_up.ahead() == seen.ahead()
    assert taken_up.rate == pytest.approx(seen.rate)
    assert taken_up.residence_s == pytest.approx(seen.residence_s, rel=1e-2)
    for demand in (seen, taken_up):
        demand.arrived(40)
        demand.sample(9)
        demand.step()
    assert taken_up.ahead() == seen.ahead()


def test_the_present_bucket_goes_on_when_the_past_is_taken_up() -> None:
    demand = a_demand([5])
    demand.arrived(3)
    demand.sample(4)
    demand.remember([0, 0], [])
    assert demand.idle_s == 0.0
    demand.step()
    assert list(demand.counts) == [0, 0, 3]
    assert list(demand.in_flight)[-1] == 4.0


def test_an_idle_past_is_taken_up_as_idle() -> None:
    demand = Demand(bucket_s=BUCKET_S, horizon=6, season=40)
    demand.remember([4, 0, 0, 0], [1.0, 0.0, 0.0, 0.0])
    assert demand.idle_s == 3 * BUCKET_S
