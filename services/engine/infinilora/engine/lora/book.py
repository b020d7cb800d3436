"""The engine's leases as both of its threads see them: who holds, who was asked, what came of it.

    want -> WAITING (no group) -> WAITING (asked) -> WAITING (slot) -> ADMISSIBLE -> RESIDENT
                 ^                     |                  |               |            |
                 +---------------------+-- group lost ----+---------------+------------+
                 +-- refused, another group is left --+        refused, none is left -> FAILED

An entry whose last holder is gone stays until its group has been told (`take_unwanted`), so that an adapter
dropped and wanted again in the same breath keeps its lease.
"""

import threading
from dataclasses import dataclass, field

from infinilora.engine.lora.interface import Lease, LeaseStatus, LeaseView
from infinilora.pool.scales import SiteScale
from infinilora.protocol.errors import InfiniLoraError, Internal
from infinilora.protocol.ids import Digest

_UNKNOWN = LeaseView(LeaseStatus.WAITING)


@dataclass(slots=True)
class _Entry:
    holders: int = 0
    group: str | None = None
    refused_by: set[str] = field(default_factory=set)
    view: LeaseView = _UNKNOWN


class LeaseBook:
    """Every method is safe from any thread and returns at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Digest, _Entry] = {}

    # Who holds ------------------------------------------------------------------------------------

    def want(self, digest: Digest) -> bool:
        """Count a holder; True when somebody must be asked."""
        with self._lock:
            entry = self._entries.setdefault(digest, _Entry())
            entry.holders += 1
            if entry.holders == 1 and entry.view.status is LeaseStatus.FAILED:
                self._entries[digest] = entry = _Entry(holders=1)
            return entry.group is None and entry.view.status is LeaseStatus.WAITING

    def drop(self, digest: Digest) -> bool:
        """Count a holder less; True when it was the last."""
        with self._lock:
            entry = self._entries[digest]
            entry.holders -= 1
            return entry.holders == 0

    def view(self, digest: Digest) -> LeaseView:
        with self._lock:
            entry = self._entries.get(digest)
            return _UNKNOWN if entry is None else entry.view

    def num_holders(self) -> int:
        with self._lock:
            return sum(entry.holders for entry in self._entries.values())

    # Whoever talks to the groups ------------------------------------------------------------------

    def unasked(self) -> list[tuple[Digest, frozenset[str]]]:
        """Wanted digests that no group has been asked for, with the groups that refused them."""
        with self._lock:
            return [
                (digest, frozenset(entry.refused_by))
                for digest, entry in self._entries.items()
                if entry.holders and entry.group is None and entry.view.status is LeaseStatus.WAITING
            ]

    def ask(self, digest: Digest, group: str) -> None:
        with self._lock:
            self._entries[digest].group = group

    def take_unwanted(self) -> list[tuple[Digest, str]]:
        """Forget entries without holders; return those whose group must be told."""
        with self._lock:
            unwanted = [(digest, entry) for digest, entry in self._entries.items() if not entry.holders]
            for digest, _ in unwanted:
                del self._entries[digest]
            return [(digest, entry.group) for digest, entry in unwanted if entry.group is not None]

    def grant(self, lease: Lease) -> None:
        """The group has given a slot. Layers follow, also where the slot was known before."""
        with self._lock:
            entry = self._asked(lease.digest, lease.group)
            if entry and entry.view.lease != lease:
                entry.view = LeaseView(LeaseStatus.WAITING, lease)

    def layers_ready(self, group: str, digest: Digest, *, slot: int, slot_generation: int, count: int) -> None:
        """Layers 0..count-1 of this tenancy may be computed, as far as their column scales are here too.

        News of another tenancy is old.
        """
        with self._lock:
            entry = self._asked(digest, group)
            lease = entry.view.lease if entry else None
            if entry is None or lease is None or (lease.slot, lease.slot_generation) != (slot, slot_generation):
                return
            if lease.scales is not None:
                count = min(count, lease.scales.layers_known)
            if count >= len(lease.layer_sites):
                entry.view = LeaseView(LeaseStatus.RESIDENT, lease)
            elif count > 0:
                entry.view = LeaseView(LeaseStatus.ADMISSIBLE, lease, layers_ready=count)

    def put_scale(self, group: str, digest: Digest, scale: SiteScale, *, slot: int, slot_generation: int) -> None:
        """A column scale of this tenancy; one of another is old. Raises Internal where the lease names none."""
        with self._lock:
            entry = self._asked(digest, group)
            lease = entry.view.lease if entry else None
            if lease is None or (lease.slot, lease.slot_generation) != (slot, slot_generation):
                return
            if lease.scales is None:
                raise Internal(f"group {group} sent a column scale of {digest}; its lease names none")
            lease.scales.put(scale)

    def refuse(self, group: str, digest: Digest, error: InfiniLoraError, *, is_final: bool) -> None:
        """The group will not, or no longer, serve this. Unless final, another group is asked."""
        with self._lock:
            entry = self._asked(digest, group)
            if entry is None:
                return
            entry.group = None
            entry.refused_by.add(group)
            entry.view = LeaseView(LeaseStatus.FAILED, error=error) if is_final else _UNKNOWN

    def refused_by(self, digest: Digest) -> frozenset[str]:
        with self._lock:
            entry = self._entries.get(digest)
            return frozenset() if entry is None else frozenset(entry.refused_by)

    def ask_again(self, group: str, digests: frozenset[Digest]) -> None:
        """The group computes none of these now, whatever it said before: WAITING until it is asked again."""
        with self._lock:
            for digest in digests:
                entry = self._asked(digest, group)
                if entry:
                    entry.group, entry.view = None, _UNKNOWN

    def group_lost(self, group: str) -> None:
        """Leases die with their link. Who refused while this group was there to be asked may be asked again."""
        with self._lock:
            for digest, entry in list(self._entries.items()):
                if entry.group != group:
                    entry.refused_by.discard(group)
                elif entry.holders:
                    entry.group, entry.view = None, _UNKNOWN
                    entry.refused_by.clear()
                else:
                    del self._entries[digest]

    def _asked(self, digest: Digest, group: str) -> _Entry | None:
        entry = self._entries.get(digest)
        return entry if entry is not None and entry.group == group else None
