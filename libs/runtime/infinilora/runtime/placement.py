"""One base's placement in the store and on the bus: a head, a part for each group, and changes as events.

    write_placement    the leader's: head and changed parts in one step, refused when another has led since
    read_placement     the parts that a reader lacks
    PlacementMirror    a reader's table, by adapter: followed by events, repaired by looking

Knows no policy: what is placed where is the coordinator's.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec

from infinilora.protocol import keys, subjects
from infinilora.protocol.control import Placement, PlacementChange, PlacementHead, PlacementPart
from infinilora.protocol.errors import Internal, Unavailable
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.bus import Bus
from infinilora.runtime.store import Change, Store, Value, fence

logger = logging.getLogger(__name__)

Table = Mapping[str, tuple[Digest, ...]]

MAX_MOVES = 4096
"""Digests in one event, about 300 KB; brokers take 1 MiB by default. Beyond it readers look into the store."""
TRIES = 5
REPAIR_S = 5.0


class Written(msgspec.Struct, frozen=True):
    """A placement, and of each part the revision it was written with."""

    placement: Placement
    parts: dict[str, int]
    head: bytes
    """As the store has it."""


async def read_placement(store: Store, base: Fingerprint, held: Written | None = None) -> Written | None:
    """What stands in the store; parts that `held` has at the same revision are not read again.

    Raises Unavailable when the store is away, or when it was written each time before all parts were read; Internal
    for a head that cannot be read.
    """
    for _ in range(TRIES):
        head = await store.get(keys.placement(base), PlacementHead)
        if head is None:
            return None
        if held is not None and held.head == head.raw:
            return held
        if held is not None and head.value.revision <= held.placement.revision:
            held = None  # another store, or an older state of it: its revisions mean other things
        found = await _read_parts(store, head.value, held)
        if found is not None:
            about = head.value
            placement = Placement(base=base, epoch=about.epoch, revision=about.revision, groups=found)
            return Written(placement, about.parts, head.raw)
    raise Unavailable(f"the placement of {base} changes faster than it can be read", retry_after_s=1.0)


async def _read_parts(store: Store, head: PlacementHead, held: Written | None) -> dict[str, tuple[Digest, ...]] | None:
    """None if one of them was written after the head was read."""
    known = held.parts if held is not None else {}
    wanted = [group for group, revision in head.parts.items() if known.get(group) != revision]
    values = await store.get_many([keys.placement_part(head.base, group) for group in wanted], PlacementPart)
    parts: dict[str, Value[PlacementPart] | None] = dict(zip(wanted, values, strict=True))
    found: dict[str, tuple[Digest, ...]] = {}
    for group, revision in head.parts.items():
        if group in parts:
            part = parts[group]
            if part is None or part.value.revision != revision:
                return None
            found[group] = part.value.digests
        elif held is not None:
            found[group] = held.placement.groups[group]
    return found


async def write_placement(
    store: Store, base: Fingerprint, groups: Table, before: Written | None, *, epoch: int
) -> Written | None:
    """The placement as it stands now; None, and nothing is written, if another has led or has written since."""
    held = before.placement.groups if before else {}
    revision = before.placement.revision + 1 if before else 1
    changed = {group: digests for group, digests in groups.items() if held.get(group) != digests}
    kept = before.parts if before else {}
    parts = {group: revision if group in changed else kept[group] for group in groups}
    head = PlacementHead(base=base, epoch=epoch, revision=revision, parts=parts)
    swap = await store.swap(
        [
            fence(epoch),
            Change(keys.placement(base), before.head if before else None, head),
            *(_put(base, group, PlacementPart(revision=revision, digests=d)) for group, d in changed.items()),
            *(_put(base, group, None) for group in held if group not in groups),
        ]
    )
    if not swap:
        return None
    placement = Placement(base=base, epoch=epoch, revision=revision, groups=dict(groups))
    return Written(placement, parts, msgspec.json.encode(head))


def _put(base: Fingerprint, group: str, part: PlacementPart | None) -> Change:
    return Change(keys.placement_part(base, group), msgspec.UNSET, part)


def change_between(before: Placement | None, now: Placement) -> PlacementChange:
    """The event that tells of a write."""
    held: Table = before.groups if before else {}
    added, removed, count = dict[str, tuple[Digest, ...]](), dict[str, tuple[Digest, ...]](), 0
    for group, digests in now.groups.items():
        had, has = set(held.get(group, ())), set(digests)
        if has - had or group not in held:
            added[group] = tuple(sorted(has - had))
        if had - has:
            removed[group] = tuple(sorted(had - has))
        count += len(had ^ has)
    is_short = count <= MAX_MOVES
    return PlacementChange(
        base=now.base,
        epoch=now.epoch,
        revision=now.revision,
        before=before.revision if before else 0,
        added=added if is_short else None,
        removed=removed if is_short else {},
        gone=tuple(group for group in held if group not in now.groups),
    )


class PlacementMirror:
    """One base's placement as a process knows it. Belongs to one event loop; `run` keeps it up."""

    def __init__(self, bus: Bus, store: Store, base: Fingerprint) -> None:
        self._bus = bus
        self._store = store
        self._base = base
        self._written: Written | None = None
        self._groups_of: dict[Digest, tuple[str, ...]] = {}
        self.groups_of: Mapping[Digest, tuple[str, ...]] = MappingProxyType(self._groups_of)
        """The groups that are to hold an adapter, as of `revision`: always the same object."""
        self.revision = 0
        """0 before anything is known."""

    async def run(self) -> None:
        """Follow changes, and look now and then whatever comes: events may be lost. For ever."""
        changes = self._bus.subscribe(subjects.PLACEMENT_EVENTS, PlacementChange)
        loop = asyncio.get_running_loop()
        try:
            await self.look()
            looks_at = loop.time() + REPAIR_S
            while True:
                try:
                    async with asyncio.timeout_at(looks_at):
                        change = await anext(changes)
                except TimeoutError:
                    await self.look()
                    looks_at = loop.time() + REPAIR_S
                except StopAsyncIteration:
                    return
                else:
                    if change.base == self._base and not self.apply(change):
                        await self.look()
        finally:
            changes.close()

    async def look(self) -> None:
        """Take what stands in the store, if it can be had now."""
        try:
            written = await read_placement(self._store, self._base, self._written)
        except Unavailable as error:
            logger.debug("placement not read", extra={"error": error.message})
        except Internal as error:  # adapters are asked for without it, where there is most room
            logger.error("placement unreadable", extra={"error": error.message})  # noqa: TRY400 - no traceback
        else:
            if written is not None and (written is not self._written or written.placement.revision != self.revision):
                self._take(written)

    def apply(self, change: PlacementChange) -> bool:
        """Whether what this process knows is now as of this change. If not, `look`.

        A lower revision is old news, or the first of a store that has lost everything.
        """
        if change.revision == self.revision:
            return True
        if change.added is None or change.before != self.revision or change.revision < self.revision:
            return False
        for group in change.gone:
            self._drop(group, [digest for digest, groups in self._groups_of.items() if group in groups])
        for group, digests in change.removed.items():
            self._drop(group, digests)
        for group, digests in change.added.items():
            self._add(group, digests)
        self.revision = change.revision
        return True

    def _take(self, written: Written) -> None:
        self._written = written
        self._groups_of.clear()
        for group, digests in sorted(written.placement.groups.items()):
            self._add(group, digests)
        self.revision = written.placement.revision

    def _add(self, group: str, digests: Iterable[Digest]) -> None:
        for digest in digests:
            held = self._groups_of.get(digest, ())
            if group not in held:
                self._groups_of[digest] = (*held, group)

    def _drop(self, group: str, digests: Iterable[Digest]) -> None:
        for digest in digests:
            left = tuple(other for other in self._groups_of.get(digest, ()) if other != group)
            if left:
                self._groups_of[digest] = left
            else:
                self._groups_of.pop(digest, None)
