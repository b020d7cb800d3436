"""Which LoRA server group an adapter's lease is asked of. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from infinilora.protocol.ids import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group as its last heartbeat told it."""

    name: str
    address: str
    incarnation: str
    bytes_free: int = 0
    leases: int = 0
    resident: frozenset[Digest] = frozenset()


def choose_group(
    digest: Digest, groups: Iterable[Group], placed: Collection[str], excluded: Collection[str] = ()
) -> str | None:
    """Where the placement wants it and it is, else where it is, else where it is wanted, else anywhere.

    Of several the one with the fewest leases, then the one with the most free bytes.
    """
    candidates = [group for group in groups if group.name not in excluded]
    there = [group for group in candidates if digest in group.resident]
    for preferred in (
        [g for g in there if g.name in placed],
        there,
        [g for g in candidates if g.name in placed],
        candidates,
    ):
        if preferred:
            return max(preferred, key=lambda g: (-g.leases, g.bytes_free, g.name)).name
    return None
