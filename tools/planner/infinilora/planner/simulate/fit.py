"""Costs fitted to what was measured: least squares of relative errors, no number below 0. Pure: no clock, no system.

a step          as costs.py has it
a first token   the way to the engine and back, and a step
with adapters   what that takes more: fixed + rows x row + bytes x byte; of a first token, the lease
a join          what a first token takes more while others decode, without adapters and with
a cold adapter  latency + bytes x byte
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from infinilora.planner.constants import Constant
from infinilora.planner.simulate.costs import BaseCost, DeltaCost
from infinilora.protocol.errors import InvalidRequest

LEAST_STEP_S = 1e-6
LEAST_BYTE_S = 1e-12
"""Of a load whose bytes could not be told from its latency."""


class Seen(NamedTuple):
    """A step that was measured; with `is_first`, a first token: from its request to what came of its one step."""

    seconds: float
    rows: int
    tokens: int
    context: int
    is_first: bool = False
    read_bytes: float = 0.0
    """Of adapters."""
    asks_lease: bool = False
    """Nobody held its adapter's: the first token waited for it."""

    @property
    def is_joined(self) -> bool:
        """Others decoded in the step of this first token."""
        return self.is_first and self.tokens > 1


def least_squares(
    rows: Sequence[Sequence[float]], wanted: Sequence[float], offset: Sequence[float] = ()
) -> tuple[float, ...]:
    """Numbers x >= 0 that bring offset + rows . x nearest to `wanted` (above 0), by relative error.

    Of few columns: each choice of those that may be above 0 is tried, and the best that needs no negative one is it.
    """
    there = np.asarray(wanted, dtype=float)
    table, goal = np.asarray(rows, dtype=float) / there[:, None], np.ones(len(there))
    if offset:
        goal -= np.asarray(offset) / there
    width = table.shape[1]
    best, least = np.zeros(width), float(goal @ goal)
    for count in range(1, width + 1):
        for chosen in map(list, combinations(range(width), count)):
            numbers = np.zeros(width)
            numbers[chosen] = np.linalg.lstsq(table[:, chosen], goal, rcond=None)[0]
            error = table @ numbers - goal
            if (numbers >= 0).all() and float(error @ error) < least:
                best, least = numbers, float(error @ error)
    return tuple(map(float, best))


class Base(NamedTuple):
    """A base step, and the way to the engine and back."""

    cost: BaseCost
    gateway_s: Constant

    def seconds(self, seen: Seen) -> float:
        """What this point takes without adapters."""
        step_s = self.cost.step_s(seen.rows, seen.tokens, seen.context, is_joined=seen.is_joined)
        return step_s + self.gateway_s.value * seen.is_first


def fit_base(points: Sequence[Seen], source: str) -> Base:
    """Which points are on the floor is tried out: of those with the fewest rows none, one, two, ..."""
    ordered = sorted(points, key=lambda seen: seen.rows)
    if len({seen.rows for seen in ordered}) < 2:
        raise InvalidRequest(f"found {len(ordered)} steps of one size; wanted steps of two sizes at least")
    tries = [_base(ordered, num_on_floor, source) for num_on_floor in range(len(ordered) - 1)]
    return min(tries, key=lambda base: squares(_off(base, ordered)))


def _base(ordered: Sequence[Seen], num_on_floor: int, source: str) -> Base:
    rows = [_base_row(seen, on_floor=place < num_on_floor) for place, seen in enumerate(ordered)]
    numbers = least_squares(rows, [seen.seconds for seen in ordered])
    base = _named(numbers, source)
    return _named(numbers, f"{source}: {told(_off(base, ordered))}")


def _base_row(seen: Seen, *, on_floor: bool) -> tuple[float, ...]:
    line = (0.0, 0.0) if on_floor else (1.0, seen.rows)
    return *line, seen.tokens, seen.context, float(on_floor), float(seen.is_joined), float(seen.is_first)


def _named(numbers: Sequence[float], source: str) -> Base:
    fixed_s, *others = numbers
    *cost, gateway_s = (Constant(number, source) for number in (max(fixed_s, LEAST_STEP_S), *others))
    return Base(BaseCost(*cost), gateway_s)


def _off(base: Base, points: Sequence[Seen]) -> list[float]:
    return [base.seconds(seen) / seen.seconds - 1 for seen in points]


def fit_deltas(points: Sequence[Seen], base: Base, source: str, *, has_lease: bool) -> tuple[DeltaCost, Constant]:
    """What steps with adapters take more than the base's, and asking for a lease, where that takes a call."""
    offset, wanted = [base.seconds(seen) for seen in points], [seen.seconds for seen in points]
    rows = [(1.0, s.rows, s.read_bytes, float(s.is_joined), float(s.asks_lease and has_lease)) for s in points]
    numbers = least_squares(rows, wanted, offset)
    predicted = [here + _dot(row, numbers) for here, row in zip(offset, rows, strict=True)]
    off = [there / seconds - 1 for there, seconds in zip(predicted, wanted, strict=True)]
    *cost, lease_s = (Constant(number, f"{source}: {told(off)}") for number in numbers)
    return DeltaCost(*cost), lease_s


def fit_load(points: Sequence[tuple[float, float]], source: str) -> tuple[Constant, Constant]:
    """Latency, and bytes a second from the store. A point: the bytes of an adapter, and the seconds until it ran."""
    rows, wanted = [(1.0, num_bytes) for num_bytes, _ in points], [seconds for _, seconds in points]
    latency_s, byte_s = least_squares(rows, wanted)
    off = [_dot(row, (latency_s, byte_s)) / seconds - 1 for row, seconds in zip(rows, wanted, strict=True)]
    words = f"{source}: {told(off)}"
    return Constant(latency_s, words), Constant(1 / max(byte_s, LEAST_BYTE_S), words)


def _dot(row: Sequence[float], numbers: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(row, numbers, strict=True))


def squares(off: Sequence[float]) -> float:
    return sum(one * one for one in off)


def told(off: Sequence[float]) -> str:
    """How good a fit is, in words."""
    sizes = sorted(map(abs, off))
    return f"{len(sizes)} points, off by {sizes[len(sizes) // 2]:.1%} in the middle, {sizes[-1]:.1%} at most"
