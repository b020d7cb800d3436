"""Which LoRA server group an adapter's lease is asked of. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from infinilora.protocol.control import Placement
from infinilora.protocol.ids import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group as its last heartbeat told it."""

    name: str
    address: str
    incarnation: str
    bytes_free: int = 0
    resident: frozenset[Digest] = frozenset()


def choose_group(
    digest: Digest, groups: Iterable[Group], placement: Placement | None, excluded: Collection[str] = ()
) -> str | None:
    """Where the placement table wants it, else where it is resident, else anywhere; the most free bytes decide."""
    candidates = [group for group in groups if group.name not in excluded]
    placed = set(placement.groups_of(digest)) if placement else set()
    for preferred in (
        [g for g in candidates if g.name in placed],
        [g for g in candidates if digest in g.resident],
        candidates,
    ):
        if preferred:
            return max(preferred, key=lambda g: (g.bytes_free, g.name)).name
    return None
