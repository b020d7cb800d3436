"""What heat says, by table."""

import math

import pytest

from infinilora.coordinator.heat import Drift, copies, drift, hot_spots, top
from infinilora.protocol.ids import digest_of

A, B, C = sorted(digest_of(name.encode()) for name in "abc")


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


@pytest.mark.parametrize(("count", "wanted"), [(0, []), (2, [C, A]), (9, [C, A, B])])
def test_the_hottest_come_first_and_the_equal_by_digest(count: int, wanted: list[str]) -> None:
    assert top({B: 1.0, A: 1.0, C: 2.0}, count) == wanted


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
