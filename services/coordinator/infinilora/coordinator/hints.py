"""What LoRA servers should be asked to stage or give up. Pure.

Hints never break a lease and may be lost: the next round gives them again.
"""

from collections.abc import Mapping, Set
from typing import Literal, NamedTuple

from infinilora.coordinator.placement import Table
from infinilora.protocol.ids import Digest

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
