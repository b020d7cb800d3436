"""Which LoRA server group an adapter's lease is asked of. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from infinilora.protocol.ids import Digest
from infinilora.protocol.speeds import relative_speeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group as its last heartbeat told it."""

    name: str
    address: str
    incarnation: str
    bytes_free: int = 0
    leases: int = 0
    rows_per_s: float = 0.0
    resident: frozenset[Digest] = frozenset()


def choose_group(
    digest: Digest, groups: Iterable[Group], placed: Collection[str] | None, excluded: Collection[str] = ()
) -> str | None:
    """Where the placement wants it and it is, else where it is, else where it is wanted, else anywhere.

    Of several the one with the fewest leases for its speed, then the one with the most free bytes. An adapter that the
    placement has no place for (`placed` is empty; None: there is no placement) is rare or outsize: of groups with as
    many leases the slowest takes it, and the fast are left to what is asked for often.
    """
    candidates = [group for group in groups if group.name not in excluded]
    wanted = placed or ()
    there = [group for group in candidates if digest in group.resident]
    for preferred in (
        [g for g in there if g.name in wanted],
        there,
        [g for g in candidates if g.name in wanted],
    ):
        if preferred:
            return _idlest(preferred)
    if not candidates:
        return None
    return _idlest(candidates) if placed is None or placed else _slowest(candidates)


def _idlest(groups: list[Group]) -> str:
    speeds = _speeds(groups)
    return max(groups, key=lambda g: (-(g.leases + 1) / speeds[g.name], g.bytes_free, g.name)).name


def _slowest(groups: list[Group]) -> str:
    speeds = _speeds(groups)
    return max(groups, key=lambda g: (-g.leases, -speeds[g.name], g.bytes_free, g.name)).name


def _speeds(groups: list[Group]) -> dict[str, float]:
    return relative_speeds({group.name: group.rows_per_s for group in groups})
