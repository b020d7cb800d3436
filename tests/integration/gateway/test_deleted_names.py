"""What is left of deleted names in a real Redis: a number, for ever, and nothing that grows with it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from infinilora.coordinator.registry import Registry as CoordinatorRegistry
from infinilora.gateway import ledger as ledgers
from infinilora.gateway.ledger import Ledger
from infinilora.gateway.registry import Registry
from infinilora.gateway.versions import Content
from infinilora.protocol import keys
from infinilora.protocol.adapter import AdapterRecord
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.runtime.memory import MemoryBus
from infinilora.runtime.store import RedisStore
from support.procs import ValkeyServer

pytestmark = pytest.mark.integration

BASE = Fingerprint(digest_of(b"base"))
TENANT = "default"
MANY = 20_000
BYTES_LEFT = 50
"""Of a deleted name of 16 letters, in all, at most."""


@dataclass
class World:
    """A registry with one writer, and a mirror that has not looked since."""

    store: RedisStore
    redis: Any
    ledger: Ledger
    mirror: Registry
    behind: Registry

    async def point(self, name: str, text: str = "x") -> AdapterRecord:
        content = Content(
            BASE, digest_of(text.encode()), source="", num_bytes=1, max_rank=1, num_tensors=2, may_replace=True
        )
        return (await self.ledger.point(TENANT, name, content)).record

    async def delete(self, name: str) -> None:
        await self.ledger.delete(TENANT, name)

    async def used_bytes(self) -> int:
        return sum(
            [await self.redis.memory_usage(key, samples=0) async for key in self.redis.scan_iter("infinilora:*")]
        )

    async def journal(self) -> list[str]:
        return [entry for entry, _ in await self.store.journal(keys.REGISTRY_JOURNAL, 0, 100_000)]


@pytest.fixture
async def world(redis_server: ValkeyServer) -> AsyncIterator[World]:
    async with RedisStore(redis_server.url) as store:
        await store._redis.flushdb()
        bus = MemoryBus()
        mirror, behind = Registry(store, bus), Registry(store, bus)
        yield World(store, store._redis, Ledger(store, bus, mirror), mirror, behind)
        await store._redis.flushdb()


async def test_a_deleted_name_leaves_its_number_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "KEPT_CHANGES", 0)
    await world.point("kept")
    before = set(await world.redis.keys("infinilora:*"))
    for name in ("a", "b"):
        await world.point(name)
        await world.delete(name)
    left = {keys.last_versions(TENANT, name) for name in ("a", "b")}
    assert {key.decode() for key in set(await world.redis.keys("infinilora:*")) - before} == left | {
        keys.CONDEMNED,
        keys.REGISTRY_FLOOR,
    }
    assert await world.journal() == ["default/kept"]
    record = await world.point("a", "y")
    assert [version.version for version in record.versions] == [2]
    assert await world.redis.hget(keys.last_versions(TENANT, "a"), "a") is None


async def test_a_deleted_name_costs_some_bytes_however_many_there_are(world: World) -> None:
    names = [f"customer-{number:07}" for number in range(MANY)]
    empty = await world.used_bytes()
    async with world.redis.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hset(keys.last_versions(TENANT, name), name, 7)
        await pipe.execute()
    assert (await world.used_bytes() - empty) / MANY < BYTES_LEFT
    record = await world.point(names[5], "y")
    assert [version.version for version in record.versions] == [8]


async def test_a_mirror_that_is_far_behind_misses_no_deletion(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "KEPT_CHANGES", 10)
    coordinator = CoordinatorRegistry(world.store)
    for name in ("gone", "again", "kept"):
        await world.point(name, name)
    await world.ledger.alias(TENANT, "prod", "gone")
    await world.behind.refresh()
    await coordinator.refresh()
    assert world.behind.alias(TENANT, "prod") is not None
    await world.delete("gone")
    await world.delete("again")
    await world.point("again", "new")
    for number in range(20):
        await world.point("other", str(number))
    await world.delete("other")
    await world.behind.refresh()
    await coordinator.refresh()
    assert [entry.name for entry in world.behind.page(TENANT, "", 10)] == ["again", "kept"]
    assert world.behind.alias(TENANT, "prod") is None
    assert coordinator.digests() == {digest_of(b"new"), digest_of(b"kept")}
    entries = await world.journal()
    assert "default/gone" not in entries
    assert "alias:default/prod" not in entries
    assert {"default/again", "default/kept"} <= set(entries)


async def test_a_mirror_that_keeps_up_reads_no_more_than_what_changed(world: World) -> None:
    for number in range(50):
        await world.point(f"n{number}")
    await world.behind.refresh()
    await world.delete("n7")
    first = world.behind._mirror
    await world.behind.refresh()
    assert world.behind._mirror is first
    assert world.behind.get(TENANT, "n7") is None
