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
    plan: Plan, resident: Mapping[str, Set[Digest]], heat: Mapping[Digest, float], known: Set[Digest]
) -> list[Hint]:
    """Most useful first: stage what has heat and is nowhere, then further copies; evict what no name leads to.

    `resident` has an entry for each group that can be asked; `known` are the digests of the registry.
    """
    anywhere = {digest for held in resident.values() for digest in held}
    wanted = [
        Hint("stage", group, digest)
        for digest in sorted(heat, key=lambda d: (-heat[d], d))
        for group in _missing(plan, resident, digest, is_held=digest in anywhere)
    ]
    wanted.sort(key=lambda hint: hint.digest in anywhere)
    forgotten = [
        Hint("evict", group, digest)
        for group, held in sorted(resident.items())
        for digest in sorted(held)
        if digest not in known
    ]
    return wanted + forgotten


def _missing(plan: Plan, resident: Mapping[str, Set[Digest]], digest: Digest, *, is_held: bool) -> list[str]:
    """Of one copy, none while it is held anywhere: it is used where it is, and moves when it is next loaded."""
    home = plan.get(digest)
    planned = [group for group in home.groups if group in resident] if home else []
    if home and len(home.groups) > 1:
        return [group for group in planned if digest not in resident[group]]
    return [] if is_held else planned
