"""How a draft is made better: fill what is free, exchange the cold for the hot, even out the load. Pure.

    fill        most worth per byte first, into the least occupied group that has room
    exchange    what found no room takes that of copies worth less together; they look for room again
    balance     a copy moves, or two change places, from the busiest group to the idlest
    repack      small fleets only: whole groups are laid anew (repack.py)

After `fill` each step is kept only if the plan's cost falls by it, so the search ends; it also ends after so many
`tries`, which count, and no clock: the same draft is always made the same plan.
"""

from collections.abc import Iterator
from heapq import nsmallest
from math import inf

from infinilora.coordinator.costs import touch
from infinilora.coordinator.draft import Budget, Draft
from infinilora.coordinator.fill import fill, lacking, refill
from infinilora.coordinator.repack import repack

NEAREST = 8
"""Groups, and copies of a group, that are tried before a step is given up."""
SMALL = 128
"""Adapters times groups: a fleet of no more is searched from many beginnings. Also copies of one group."""
FAILED = 64
"""Adapters in a row that get no room by exchange: the rest are worth less, and are not tried."""
ROUNDS = 8


def improve(draft: Draft, tries: int) -> None:
    """Fill the draft and make it cheaper until no step helps, or `tries` are spent."""
    budget = Budget(tries)
    fill(draft, lacking(draft))
    for _ in range(ROUNDS):
        is_better = exchange(draft, budget)
        is_better |= balance(draft, budget)
        if len(draft.adapters) * len(draft.free) <= SMALL:
            is_better |= repack(draft, budget)
        if not is_better or budget.left <= 0:
            return
        fill(draft, lacking(draft))


def exchange(draft: Draft, budget: Budget) -> bool:
    """Let each adapter that is worth something take the room of what is worth less. Whether anything changed."""
    changed, failed, coldest, roomiest = False, 0, *_extremes(draft)
    for a in lacking(draft):
        worth, size = draft.worth(a, len(draft.where[a]) + 1), draft.num_bytes[a]
        if worth <= 0 or budget.left <= 0 or failed > FAILED:
            break
        if len(draft.where[a]) == draft.copies[a] or worth * size <= coldest * (size - roomiest):
            continue
        if any(_push_in(draft, a, group, budget) for group in _cheapest(draft, a)):
            changed, failed, coldest, roomiest = True, 0, *_extremes(draft)
        else:
            failed += 1
    return changed


def _extremes(draft: Draft) -> tuple[float, int]:
    """What the least worthy byte anywhere is worth, and the most bytes that are free in one group."""
    return min((held[0][0] for held in draft.by_worth if held), default=inf), max(draft.free, default=0)


def _cheapest(draft: Draft, a: int) -> list[int]:
    """Groups where room might cost less than the copy is worth, the least costly and crowded first."""
    gain, size, found = draft.worth(a, len(draft.where[a]) + 1) * draft.num_bytes[a], draft.num_bytes[a], []
    waiting = 2 * draft.costs.wait_s * draft.rps[a] / draft.copies[a]
    for group, held in enumerate(draft.by_worth):
        if held and size <= draft.capacity[group]:
            price = held[0][0] * (size - draft.free[group])
            if price < gain:
                found.append((price + waiting * draft.busyness(group), group))
    return [group for _, group in nsmallest(NEAREST, found)]


def _push_in(draft: Draft, a: int, group: int, budget: Budget) -> bool:
    """Whether adapter a now has a copy in this group, and the plan is the better for it."""
    return draft.may_hold(group, a) and any(
        budget.spend() and _replace(draft, a, group, out) for out in _ways_out(draft, a, group)
    )


def _ways_out(draft: Draft, a: int, group: int) -> Iterator[list[int]]:
    """What might leave: the coldest until there is room; of small groups also each single one that makes room."""
    needed, gain = draft.num_bytes[a] - draft.free[group], draft.worth(a, len(draft.where[a]) + 1) * draft.num_bytes[a]
    out, lost, room = [], 0.0, 0
    for worth, other in draft.by_worth[group]:
        if room >= needed or worth == inf or lost >= gain:
            break
        out.append(other)
        room += draft.num_bytes[other]
        lost += worth * draft.num_bytes[other]
    if room >= needed:
        yield out
    if len(draft.by_worth[group]) <= SMALL:
        yield from (
            [other] for worth, other in draft.by_worth[group][1:] if worth < inf and draft.num_bytes[other] >= needed
        )


def _replace(draft: Draft, a: int, group: int, out: list[int]) -> bool:
    mark = draft.mark()
    for other in out:
        draft.drop(other, group)
    draft.put(a, group)
    refill(draft, out)
    return draft.keep(mark)


def balance(draft: Draft, budget: Budget) -> bool:
    """Move copies from busy groups to idle ones for as long as it pays. Whether anything changed."""
    changed, settled = False, set[int]()
    while budget.left > 0:
        open_groups = [group for group in range(len(draft.free)) if group not in settled]
        if not open_groups:
            break
        busiest = max(open_groups, key=lambda group: (draft.busyness(group), -group))
        for idle in nsmallest(NEAREST, range(len(draft.free)), key=draft.busyness):
            if _may_pay(draft, busiest, idle) and _relieve(draft, busiest, idle, budget):
                settled -= {busiest, idle}
                changed = True
                break
        else:
            settled.add(busiest)
    return changed


def _may_pay(draft: Draft, busy: int, idle: int) -> bool:
    """Not if both are in one stretch of the broken line that prices crowding."""
    return touch(draft.busyness(idle)) < touch(draft.busyness(busy))


def _relieve(draft: Draft, busy: int, idle: int, budget: Budget) -> bool:
    """Whether one step from `busy` to `idle` was found that pays: a move, or two copies that change places."""
    gap = draft.busyness(busy) - draft.busyness(idle)
    ideal, least = gap / (1 / draft.fair[busy] + 1 / draft.fair[idle]), list[int]()
    for _, a in nsmallest(NEAREST, ((abs(share - ideal), a) for share, a in _shares(draft, busy) if share > 0)):
        if draft.can_hold(idle, a):
            if budget.spend() and _swap(draft, busy, idle, a, None):
                return True
            continue
        least = least or [other for _, other in nsmallest(NEAREST, _shares(draft, idle))]
        if any(budget.spend() and _swap(draft, busy, idle, a, other) for other in least):
            return True
    return False


def _shares(draft: Draft, group: int) -> list[tuple[float, int]]:
    """The requests/s that each adapter brings to a group."""
    return [(draft.rps[a] / len(draft.where[a]), a) for _, a in draft.by_worth[group]]


def _swap(draft: Draft, busy: int, idle: int, a: int, other: int | None) -> bool:
    mark = draft.mark()
    draft.drop(a, busy)
    if other is not None:
        draft.drop(other, idle)
    if draft.can_hold(idle, a):
        draft.put(a, idle)
        if other is None:
            return draft.keep(mark)
        if draft.can_hold(busy, other):
            draft.put(other, busy)
            return draft.keep(mark)
    draft.undo(mark)
    return False
