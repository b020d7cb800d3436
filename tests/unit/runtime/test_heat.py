"""Scores of heat: logarithms that time does not change, and the rates that they stand for."""

import math
from functools import reduce

import pytest

from infinilora.protocol.ids import digest_of
from infinilora.runtime.heat import COLD, added, cold_below, rates, score_of
from infinilora.runtime.memory import MemoryStore

A, B = digest_of(b"a"), digest_of(b"b")


@pytest.mark.parametrize("now", [600.0, 3e8])
@pytest.mark.parametrize("half_life_s", [10, 60])
def test_a_steady_stream_shows_its_rate(half_life_s: int, now: float) -> None:
    """A decade after the landmark as on its first day."""
    scores = [score_of(5, now - 599.5 + second, half_life_s) for second in range(600)]
    found = rates([(A, reduce(added, scores))], now, half_life_s)
    assert found[A] == pytest.approx(5, rel=2e-3)


def test_the_order_of_additions_does_not_matter_nor_how_far_apart_they_are() -> None:
    scores = [score_of(count, came_at, 10) for count, came_at in ((1, 0.0), (3, 9e9), (2, 5.0), (7, 9e9 + 20))]
    exact = 7 + 3 * 2**-2
    for order in (scores, scores[::-1]):
        found = rates([(A, reduce(added, order))], 9e9 + 20, 10)
        assert found[A] == pytest.approx(exact * math.log(2) / 10, rel=1e-6)


def test_heat_of_a_clock_that_was_set_back_is_not_believed() -> None:
    """By a day: as numbers such rates would be beyond any float's range."""
    scores = [(A, score_of(1, 86_400.0, 10)), (B, score_of(1, 0.0, 10))]
    assert set(rates(scores, 0.0, 10)) == {B}


async def test_what_was_counted_on_a_clock_that_was_set_back_is_counted_anew() -> None:
    now = 1e6
    store = MemoryStore(clock=lambda: now)
    await store.add_heat({"heat": 10.0}, {A: 1000, B: 1})
    now = 0.0
    assert await store.heat({"heat": 10.0}, 10) == [{}]
    await store.add_heat({"heat": 10.0}, {A: 3})
    (found,) = await store.heat({"heat": 10.0}, 10)
    assert found == {A: pytest.approx(3 * math.log(2) / 10)}


def test_what_has_decayed_to_less_than_a_thousandth_is_cold() -> None:
    score = score_of(1, 100.0, 10)
    just_before, just_after = (100 + 10 * math.log2(1 / COLD) + late for late in (-0.01, 0.01))
    assert score >= cold_below(just_before, 10)
    assert score < cold_below(just_after, 10)
    assert set(rates([(A, score_of(2, 100.0, 10)), (B, score)], just_after, 10)) == {A}
