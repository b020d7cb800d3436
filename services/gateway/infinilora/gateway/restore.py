"""A registry that the store has lost (FLUSHALL, a volume that is gone) is put back from what a gateway knows of it.

Beside the registry lies its *life*. No gateway ever removes it, so whoever knows one and finds none has in its mirror
what is left of the registry. Any number of gateways may put it back at once: nothing is written over, and what one has
completed is the next life, in which the others' unfinished work is refused. Knows no request.
"""

import logging
from collections.abc import Iterable, Sequence
from itertools import islice

from infinilora.gateway.mirror import Entry
from infinilora.protocol import keys
from infinilora.protocol.adapter import AdapterRecord, RegistryLife
from infinilora.protocol.errors import Unavailable
from infinilora.runtime.store import READ_BATCH, Change, Stamp, Store, Value

logger = logging.getLogger(__name__)

Life = Value[RegistryLife] | None


def is_lost(mine: RegistryLife, revision: int, there: RegistryLife | None) -> bool:
    """Whether a mirror of this life, that has read so far, knows what the store does not.

    Also where another gateway was faster whose mirror had read less.
    """
    if there is None:
        return True
    return (there.id, there.number) == (mine.id, mine.number + 1) and there.revision < revision


async def put_back(store: Store, entries: Iterable[Entry], there: Life) -> None:
    """Write every entry whose name holds nothing, while the life in the store is `there`. Raises Unavailable."""
    left, number = iter(entries), 0
    while batch := list(islice(left, READ_BATCH)):
        number += await _put_back(store, batch, there)
    logger.error("the store had lost the registry: put back", extra={"names": number})


async def next_life(store: Store, mine: RegistryLife, revision: int) -> None:
    """Call what was put back from this mirror the next life, unless somebody has already."""
    life = RegistryLife(id=mine.id, number=mine.number + 1, revision=revision)
    await store.swap([Change(keys.REGISTRY_LIFE, None, life)])


async def _put_back(store: Store, batch: Sequence[Entry], there: Life) -> int:
    found = await store.get_many([_key(entry) for entry in batch], dict)
    gone = [entry for entry, value in zip(batch, found, strict=True) if value is None]
    changes = [
        Change(keys.REGISTRY_LIFE, there.raw if there else None),
        *(Change(_key(entry), None, entry) for entry in gone),
    ]
    stamps = [Stamp(keys.REGISTRY_JOURNAL, _entry(entry), keys.REGISTRY_REVISION) for entry in gone]
    if not await store.swap(changes, also=stamps):
        raise Unavailable("the registry is being put back by others", retry_after_s=1.0)
    return len(gone)


def _key(entry: Entry) -> str:
    of = keys.adapter if isinstance(entry, AdapterRecord) else keys.alias
    return of(entry.tenant, entry.name)


def _entry(entry: Entry) -> str:
    of = keys.adapter_entry if isinstance(entry, AdapterRecord) else keys.alias_entry
    return of(entry.tenant, entry.name)
