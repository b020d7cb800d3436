"""How many engines, and how many groups, there should be. Pure: time comes in as an argument.

up       at once, to what is wanted: the demand is that of one lead time from now already
down     by one, when fewer were enough at ease for all of a hold: for a demand larger by SLACK, and for what noise may
         make foreseen of the same demand
hold     `hold_s`, and twice as long when what went is wanted again soon
bounds   hold at once, except that what is too much goes one by one, as all that goes is drained first

A demand that wavers around a boundary goes up once, and stays there at ease: it does not flap. One that comes and goes
by itself is learnt.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np

from infinilora.coordinator.provision.pools import Demand as Asked
from infinilora.coordinator.provision.pools import pools

SLACK = 1.3
"""Times the demand that what stays must still be enough for."""
LONGEST = 4
"""Times `hold_s` that a hold may become."""
SOON = 2
"""Holds after which nobody says that what went should have stayed."""
ROUNDING = 1e-9


class Wanted(NamedTuple):
    """What a demand needs, and what one larger by SLACK would. `is_idle`: nobody has come for long, so none will do."""

    now: int
    at_ease: int
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one tier of one base. `lead_s`: what a new one takes to be ready, and a rest after each change."""

    least: int
    most: int
    hold_s: float
    lead_s: float


class Decision(NamedTuple):
    """How many there should be, and why, in words for a person."""

    num: int
    reason: str


class Tier:
    """The engines, or the groups, of one base: what was wanted of late, and when their number last changed."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._eased: deque[tuple[float, int]] = deque()
        """When, and what a demand at ease needed: falling, so the first is the most of the last hold."""
        self._since: float | None = None
        self._changed_at = float("-inf")
        self._hold_s = bounds.hold_s
        self._gone_at: float | None = None
        """When one went that nobody has wanted again."""

    def decide(
        self, have: int, wanted: Wanted, now: float, *, by_hand: int | None = None, burns: bool = False
    ) -> Decision:
        """`have`: the count as it was decided before. `burns`: the SLO is missed, and more of these would help."""
        decision = self._decide(have, wanted, now, by_hand, burns=burns)
        if decision.num != have:
            self._changed_at = now
            self._learn(now, went=decision.num < have)
        return decision

    def _learn(self, now: float, *, went: bool) -> None:
        """Whether to hold for longer than before, or need not any more."""
        is_soon = self._gone_at is not None and now - self._gone_at <= SOON * self._hold_s
        if is_soon and not went:
            self._hold_s = min(2 * self._hold_s, LONGEST * self._bounds.hold_s)
        elif self._gone_at is not None and not is_soon:
            self._hold_s = max(self._hold_s / 2, self._bounds.hold_s)
        self._gone_at = now if went else None

    def _decide(self, have: int, wanted: Wanted, now: float, by_hand: int | None, *, burns: bool) -> Decision:
        bounds = self._bounds
        self._note(wanted, now)
        if by_hand is not None:
            return Decision(by_hand if by_hand > have else max(by_hand, have - 1), "by hand")
        if have > bounds.most:
            return Decision(have - 1, f"at most {bounds.most}")
        if wanted.is_idle and bounds.least == 0:
            return Decision(max(0, have - 1), "idle")
        if have < bounds.least:
            return Decision(bounds.least, f"at least {bounds.least}")
        up = min(wanted.now, bounds.most)
        if up > have:
            return Decision(up, "demand ahead")
        has_rested = now - self._changed_at >= bounds.lead_s
        if burns and have < bounds.most and has_rested:
            return Decision(have + 1, "SLO missed")
        is_long = self._since is not None and now - self._since >= self._hold_s
        if is_long and has_rested and not burns and have > bounds.least and self._eased[0][1] < have:
            return Decision(have - 1, "more than enough for long")
        return Decision(have, "enough")

    def _note(self, wanted: Wanted, now: float) -> None:
        self._since = now if self._since is None else self._since
        while self._eased and self._eased[-1][1] <= wanted.at_ease:
            self._eased.pop()
        self._eased.append((now, wanted.at_ease))
        while self._eased[0][0] < now - self._hold_s:
            self._eased.popleft()


def for_load(in_flight: float, each: float, *, by_noise: float = 0.0, is_idle: bool = False) -> Wanted:
    """Instances for so many sequences at once, of which one serves `each`: at least one, unless it is idle.

    `by_noise`: as many may be foreseen, now and then, of the same load.
    """
    least = 0 if is_idle else 1
    needs = (ceil(most / each - ROUNDING) for most in (in_flight, max(SLACK * in_flight, by_noise)))
    now, at_ease = (max(least, count) for count in needs)
    return Wanted(now, at_ease, is_idle)


def for_bytes(asked: Asked, group_bytes: float, *, iar: float, margin: float, most: int) -> Wanted:
    """Groups whose pools of `group_bytes` keep the IAR, with a margin over their bytes; at most `most`."""
    eased = Asked(asked.rates * SLACK, asked.num_bytes, asked.residence_s)
    now, at_ease = (_groups(one, group_bytes, iar=iar, margin=margin, most=most) for one in (asked, eased))
    return Wanted(now, at_ease)


def _groups(asked: Asked, group_bytes: float, *, iar: float, margin: float, most: int) -> int:
    """Several pools need more than one of the same bytes: the fewest that fit are looked for from there upwards."""
    if not asked.num_bytes.size or asked.residence_s <= 0 or not float(np.sum(asked.rates)) > 0:
        return 0
    for count in range(1, most):
        found = pools(asked, count)
        needed = found.with_margin(found.least(iar), margin) * found.unit_bytes
        if needed <= group_bytes:
            return count
        if count == 1 and needed > group_bytes * most:
            break
    return most


def most_of(*wanted: Wanted) -> Wanted:
    """What is enough for each of several reasons."""
    return Wanted(
        max(one.now for one in wanted), max(one.at_ease for one in wanted), any(one.is_idle for one in wanted)
    )
