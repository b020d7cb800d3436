"""Which group holds which adapter. Pure: (groups, adapters, current) -> plan, the same for the same arguments.

What is there stays; what lacks a copy gets one, most worth per byte first, pinned before all; then the plan is made
cheaper (search.py) as long as a change pays for itself (costs.py). One base at a time: bases share no group.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from infinilora.coordinator.costs import Costs
from infinilora.coordinator.draft import Adapter, Draft, Group
from infinilora.coordinator.search import improve
from infinilora.protocol.ids import Digest

__all__ = ["Adapter", "Group", "Home", "Plan", "Reason", "Table", "by_group", "copies_of", "place"]

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
    ranked = sorted(adapters, key=lambda adapter: adapter.digest)
    homes = _homes(ready, ranked, current)
    draft = Draft(ready, ranked, homes, costs or Costs(), fill=fill)
    _settle(draft)
    improve(draft, TRIES)
    if draft.homeless_pins:
        fresh = Draft(ready, ranked, homes, draft.costs, fill=fill)
        improve(fresh, TRIES)  # pins first, into empty groups, largest first
        draft = min(draft, fresh, key=lambda d: (d.homeless_pins, d.cost))
    return {adapter.digest: _home(draft, ready, a) for a, adapter in enumerate(ranked)}


def by_group(plan: Plan, groups: Iterable[Group]) -> Table:
    """The plan as engines read it. Groups that may hold something are in it, though they hold nothing."""
    table: dict[str, list[Digest]] = {group.id: [] for group in groups if group.state == "ready"}
    for digest, home in plan.items():
        for group in home.groups:
            table[group].append(digest)
    return {group: tuple(sorted(held)) for group, held in sorted(table.items())}


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
            if digest in number:
                found[number[digest]].append(g)
    return {a: tuple(held) for a, held in sorted(found.items())}


def _settle(draft: Draft) -> None:
    """Put everything where it is, most worth first: a shrunken group may not hold all.

    Of too many copies those in the busiest groups go.
    """
    homes, copies = draft.homes, draft.copies
    order = sorted((len(held) > copies[a], -draft.worth(a, 1), a) for a, held in homes.items())
    for *_, a in order:
        held = homes[a]
        for group in held if len(held) == 1 else sorted(held, key=lambda g: (draft.busyness(g), g)):
            if len(draft.where[a]) < copies[a] and draft.can_hold(group, a):
                draft.put(a, group)


def _home(draft: Draft, groups: Sequence[Group], a: int) -> Home:
    before, now = draft.homes.get(a, ()), draft.where[a]
    if not now:
        fits = max(draft.capacity, default=-1) >= draft.num_bytes[a]
        return Home((), "no room" if fits else "outsize" if groups else "no group")
    ordered = sorted(now, key=lambda g: (g not in before, draft.busyness(g), g)) if len(now) > 1 else now
    return Home(tuple(groups[g].id for g in ordered), _reason(set(before), set(now)))


def _reason(before: set[int], now: set[int]) -> Reason:
    if before == now:
        return "kept"
    if not before:
        return "placed"
    if before < now:
        return "copied"
    return "thinned" if now < before else "moved"
