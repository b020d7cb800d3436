"""What older gateways have left in Redis, brought into today's layout. Knows no mirror and no request.

Before there was a journal, a set held the names; a deleted name once left its whole record behind. Either is taken up
by the first gateway that finds it, under the same conditions as any other change, so any number of them may try.
Records themselves are read as they are: what they lack has a default. The set stays: a gateway of its time reads it.
"""

import logging
from collections.abc import Sequence

from infinilora.gateway.versions import last_version
from infinilora.protocol import keys
from infinilora.protocol.adapter import AdapterRecord
from infinilora.protocol.errors import Unavailable
from infinilora.runtime.store import READ_BATCH, Change, Effect, Stamp, Store, Value

logger = logging.getLogger(__name__)

MAX_RACES = 20
"""Times a batch is read again because one of its records has changed meanwhile."""


async def adopt(store: Store) -> None:
    """Enter every adapter that only the old set names into the journal. Raises Unavailable; again is no error."""
    unlisted = {member async for part in store.members(keys.REGISTRY_INDEX) for member in part}
    if not unlisted:
        return
    after = 0
    while entries := await store.journal(keys.REGISTRY_JOURNAL, after, READ_BATCH):
        unlisted.difference_update(entry for entry, _ in entries)
        after = entries[-1][1]
    names = sorted(unlisted)
    num_adopted = 0
    for start in range(0, len(names), READ_BATCH):
        num_adopted += await _enter(store, names[start : start + READ_BATCH])
    if num_adopted:
        logger.info("older registry adopted", extra={"adapters": num_adopted})


async def _enter(store: Store, names: Sequence[str]) -> int:
    """Stamp those that have a record, under the condition that it is still there; how many that were."""
    for _ in range(MAX_RACES):
        found = await store.get_many([keys.adapter(*name.split("/", 1)) for name in names], AdapterRecord)
        there = [(name, value) for name, value in zip(names, found, strict=True) if value is not None]
        changes = [Change(keys.adapter(*name.split("/", 1)), value.raw) for name, value in there]
        stamps = [Stamp(keys.REGISTRY_JOURNAL, name, keys.REGISTRY_REVISION) for name, _ in there]
        if not there or await store.swap(changes, also=stamps):
            return len(there)
    raise Unavailable("the registry changes too fast to be read", retry_after_s=1.0)


async def shrink(store: Store, tombstones: Sequence[Value[AdapterRecord]]) -> None:
    """Put the last version's number in the place of each tombstone. One that changes meanwhile is left."""
    if not await _shrink(store, [(tombstone, None) for tombstone in tombstones]):
        for tombstone in tombstones:
            record = tombstone.value
            before = await store.get_field(keys.last_versions(record.tenant, record.name), record.name, int)
            await _shrink(store, [(tombstone, before)])


async def _shrink(store: Store, graves: Sequence[tuple[Value[AdapterRecord], Value[int] | None]]) -> bool:
    changes: list[Change] = []
    also: list[Effect] = []
    for tombstone, before in graves:
        tenant, name = tombstone.value.tenant, tombstone.value.name
        number = max(last_version(tombstone.value), before.value if before else 0)
        changes.append(Change(keys.adapter(tenant, name), tombstone.raw, None))
        changes.append(Change(keys.last_versions(tenant, name), before.raw if before else None, number, name))
        also.append(Stamp(keys.GRAVES, keys.adapter_entry(tenant, name), keys.REGISTRY_REVISION))
    return bool(await store.swap(changes, also=also))
