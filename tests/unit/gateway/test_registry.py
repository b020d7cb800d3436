"""The mirror of the registry: follows the journal, repairs gaps, stands still without Redis."""

import asyncio

import pytest
from typing_extensions import override

from infinilora.gateway.registry import Registry
from infinilora.protocol import keys
from infinilora.protocol.adapter import AdapterRecord, AliasRecord, RegistryLife
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.memory import MemoryBus, MemoryStore
from infinilora.runtime.store import Change, Stamp

DIGEST = Digest("sha256:" + "a" * 64)


class CountingStore(MemoryStore):
    """Notes which keys were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    @override
    def _read(self, key: str) -> bytes | None:
        self.read.append(key)
        return super()._read(key)


def record(name: str, revision: int = 1) -> AdapterRecord:
    return AdapterRecord(
        tenant="t",
        name=name,
        base=Fingerprint("b"),
        revision=revision,
        current=DIGEST,
        versions=(),
    )


async def write(store: MemoryStore, name: str, revision: int | None = 1) -> None:
    """As another gateway would; None deletes it."""
    key, found = keys.adapter("t", name), await store.get(keys.adapter("t", name), AdapterRecord)
    stamp = Stamp(keys.REGISTRY_JOURNAL, keys.adapter_entry("t", name), keys.REGISTRY_REVISION)
    value = record(name, revision) if revision else None
    assert await store.swap([Change(key, found.raw if found else None, value)], also=[stamp])


async def write_alias(store: MemoryStore, name: str, target: str | None) -> None:
    key = keys.alias("t", name)
    found = await store.get(key, AliasRecord)
    stamp = Stamp(keys.REGISTRY_JOURNAL, keys.alias_entry("t", name), keys.REGISTRY_REVISION)
    value = AliasRecord(tenant="t", name=name, target=target, revision=1) if target else None
    assert await store.swap([Change(key, found.raw if found else None, value)], also=[stamp])


def names(registry: Registry) -> list[str]:
    return [entry.name for entry in registry.page("t", "", 100)]


async def test_everything_is_read_at_first_and_only_changes_from_then_on() -> None:
    store = CountingStore()
    registry = Registry(store, MemoryBus())
    assert not registry.is_loaded
    for number in range(1203):
        await write(store, f"n{number:04}")
    await registry.refresh()
    assert registry.is_loaded
    assert len(registry) == 1203
    await write(store, "z")
    await write(store, "n0007", revision=2)
    store.read.clear()
    await registry.refresh()
    assert sorted(set(store.read) - {keys.REGISTRY_LIFE}) == [keys.adapter("t", "n0007"), keys.adapter("t", "z")]
    assert [entry.revision for entry in registry.page("t", "n0006", 2)] == [2, 1]
    assert len(registry) == 1204
    assert registry.page("other", "", 10) == []


async def test_what_is_deleted_is_no_adapter_and_a_name_may_come_back() -> None:
    store = MemoryStore()
    registry = Registry(store, MemoryBus())
    await write(store, "a")
    await registry.refresh()
    await write(store, "a", revision=None)
    await registry.refresh()
    assert (registry.get("t", "a"), names(registry), len(registry)) == (None, [], 0)
    await write(store, "a", revision=3)
    await registry.refresh()
    assert names(registry) == ["a"]


async def test_an_alias_is_seen_moved_and_forgotten() -> None:
    store = MemoryStore()
    registry = Registry(store, MemoryBus())
    await write(store, "a")
    await write_alias(store, "prod", "a@v1")
    await registry.refresh()
    found = registry.alias("t", "prod")
    assert found is not None
    assert (found.target, registry.get("t", "prod"), len(registry)) == ("a@v1", None, 1)
    await write_alias(store, "prod", None)
    await write(store, "prod")
    await registry.refresh()
    assert (registry.alias("t", "prod"), names(registry)) == (None, ["a", "prod"])


async def test_a_store_with_an_older_state_is_believed() -> None:
    store, older = MemoryStore(), MemoryStore()
    registry = Registry(store, MemoryBus())
    for name in ("a", "b", "c"):
        await write(store, name)
    await registry.refresh()
    await write(older, "a")
    found = await store.get(keys.REGISTRY_LIFE, RegistryLife)
    assert found is not None
    await older.put(keys.REGISTRY_LIFE, found.value)
    registry._store = older
    await registry.refresh()
    assert names(registry) == ["a"]


async def test_another_registry_is_believed() -> None:
    store, other = MemoryStore(), MemoryStore()
    registry = Registry(store, MemoryBus())
    await write(store, "a")
    await registry.refresh()
    await Registry(other, MemoryBus()).refresh()
    await write(other, "b")
    registry._store = other
    await registry.refresh()
    assert names(registry) == ["b"]


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
    await write(store, "b")
    await store.put(keys.adapter("t", "b"), {"not": "a record"})
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(registry.follow_revisions())
        await asyncio.sleep(0.05)
        assert not following.done()
        assert names(registry) == ["a"]
        following.cancel()
