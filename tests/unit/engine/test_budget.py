"""The rows of a step follow the time that decoding sequences have to spare."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.engine.sched.budget import BudgetLimits, StepCost, step_budget

LIMITS = BudgetLimits(max_tokens=512, min_tokens=16, tpot_s=0.1)


def known(*steps: tuple[int, float]) -> StepCost:
    cost = StepCost()
    for rows, seconds in steps:
        cost = cost.after(rows, seconds)
    return cost


def line(fixed_s: float, row_s: float) -> StepCost:
    """Steps of many sizes that took fixed_s + rows * row_s."""
    return known(*((rows, fixed_s + rows * row_s) for rows in (1, 8, 64, 256) * 10))


@pytest.mark.parametrize(
    ("fixed_s", "row_s", "decoding", "missing", "wanted"),
    [
        (0.010, 0.001, 0, 2000, 512),  # nobody decodes: nobody to protect
        (0.010, 0.001, 10, 5000, 90),  # load: all of 0.1 s: 10 + (0.1 - 0.02) / 0.001
        (0.010, 0.001, 10, 0, 40),  # idle: half of it: 10 + (0.05 - 0.02) / 0.001
        (0.010, 0.001, 10, 256, 65),  # between: three quarters
        (0.010, 0.001, 80, 5000, 96),  # little slack: no less than min_tokens for those who begin
        (0.200, 0.001, 10, 5000, 26),  # the target cannot be kept: the same
        (0.001, 0.0001, 10, 5000, 512),  # a fast device: as large as may be
        (0.001, 0.0001, 10, 0, 490),
        (0.010, 0.001, 500, 5000, 512),  # more rows than a step has
    ],
)
def test_a_step_is_large_under_load_and_small_when_idle(
    fixed_s: float, row_s: float, decoding: int, missing: int, wanted: int
) -> None:
    found = step_budget(LIMITS, line(fixed_s, row_s), decoding=decoding, missing=missing)
    assert found == pytest.approx(wanted, abs=1)


def test_without_a_target_or_a_measured_step_it_is_as_large_as_may_be() -> None:
    no_target = BudgetLimits(max_tokens=512, min_tokens=16)
    assert step_budget(no_target, line(0.01, 0.001), decoding=9, missing=9) == 512
    assert step_budget(LIMITS, StepCost(), decoding=9, missing=9) == 512


def test_cost_is_the_line_through_what_was_measured() -> None:
    cost = line(0.02, 0.003)
    assert cost.row_s == pytest.approx(0.003)
    assert cost.of(0) == pytest.approx(0.02)
    assert cost.of(1000) == pytest.approx(3.02)


def test_steps_of_one_size_say_the_average_of_a_row() -> None:
    cost = known(*[(32, 0.08)] * 20)
    assert cost.row_s == pytest.approx(0.0025)
    assert cost.of(32) == pytest.approx(0.08)


def test_larger_steps_that_were_faster_by_chance_give_no_leave_to_take_all_there_is() -> None:
    """Of a few rows each, as while a few sequences decode: 512 more would be a pause that all of them see."""
    cost = known((10, 0.05), (12, 0.04))
    assert cost.row_s == pytest.approx((0.97 * 0.05 + 0.04) / (0.97 * 10 + 12))
    assert step_budget(LIMITS, cost, decoding=9, missing=900) < 9 + 30


def test_old_steps_are_forgotten() -> None:
    cost = line(0.5, 0.01)
    for rows in (8, 64) * 150:
        cost = cost.after(rows, 0.01 + rows * 0.001)
    assert cost.row_s == pytest.approx(0.001, rel=0.02)
    assert cost.of(0) == pytest.approx(0.01, rel=0.1)


@given(
    steps=st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 10)), max_size=30),
    decoding=st.integers(0, 600),
    missing=st.integers(0, 10**6),
    tpot_s=st.floats(0, 5),
)
def test_whatever_was_measured_the_budget_keeps_its_limits_and_grows_with_the_load(
    steps: list[tuple[int, float]], decoding: int, missing: int, tpot_s: float
) -> None:
    limits, cost = BudgetLimits(512, 16, tpot_s), known(*steps)
    found = step_budget(limits, cost, decoding=decoding, missing=missing)
    assert min(decoding + 16, 512) <= found <= 512
    assert found <= step_budget(limits, cost, decoding=decoding, missing=missing + 100)
