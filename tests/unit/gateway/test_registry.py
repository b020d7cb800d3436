"""The mirror of the registry: follows events, repairs gaps, stands still without Redis."""

import asyncio

import pytest

from infinilora.gateway.registry import Registry
from infinilora.protocol import keys
from infinilora.protocol.adapter import AdapterRecord
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.memory import MemoryBus, MemoryStore
from infinilora.runtime.store import AddMember, Raise, RemoveMember

DIGEST = Digest("sha256:" + "a" * 64)


def record(name: str, revision: int = 1) -> AdapterRecord:
    return AdapterRecord(tenant="t", name=name, base=Fingerprint("b"), revision=revision, current=DIGEST, versions=())


async def write(store: MemoryStore, name: str, revision: int = 1) -> int:
    """As another gateway would; the registry's new revision."""
    key, found = keys.adapter("t", name), await store.get(keys.adapter("t", name), AdapterRecord)
    effects = (AddMember(keys.REGISTRY_INDEX, f"t/{name}"), Raise(keys.REGISTRY_REVISION))
    swap = await store.compare_and_set(key, found.raw if found else None, record(name, revision), also=effects)
    return swap.counters[0]


async def test_everything_is_read_at_first_and_after_a_gap() -> None:
    store = MemoryStore()
    registry = Registry(store, MemoryBus())
    assert not registry.is_loaded
    await write(store, "a")
    await registry.refresh()
    assert registry.is_loaded
    await write(store, "b")
    await write(store, "a", revision=2)
    await registry.refresh()
    assert [(r.name, r.revision) for r in registry.of_tenant("t")] == [("a", 2), ("b", 1)]
    assert registry.of_tenant("other") == []


async def test_deletions_are_seen_by_the_revision() -> None:
    store = MemoryStore()
    registry = Registry(store, MemoryBus())
    await write(store, "a")
    await registry.refresh()
    found = await store.get(keys.adapter("t", "a"), AdapterRecord)
    assert found is not None
    effects = (RemoveMember(keys.REGISTRY_INDEX, "t/a"), Raise(keys.REGISTRY_REVISION))
    assert await store.delete_if(keys.adapter("t", "a"), found.raw, also=effects)
    await registry.refresh()
    assert registry.get("t", "a") is None


async def test_own_changes_are_there_at_once_and_nothing_is_missed_behind_a_gap() -> None:
    store = MemoryStore()
    registry = Registry(store, MemoryBus())
    await registry.refresh()
    await write(store, "foreign")
    revision = await write(store, "own")
    await registry.put(record("own"), revision)
    assert registry.get("t", "own") is not None
    assert registry.get("t", "foreign") is None
    await registry.refresh()
    assert registry.get("t", "foreign") is not None


async def test_without_redis_the_mirror_keeps_what_it_knows() -> None:
    store = MemoryStore()
    registry = Registry(store, MemoryBus())
    await write(store, "a")
    await registry.refresh()
    store.is_connected = False
    with pytest.raises(Unavailable):
        await registry.refresh()
    assert registry.get("t", "a") is not None


async def test_a_record_that_cannot_be_read_stops_the_mirror_and_not_the_process() -> None:
    store = MemoryStore()
    registry = Registry(store, MemoryBus())
    await write(store, "a")
    await registry.refresh()
    await store.put(keys.adapter("t", "a"), {"not": "a record"})
    await write(store, "b")
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(registry.follow_revisions())
        await asyncio.sleep(0.05)
        assert not following.done()
        assert registry.get("t", "a") is not None
        following.cancel()
