"""How the plan of a small fleet is searched from many beginnings, where bytes are too few for single steps. Pure.

    without     a copy gives its room to others, and looks for room last
    afresh      two groups, or all, are emptied and filled in another order, or with a certain copy first
    trade       two groups change one or two copies for one or two

Each is kept only if the plan's cost falls by it.
"""

from itertools import combinations, product

from infinilora.coordinator.draft import Budget, Draft
from infinilora.coordinator.fill import fill, lacking, refill


def repack(draft: Draft, budget: Budget) -> bool:
    """Try each copy's room for others, groups emptied and filled again, trades. Whether anything changed."""
    unasked = [(a, group) for group, ranked in enumerate(draft.by_worth) for worth, a in ranked if not worth]
    for a, group in unasked:  # they stand in the way, and cost nothing elsewhere
        draft.drop(a, group)
    changed = _steps(draft, budget)
    for a, group in unasked:
        if draft.can_hold(group, a):
            draft.put(a, group)
    return changed


def _steps(draft: Draft, budget: Budget) -> bool:
    changed = False
    held = [(a, group) for group, ranked in enumerate(draft.by_worth) for _, a in ranked]
    for a, group in held:
        if group in draft.where[a] and budget.spend():
            changed |= _without(draft, a, group)
    everywhere = tuple(range(len(draft.free)))
    pairs = product(combinations(everywhere, 2), (None,), ("worth", "size", "load"))
    firsts = product((everywhere,), product(range(len(draft.adapters)), everywhere), ("worth",))
    left_out = [a for a, where in enumerate(draft.where) if not where and draft.rps[a]]
    sizes = product((everywhere,), product(left_out, everywhere), ("size",))
    for (groups, first, order), tight in product([*pairs, *firsts, *sizes], (False, True)):
        if budget.spend(len(draft.adapters)):
            changed |= _afresh(draft, groups, first, order, tight=tight)
    return changed | _trade(draft, budget)


def _without(draft: Draft, a: int, group: int) -> bool:
    mark = draft.mark()
    draft.drop(a, group)
    refill(draft, (other for other in range(len(draft.adapters)) if other != a))
    refill(draft, [a])
    return draft.keep(mark)


def _afresh(draft: Draft, groups: tuple[int, ...], first: tuple[int, int] | None, order: str, *, tight: bool) -> bool:
    """`first`: an adapter and the group that it gets before all others; `tight`: where the least room would be left."""
    mark, where = draft.mark(), list(draft.where)
    for group in groups:
        for _, a in list(draft.by_worth[group]):
            draft.drop(a, group)
    if first and draft.can_hold(first[1], first[0]):
        draft.put(*first)
    wanted = lacking(draft)
    if order != "worth":
        most = draft.num_bytes if order == "size" else draft.rps
        wanted.sort(
            key=lambda a: (
                not draft.adapters[a].is_pinned,
                draft.rps[a] == 0,
                bool(first) and not where[a],
                -most[a],
                a,
            )
        )
    if tight:
        _pack(draft, wanted)
    else:
        fill(draft, wanted)
    return draft.keep(mark)


def _pack(draft: Draft, wanted: list[int]) -> None:
    for a in wanted:
        room = [group for group in range(len(draft.free)) if draft.can_hold(group, a)]
        if room:
            draft.put(a, min(room, key=lambda group: (draft.free[group], group)))


def _trade(draft: Draft, budget: Budget) -> bool:
    """Let two groups change one or two copies for one or two. Whether anything changed."""
    changed = False
    for one, other in combinations(range(len(draft.free)), 2):
        for give, take in product(_handfuls(draft, one), _handfuls(draft, other)):
            more = sum(draft.num_bytes[a] for a in take) - sum(draft.num_bytes[a] for a in give)
            if -draft.free[other] <= more <= draft.free[one] and budget.spend():
                changed |= _change_places(draft, one, other, give, take)
    return changed


def _handfuls(draft: Draft, group: int) -> list[tuple[int, ...]]:
    asked = [a for _, a in draft.by_worth[group] if draft.rps[a]]
    return [*combinations(asked, 1), *combinations(asked, 2)]


def _change_places(draft: Draft, one: int, other: int, give: tuple[int, ...], take: tuple[int, ...]) -> bool:
    """Whether it pays. What has been traded away meanwhile is not there to trade."""
    if not all(one in draft.where[a] for a in give) or not all(other in draft.where[a] for a in take):
        return False
    mark = draft.mark()
    for a in give:
        draft.drop(a, one)
    for a in take:
        draft.drop(a, other)
    for a, group in [*((a, other) for a in give), *((a, one) for a in take)]:
        if not draft.can_hold(group, a):
            draft.undo(mark)
            return False
        draft.put(a, group)
    return draft.keep(mark)
