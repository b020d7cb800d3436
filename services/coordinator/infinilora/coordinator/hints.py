"""What LoRA servers should be asked to stage or give up. Pure.

Hints never break a lease and may be lost: the next round gives them again.
"""

from collections.abc import Mapping, Set
from typing import Literal, NamedTuple

from infinilora.coordinator.placement import Table
from infinilora.protocol.ids import Digest

MOST_OVER = 256
"""Adapters that one staging may have go: a pool has seldom more than it needs of them."""

Pair = tuple[str, Digest]
"""A group and an adapter."""


class Hint(NamedTuple):
    """One command to the server of one group."""

    action: Literal["stage", "evict"]
    group: str
    digest: Digest


def hints(
    table: Table,
    resident: Mapping[str, Set[Digest]],
    heat: Mapping[Digest, float],
    known: Set[Digest],
    failed: Set[Pair] = frozenset(),
) -> list[Hint]:
    """Most useful first: stage what has heat and is nowhere, then moves and further copies; evict what has no name.

    `resident` has an entry for each group that can be asked; `known` are the digests of the registry; `failed` is what
    a group is not asked for now.
    """
    anywhere = {digest for held in resident.values() for digest in held}
    wanted = [
        Hint("stage", group, digest)
        for group, digests in table.items()
        if group in resident
        for digest in digests
        if digest in heat and digest not in resident[group] and (group, digest) not in failed
    ]
    wanted.sort(key=lambda hint: (hint.digest in anywhere, -heat[hint.digest], hint.digest, hint.group))
    unnamed = [
        Hint("evict", group, digest)
        for group, held in sorted(resident.items())
        for digest in sorted(held)
        if digest not in known
    ]
    return wanted + unnamed


def over(
    group: str, digest: Digest, table: Table, resident: Mapping[str, Set[Digest]], rates: Mapping[Digest, float]
) -> tuple[Digest, ...]:
    """What may go from a group for this adapter, coldest first.

    That is what nobody asks for, and what is colder and not to be there. A group that was once asked to stage something
    keeps it until it is told this.
    """
    told, rate = frozenset(table.get(group, ())), rates.get(digest, 0.0)
    of_others = {one: rates.get(one, 0.0) for one in resident.get(group, ())}
    colder = [one for one, its in of_others.items() if its < rate and (not its or one not in told)]
    return tuple(sorted(colder, key=lambda one: (of_others[one], one))[:MOST_OVER])
