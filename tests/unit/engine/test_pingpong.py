"""Steps in halves: tried where waiting is long, kept up where it pays; and where they are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.engine.sched.pingpong import (
    FIRST_PAUSE,
    KEPT_STEPS,
    LAST_PAUSE,
    TRIAL_STEPS,
    Habit,
    PingPong,
    Way,
    after,
    cut_of,
)

DECODE = (1,) * 16
HALF = 8


def steps(habit: Habit, count: int, seconds: float, waited_s: float = 0.0) -> Habit:
    for _ in range(count):
        habit = after(habit, seconds, waited_s)
    return habit


@pytest.mark.parametrize(
    ("waited_s", "halves_s", "way"),
    [
        (0.0, 0.05, Way.WHOLE),  # nothing waits
        (0.019, 0.05, Way.WHOLE),  # less than a fifth
        (0.021, 0.09, Way.HALVES),  # a fifth, and halves are shorter
        (0.06, 0.098, Way.WHOLE),  # hardly shorter
        (0.06, 0.2, Way.WHOLE),  # longer
        (0.06, 0.06, Way.HALVES),
    ],
)
def test_halves_are_kept_up_where_steps_wait_and_become_shorter(waited_s: float, halves_s: float, way: Way) -> None:
    habit = steps(Habit(), TRIAL_STEPS, 0.1, waited_s)
    habit = steps(habit, TRIAL_STEPS, halves_s if habit.way is Way.TRYING else 0.1, waited_s)
    assert habit.way is way


def test_a_first_try_comes_after_as_many_whole_steps() -> None:
    assert steps(Habit(), TRIAL_STEPS - 1, 0.1, 0.05).way is Way.WHOLE
    assert steps(Habit(), TRIAL_STEPS, 0.1, 0.05).way is Way.TRYING


def test_what_did_not_pay_is_tried_again_ever_more_rarely() -> None:
    habit, pauses = Habit(), []
    for _ in range(9):
        habit = steps(habit, habit.left, 0.1, 0.05)
        assert habit.way is Way.TRYING
        habit = steps(habit, TRIAL_STEPS, 0.1)
        assert habit.way is Way.WHOLE
        pauses.append(habit.left)
    assert pauses == [*(FIRST_PAUSE << n for n in range(7)), LAST_PAUSE, LAST_PAUSE]


def test_what_pays_is_measured_anew_after_a_while() -> None:
    habit = steps(Habit(), TRIAL_STEPS, 0.1, 0.05)
    habit = steps(habit, TRIAL_STEPS, 0.08)
    assert habit.way is Way.HALVES
    assert steps(habit, KEPT_STEPS - 1, 0.08).way is Way.HALVES
    assert steps(habit, KEPT_STEPS, 0.08) == Habit()


def test_steps_of_another_size_have_habits_of_their_own() -> None:
    pingpong = PingPong("auto")
    for _ in range(TRIAL_STEPS):
        assert pingpong.cut(DECODE) == 0
        pingpong.observe(DECODE, 0.1, 0.05)
    assert pingpong.cut(DECODE) == HALF
    assert pingpong.cut((1,) * 40) == 0
    assert pingpong.cut((16,)) == 0, "one sequence cannot be cut"


def test_on_and_off_measure_nothing() -> None:
    for mode, wanted in (("on", HALF), ("off", 0)):
        pingpong = PingPong(mode)  # type: ignore[arg-type] # a literal
        for waited_s in (0.0, 0.09):
            for _ in range(100):
                pingpong.observe(DECODE, 0.1, waited_s)
            assert pingpong.cut(DECODE) == wanted


@pytest.mark.parametrize(
    ("lens", "wanted"),
    [
        ((), 0),
        ((5,), 0),
        ((1, 1), 1),
        ((1, 1, 1), 1),
        ((1, 1, 1, 1), 2),
        ((100, 1, 1), 1),
        ((1, 1, 100), 2),
        ((1, 100, 1), 1),
        ((3, 4, 5, 4), 2),
        ((1,) * 9 + (64,), 9),
    ],
)
def test_the_cut_is_between_sequences_where_rows_are_most_even(lens: tuple[int, ...], wanted: int) -> None:
    assert cut_of(lens) == wanted


@given(st.lists(st.integers(1, 300), min_size=2, max_size=40))
def test_no_cut_is_more_even(lens: list[int]) -> None:
    def unevenness(cut: int) -> int:
        return abs(sum(lens[:cut]) - sum(lens[cut:]))

    assert unevenness(cut_of(lens)) == min(unevenness(cut) for cut in range(1, len(lens)))
