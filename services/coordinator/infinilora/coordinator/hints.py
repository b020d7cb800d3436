"""What LoRA servers should be asked to stage or give up. Pure.

Hints never break a lease and may be lost: the next round gives them again.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Literal

from infinilora.coordinator.placement import Plan
from infinilora.protocol.ids import Digest


@dataclass(frozen=True, slots=True)
class Hint:
    """One command to the server of one group."""

    action: Literal["stage", "evict"]
    group: str
    digest: Digest


def hints(
    plan: Plan,
    resident: Mapping[str, Set[Digest]],
    heat: Mapping[Digest, float],
    known: Set[Digest],
    hot: Set[Digest],
) -> list[Hint]:
    """Most useful first: stage what has heat and is nowhere, then hot seconds; evict what no name leads to.

    `resident` has an entry for each group that can be asked; `known` are the digests of the registry.
    """
    anywhere = {digest for held in resident.values() for digest in held}
    wanted = [
        Hint("stage", group, digest)
        for digest in sorted(heat, key=lambda d: (-heat[d], d))
        for group in _missing(plan, resident, digest, everywhere=digest in hot, is_held=digest in anywhere)
    ]
    wanted.sort(key=lambda hint: hint.digest in anywhere)
    forgotten = [
        Hint("evict", group, digest)
        for group, held in sorted(resident.items())
        for digest in sorted(held)
        if digest not in known
    ]
    return wanted + forgotten


def _missing(
    plan: Plan, resident: Mapping[str, Set[Digest]], digest: Digest, *, everywhere: bool, is_held: bool
) -> list[str]:
    planned = [group for group, digests in plan.items() if digest in digests and group in resident]
    if everywhere:
        return [group for group in planned if digest not in resident[group]]
    return [] if is_held else planned[:1]
