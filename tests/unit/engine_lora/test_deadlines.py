import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.engine.lora.deadlines import WINDOW, RunningP99, SiteClock, site_deadline_s


@pytest.mark.parametrize(
    ("p99_s", "deadline_s"), [(None, 1.0), (0.0, 0.25), (0.0125, 0.25), (0.02, 0.4), (0.05, 1.0), (3.0, 1.0)]
)
def test_a_deadline_is_twenty_times_the_p99_within_bounds(p99_s: float | None, deadline_s: float) -> None:
    assert site_deadline_s(p99_s) == pytest.approx(deadline_s)


def test_nothing_is_known_before_enough_values_came() -> None:
    p99 = RunningP99()
    for _ in range(31):
        p99.add(0.01)
    assert p99.value is None
    p99.add(0.01)
    assert p99.value == 0.01


def test_old_values_are_forgotten() -> None:
    p99 = RunningP99()
    for value in [9.0] * WINDOW + [1.0] * WINDOW:
        p99.add(value)
    assert p99.value == 1.0


@given(st.lists(st.floats(0, 10), min_size=WINDOW, max_size=WINDOW), st.integers())
def test_the_order_of_values_does_not_matter(values: list[float], seed: int) -> None:
    found = []
    for order in (values, random.Random(seed).sample(values, len(values))):
        p99 = RunningP99()
        for value in order:
            p99.add(value)
        found.append(p99.value)
    assert found[0] == found[1] == sorted(values)[253]


def test_a_site_learns_what_its_calls_took_when_it_catches_up() -> None:
    clock = SiteClock()
    clock.took_s += [0.02] * 40
    assert clock.deadline_s == 1.0, "nothing is known yet"
    clock.catch_up()
    assert clock.deadline_s == pytest.approx(0.4)
    assert clock.took_s == []
    clock.took_s += [0.001] * WINDOW
    clock.catch_up()
    assert clock.deadline_s == 0.25
