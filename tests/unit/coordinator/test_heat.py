"""What heat says, by table."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.coordinator.heat import ENOUGH, Drift, Heat, TopDrift, copies, drift, hot_spots, top_drift
from infinilora.protocol.ids import Digest, digest_of

A, B, C, D = sorted(digest_of(name.encode()) for name in "abcd")


@pytest.mark.parametrize(
    ("rps", "had", "wanted"),
    [
        (0.0, 0, 1),
        (1.9, 0, 1),
        (1.9, 1, 1),
        (2.0, 0, 2),
        (1.0, 2, 2),
        (0.9, 2, 1),
        (7.9, 0, 4),
        (8.0, 4, 5),
        (4.0, 5, 5),
        (3.9, 5, 4),
        (4.0, 9, 5),
        (200.0, 0, 101),
    ],
)
def test_copies_come_with_the_load_and_go_later(rps: float, had: int, wanted: int) -> None:
    assert copies(rps, 2.0, had) == wanted


def test_hot_spots_are_those_with_more_than_one() -> None:
    assert hot_spots({A: 4.1, B: 1.5, C: 1.5}, 2.0, {B: 2, C: 1}) == {A: 3, B: 2}


@pytest.mark.parametrize(
    ("name", "rates", "rps", "doublings", "is_rising"),
    [
        ("nothing is known", {}, 0.0, 0.0, False),
        ("no heat", {60: 0.0, 600: 0.0}, 0.0, 0.0, False),
        ("one half-life has no drift", {60: 3.0}, 3.0, 0.0, False),
        ("steady", {60: 3.0, 600: 3.0}, 3.0, 0.0, False),
        ("twice as hot of late", {60: 2.0, 600: 1.0}, 2.0, 1.0, True),
        ("not quite twice", {60: 1.9, 600: 1.0}, 1.9, math.log2(1.9), False),
        ("cooling", {60: 0.25, 600: 1.0}, 0.25, -2.0, False),
        ("the shortest view counts", {10: 8.0, 60: 2.0, 600: 1.0}, 8.0, 3.0, True),
        ("a single request is no rise", {10: math.log(2) / 10, 600: math.log(2) / 600}, math.log(2) / 600, 0.0, False),
        ("a view on too few requests is passed over", {10: 0.2, 60: 0.1, 600: 0.05}, 0.1, 1.0, True),
        ("out of nothing", {60: 1.0, 600: 0.0}, 1.0, math.inf, True),
    ],
)
def test_drift(name: str, rates: dict[float, float], rps: float, doublings: float, is_rising: bool) -> None:
    found = drift(A, rates)
    assert found == Drift(A, rps, found.doublings, is_rising), name
    assert found.doublings == pytest.approx(doublings), name


@pytest.mark.parametrize(
    ("name", "latest", "lasting", "count", "wanted"),
    [
        ("nothing at all", [], [], 3, TopDrift((), (), {}, 1.0)),
        ("as it was", [A, B], [A, B], 3, TopDrift((), (), {}, 1.0)),
        ("two change places", [B, A], [A, B], 3, TopDrift((), (), {B: 1, A: -1}, 1.0)),
        ("one comes to the top", [C, A], [A, B], 3, TopDrift((C,), (B,), {A: -1}, 1 / 3)),
        ("all others", [C, D], [A, B], 3, TopDrift((C, D), (A, B), {}, 0.0)),
        ("below the top nothing counts", [A, B, C], [A, B, D], 2, TopDrift((), (), {}, 1.0)),
        ("nobody comes now", [], [B, A], 3, TopDrift((), (B, A), {}, 0.0)),
        ("nobody came before", [B], [], 3, TopDrift((B,), (), {}, 0.0)),
        ("from the last place to the first", [C, A, B], [A, B, C], 3, TopDrift((), (), {C: 2, A: -1, B: -1}, 1.0)),
    ],
)
def test_top_drift(name: str, latest: list[Digest], lasting: list[Digest], count: int, wanted: TopDrift) -> None:
    assert top_drift(dict.fromkeys(latest, 1.0), dict.fromkeys(lasting, 1.0), count) == wanted, name


def test_the_views_are_by_half_life_in_whatever_order() -> None:
    heat = Heat({600: {A: 1.0}, 10: {A: 3.0}, 60: {A: 2.0}})
    assert (heat.latest, heat.recent, heat.lasting) == ({A: 3.0}, {A: 2.0}, {A: 1.0})


@pytest.mark.parametrize(("half_lives", "recent"), [((), None), ((60,), 60), ((10, 600), 600)])
def test_few_half_lives_do_too(half_lives: tuple[int, ...], recent: int | None) -> None:
    heat = Heat({half_life_s: {A: float(half_life_s)} for half_life_s in half_lives})
    assert heat.recent == ({A: float(recent)} if recent else {})
    assert heat.to_plan_with() == ({A: float(max(half_lives))} if half_lives else {})


def test_an_adapter_is_planned_with_by_the_long_run_unless_it_rises() -> None:
    enough = ENOUGH * math.log(2) / 10
    heat = Heat(
        {
            10: {A: 9.0, B: 3.0, C: enough * 0.9},
            60: {B: 3.0, A: 2.0, C: 0.01},
            600: {B: 4.0, A: 1.0, D: 0.5, C: 0.002},
        }
    )
    assert heat.rising() == {A: 9.0}
    assert heat.to_plan_with() == {A: 9.0, B: 4.0, C: 0.002, D: 0.5}


def test_what_the_longest_view_has_no_room_for_is_as_hot_as_its_last() -> None:
    heat = Heat({10: {C: 0.07}, 600: {A: 2.0, B: 0.5}})
    assert heat.to_plan_with() == {A: 2.0, B: 0.5, C: 0.5}
    assert heat.asked_for() == {A, B, C}


RATES = st.dictionaries(st.sampled_from([A, B, C, D]), st.floats(0, 1e3))


@given(rps=st.floats(0, 1e4), more=st.floats(0, 1e4), had=st.integers(0, 50), hot_rps=st.floats(0.01, 100))
def test_more_heat_never_means_fewer_copies_and_the_same_heat_never_another_number(
    rps: float, more: float, had: int, hot_rps: float
) -> None:
    wanted = copies(rps, hot_rps, had)
    assert 1 <= wanted <= copies(rps + more, hot_rps, had)
    assert copies(rps, hot_rps, wanted) == wanted


@given(st.dictionaries(st.sampled_from([10, 60, 600]), RATES, max_size=3))
def test_everybody_who_is_asked_for_has_a_rate_to_be_placed_by_and_who_rises_no_lower_than_before(
    views: dict[int, dict[Digest, float]],
) -> None:
    ordered = {h: dict(sorted(rates.items(), key=lambda pair: -pair[1])) for h, rates in views.items()}
    heat = Heat(ordered)
    planned = heat.to_plan_with()
    assert planned.keys() == heat.asked_for()
    for digest, rps in heat.rising().items():
        assert planned[digest] == rps
        assert rps >= 2 * heat.lasting.get(digest, 0.0)
    assert top_drift(heat.lasting, heat.lasting, 100).overlap == 1.0


@given(RATES, RATES)
def test_top_drift_counts_everybody_once(latest: dict[Digest, float], lasting: dict[Digest, float]) -> None:
    now, before = (dict(sorted(view.items(), key=lambda pair: -pair[1])) for view in (latest, lasting))
    found = top_drift(now, before, 3)
    stayed = set(list(now)[:3]) & set(list(before)[:3])
    assert {*found.came, *stayed} == set(list(now)[:3])
    assert {*found.went, *stayed} == set(list(before)[:3])
    assert found.moved.keys() <= stayed
    assert 0.0 <= found.overlap <= 1.0
