"""Whether the rows of a step go in two halves that take turns, and where they are cut. Pure; durations are arguments.

A step in halves hides the wait for deltas behind the other half, and reads every weight twice. So it is tried where
waiting is a large part of a step, and kept up only where steps became shorter:

    WHOLE --(exposed wait >= 20 %)--> TRYING --(shorter)--> HALVES --(after a while: measured anew)--> WHOLE
      ^                                  |
      +-------(not: for twice as long)---+

Steps of other sizes are other cases: what is known is kept for each power of two of rows.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import Literal

Mode = Literal["off", "auto", "on"]

EXPOSED_SHARE = 0.2
"""Of a whole step that is spent waiting, before halves are tried."""
GAIN = 0.97
"""Halves are kept up where a step takes at most so much of a whole one."""
TRIAL_STEPS = 16
KEPT_STEPS = 2048
FIRST_PAUSE, LAST_PAUSE = 512, 32768
"""Steps until halves that did not pay are tried again: twice as many after each time."""
_NEW = 0.125
"""Weight of the newest step in a running mean."""


class Way(Enum):
    """How steps of a size are run."""

    WHOLE = "whole"
    TRYING = "trying"
    HALVES = "halves"


@dataclass(frozen=True, slots=True)
class Habit:
    """What is known of steps of one size. Running means in seconds, 0 where nothing is known; `left` steps to go."""

    way: Way = Way.WHOLE
    left: int = TRIAL_STEPS
    pause: int = FIRST_PAUSE
    whole_s: float = 0.0
    waited_s: float = 0.0
    halves_s: float = 0.0


def after(habit: Habit, seconds: float, waited_s: float) -> Habit:
    """After one more step, run as the habit says, that took `seconds` and had to wait for `waited_s` of them."""
    left = max(habit.left - 1, 0)
    match habit.way:
        case Way.WHOLE:
            whole_s, waited = _mean(habit.whole_s, seconds), _mean(habit.waited_s, waited_s)
            if left == 0 and waited >= EXPOSED_SHARE * whole_s:
                return replace(habit, way=Way.TRYING, left=TRIAL_STEPS, whole_s=whole_s, waited_s=waited, halves_s=0.0)
            return replace(habit, left=left, whole_s=whole_s, waited_s=waited)
        case Way.TRYING:
            halves_s = _mean(habit.halves_s, seconds)
            if left:
                return replace(habit, left=left, halves_s=halves_s)
            if halves_s <= GAIN * habit.whole_s:
                return replace(habit, way=Way.HALVES, left=KEPT_STEPS, pause=FIRST_PAUSE, halves_s=halves_s)
            return Habit(left=habit.pause, pause=min(2 * habit.pause, LAST_PAUSE))
        case Way.HALVES:
            return replace(habit, left=left) if left else Habit()


def cut_of(query_lens: Sequence[int]) -> int:
    """Sequences of the first half, such that its rows are as near to half of all as can be; 0: it cannot be cut."""
    if len(query_lens) < 2:
        return 0
    ends = list(accumulate(query_lens))
    near = min(max(bisect_left(ends, ends[-1] / 2), 1), len(ends) - 1)
    return min((near, near + 1), key=lambda n: abs(2 * ends[n - 1] - ends[-1])) if near + 1 < len(ends) else near


class PingPong:
    """The habits of one engine."""

    def __init__(self, mode: Mode = "off") -> None:
        self._mode = mode
        self._habits: dict[int, Habit] = {}

    def cut(self, query_lens: Sequence[int]) -> int:
        """For the next step with adapters: the sequences of its first half; 0: it is run whole."""
        if self._mode == "off" or (self._mode == "auto" and self._habit(query_lens).way is Way.WHOLE):
            return 0
        return cut_of(query_lens)

    def observe(self, query_lens: Sequence[int], seconds: float, waited_s: float) -> None:
        """That step took so long, and waited so long of it. Not of steps that lost rows."""
        if self._mode == "auto" and len(query_lens) > 1:
            self._habits[_size(query_lens)] = after(self._habit(query_lens), seconds, waited_s)

    def _habit(self, query_lens: Sequence[int]) -> Habit:
        return self._habits.get(_size(query_lens), Habit())


def _size(query_lens: Sequence[int]) -> int:
    return sum(query_lens).bit_length()


def _mean(known: float, new: float) -> float:
    return known + _NEW * (new - known) if known else new
