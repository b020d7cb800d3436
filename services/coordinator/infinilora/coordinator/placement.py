"""Which group holds which adapter. Pure: (groups, adapters, current) -> plan, the same for the same arguments.

    first copies    pinned, then hottest first; each stays where it is if there is room, else goes to the
                    group with most free bytes
    more copies     for hot adapters, in what room is left: a second copy never costs another's first

Little moves: an adapter leaves a group only when the group is gone or a hotter one needs its bytes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from infinilora.protocol.ids import Digest

HOT_COPIES = 2

Plan = dict[str, tuple[Digest, ...]]
"""Group -> digests, sorted."""


@dataclass(frozen=True, slots=True)
class Group:
    """A LoRA server group that may be given adapters."""

    id: str
    bytes_total: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter to be placed."""

    digest: Digest
    num_bytes: int
    rps: float = 0.0
    is_pinned: bool = False
    is_hot: bool = False


def place(
    groups: Iterable[Group], adapters: Iterable[Adapter], current: Mapping[str, Iterable[Digest]], *, fill: float
) -> Plan:
    """A plan that uses at most `fill` of each group's bytes. What finds no room is in no group."""
    free = {group.id: int(group.bytes_total * fill) for group in groups}
    homes = {(group, digest) for group, held in current.items() for digest in held}
    plan: dict[str, list[Digest]] = {group: [] for group in free}

    def add_copy(adapter: Adapter) -> None:
        room = [g for g in free if free[g] >= adapter.num_bytes and adapter.digest not in plan[g]]
        if room:
            best = min(room, key=lambda g: ((g, adapter.digest) not in homes, -free[g], g))
            plan[best].append(adapter.digest)
            free[best] -= adapter.num_bytes

    ranked = sorted(adapters, key=lambda a: (not a.is_pinned, -a.rps, a.digest))
    smallest = min((adapter.num_bytes for adapter in ranked), default=0)
    for adapter in ranked:
        if max(free.values(), default=-1) < smallest:
            break  # no room for any of the rest: of a hundred thousand, few find some
        add_copy(adapter)
    for adapter in ranked:
        for _ in range(1, HOT_COPIES if adapter.is_hot else 1):
            add_copy(adapter)
    return {group: tuple(sorted(held)) for group, held in sorted(plan.items())}


def copied(plan: Mapping[str, Iterable[Digest]]) -> frozenset[Digest]:
    """The adapters that a plan holds in more than one group."""
    seen: set[Digest] = set()
    twice: set[Digest] = set()
    for held in plan.values():
        twice |= seen & set(held)
        seen |= set(held)
    return frozenset(twice)
