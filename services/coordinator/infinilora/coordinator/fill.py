"""How room that is free is given away: most worth per byte first, into the least occupied group that has room. Pure."""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from math import inf

from infinilora.coordinator.draft import Draft

LIGHT = 0.005
"""A copy that makes a group no more occupied than this may go to the first that has room."""


def lacking(draft: Draft, among: Iterable[int] | None = None) -> list[int]:
    """One entry for each copy that is not there: the pinned by size, largest first; then by worth per byte."""
    found, everybody = [], range(len(draft.adapters))
    short = (a for a, held, copies in zip(everybody, draft.where, draft.copies, strict=True) if len(held) < copies)
    for a in short if among is None else among:
        for placed in range(len(draft.where[a]) + 1, draft.copies[a] + 1):
            worth = draft.worth(a, placed)
            found.append((-worth, -draft.num_bytes[a] if worth == inf else 0, a))
    found.sort()
    return [a for _, _, a in found]


def fill(draft: Draft, wanted: list[int]) -> None:
    """Put every copy of `wanted`, in this order, that finds room."""
    smallest = [draft.num_bytes[a] for a in wanted]
    for i in range(len(smallest) - 2, -1, -1):
        smallest[i] = min(smallest[i], smallest[i + 1])
    places, no_room_for = _Places(draft), inf
    for a, least in zip(wanted, smallest, strict=True):
        if draft.num_bytes[a] >= no_room_for:
            continue
        group = places.best(a, least)
        if group is not None:
            draft.put(a, group)
            places.refresh(draft.where[a])
        elif not draft.where[a]:
            no_room_for = draft.num_bytes[a]


def refill(draft: Draft, among: Iterable[int]) -> None:
    """Put what is worth something and has lost its place where there is room now."""
    roomiest = max(draft.free)
    for a in lacking(draft, (a for a in among if draft.num_bytes[a] <= roomiest and draft.worth(a, 1))):
        room = [group for group in range(len(draft.free)) if draft.can_hold(group, a)]
        if room:
            draft.put(a, min(room, key=lambda group: (draft.occupation_with(group, a), group)))


class _Places:
    """A heap of groups, least occupied first. An entry that is out of date is dropped when it comes up."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._now = [draft.occupation(group) for group in range(len(draft.free))]
        self._heap = [(occupation, group) for group, occupation in enumerate(self._now)]
        heapify(self._heap)

    def best(self, a: int, least: int) -> int | None:
        """Where a copy of adapter a makes the least occupied. Groups without room for `least` bytes are forgotten."""
        draft, heap, seen = self._draft, self._heap, []
        size, share = draft.num_bytes[a], draft.rps[a] / (len(draft.where[a]) + 1)
        is_first = not draft.where[a]
        best: tuple[float, int] | None = None
        while heap and (best is None or heap[0] < best):
            occupation, group = entry = heappop(heap)
            if occupation != self._now[group] or draft.free[group] < least:
                continue
            seen.append(entry)
            if size <= draft.free[group] and (is_first or draft.may_hold(group, a)):
                after = (draft.occupation(group, share, size), group)
                best = after if best is None else min(best, after)
                if after[0] - occupation < LIGHT:
                    break
        for entry in seen:
            if best is None or entry[1] != best[1]:
                heappush(heap, entry)
        if best is None:
            return None
        self._now[best[1]] = -1.0  # no entry: `refresh` makes one
        return best[1]

    def refresh(self, groups: Iterable[int]) -> None:
        for group in groups:
            occupation = self._draft.occupation(group)
            if occupation != self._now[group]:
                self._now[group] = occupation
                heappush(self._heap, (occupation, group))
