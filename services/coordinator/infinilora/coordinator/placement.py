"""Which group holds which adapter. Pure: (groups, adapters, current) -> plan, the same for the same arguments.

What is there stays; what lacks a copy gets one, most worth per byte first, pinned before all; then the plan is made
cheaper (search.py) as long as a change pays for itself (costs.py). One base at a time: bases share no group.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from operator import attrgetter
from typing import Literal, NamedTuple

from infinilora.coordinator.costs import Costs
from infinilora.coordinator.draft import Adapter, Draft, Group
from infinilora.coordinator.search import improve
from infinilora.protocol.ids import Digest

__all__ = [
    "Adapter",
    "Group",
    "Home",
    "Plan",
    "Reason",
    "Table",
    "by_adapter",
    "by_group",
    "copies_of",
    "place",
    "reason_of",
]

TRIES = 20_000
"""Steps that are tried at most to make one plan better: about a second's work."""

Table = dict[str, tuple[Digest, ...]]
"""Group -> digests, sorted."""

Reason = Literal["kept", "placed", "copied", "thinned", "moved", "no room", "outsize", "no group"]
"""Why an adapter is where it is, against the plan before: as it was; new; on more groups; on fewer; on others; or
nowhere, as what is there is worth more, as no group's planned bytes are enough for it, as there is no group."""


class Home(NamedTuple):
    """Where one adapter is to be: the groups that have it already first, then the less busy first."""

    groups: tuple[str, ...]
    reason: Reason


Plan = dict[Digest, Home]
"""Every adapter that was given, by digest."""


def place(
    groups: Iterable[Group],
    adapters: Iterable[Adapter],
    current: Mapping[str, Iterable[Digest]],
    *,
    fill: float,
    costs: Costs | None = None,
) -> Plan:
    """A plan that uses at most `fill` of each group's bytes. Draining and dead groups get nothing.

    Raises ValueError for a group whose speed is not above 0.
    """
    ready = sorted((group for group in groups if group.state == "ready"), key=lambda group: group.id)
    for group in ready:
        if not group.speed > 0:
            raise ValueError(f"group {group.id}: found speed {group.speed}; wanted one above 0")
    ranked = sorted(adapters, key=attrgetter("digest"))
    homes = _homes(ready, ranked, current)
    draft = Draft(ready, ranked, homes, costs or Costs(), fill=fill)
    _settle(draft)
    improve(draft, TRIES)
    if draft.homeless_pins:
        fresh = Draft(ready, ranked, homes, draft.costs, fill=fill)
        improve(fresh, TRIES)  # pins first, into empty groups, largest first
        draft = min(draft, fresh, key=lambda d: (d.homeless_pins, d.cost))
    kept = [Home((group.id,), "kept") for group in ready]  # shared: most adapters are where they were, once
    homes_now = zip(ranked, draft.where, strict=True)
    return {
        adapter.digest: kept[now[0]] if len(now) == 1 and homes.get(a) == now else _home(draft, ready, a)
        for a, (adapter, now) in enumerate(homes_now)
    }


def by_group(plan: Plan, groups: Iterable[Group]) -> Table:
    """The plan as engines read it. Groups that may hold something are in it, though they hold nothing."""
    table: dict[str, list[Digest]] = {group.id: [] for group in groups if group.state == "ready"}
    for digest, home in plan.items():
        for group in home.groups:
            table[group].append(digest)
    return {group: tuple(sorted(held)) for group, held in sorted(table.items())}


def by_adapter(table: Mapping[str, Iterable[Digest]]) -> dict[Digest, tuple[str, ...]]:
    """Digest -> the groups that a table has it on, sorted."""
    found: dict[Digest, list[str]] = defaultdict(list)
    for group, held in sorted(table.items()):
        for digest in held:
            found[digest].append(group)
    return {digest: tuple(groups) for digest, groups in found.items()}


def copies_of(table: Mapping[str, Iterable[Digest]]) -> dict[Digest, int]:
    """On how many groups each adapter is."""
    found: dict[Digest, int] = defaultdict(int)
    for held in table.values():
        for digest in held:
            found[digest] += 1
    return dict(found)


def _homes(
    groups: Sequence[Group], adapters: Sequence[Adapter], current: Mapping[str, Iterable[Digest]]
) -> dict[int, tuple[int, ...]]:
    """Adapter -> the groups that have it now and may keep it, as numbers."""
    number = {adapter.digest: a for a, adapter in enumerate(adapters)}
    found: dict[int, list[int]] = defaultdict(list)
    for g, group in enumerate(groups):
        for digest in set(current.get(group.id, ())):
            a = number.get(digest)
            if a is not None:
                found[a].append(g)
    return {a: tuple(held) for a, held in sorted(found.items())}


def _settle(draft: Draft) -> None:
    """Put everything where it is, most worth first: a shrunken group may not hold all.

    Of too many copies those in the busiest groups go.
    """
    homes, copies = draft.homes, draft.copies
    order = sorted(homes, key=lambda a: -draft.worth(a, 1))  # stable: of equal worth by number
    order.sort(key=lambda a: len(homes[a]) > copies[a])
    for a in order:
        held = homes[a]
        if len(held) == 1:
            if draft.num_bytes[a] <= draft.free[held[0]]:
                draft.lay(a, held[0])
            continue
        for group in sorted(held, key=lambda g: (draft.busyness(g), g)):
            if len(draft.where[a]) < copies[a] and draft.can_hold(group, a):
                draft.put(a, group)
    draft.crowd()


def _home(draft: Draft, groups: Sequence[Group], a: int) -> Home:
    before, now = draft.homes.get(a, ()), draft.where[a]
    if not now:
        fits = draft.num_bytes[a] <= draft.largest
        return Home((), "no room" if fits else "outsize" if groups else "no group")
    ordered = sorted(now, key=lambda g: (g not in before, draft.busyness(g), g))
    return Home(tuple(groups[g].id for g in ordered), reason_of(set(before), set(now)))


def reason_of(before: Set[object], now: Set[object]) -> Reason:
    """Why an adapter that is on the groups `now` is there, if it was on those `before`."""
    if before == now:
        return "kept"
    if not before:
        return "placed"
    if before < now:
        return "copied"
    return "thinned" if now < before else "moved"
