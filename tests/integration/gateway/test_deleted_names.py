"""What is left of deleted names in a real Redis: a number, for ever, and nothing that grows with it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from infinilora.coordinator.registry import Registry as CoordinatorRegistry
from infinilora.gateway import ledger as ledgers
from infinilora.gateway.adopt import adopt, shrink
from infinilora.gateway.ledger import Ledger
from infinilora.gateway.registry import Registry
from infinilora.gateway.versions import Content
from infinilora.protocol import keys
from infinilora.protocol.adapter import AdapterRecord
from infinilora.protocol.ids import Digest, Fingerprint, digest_of
from infinilora.runtime.memory import MemoryBus
from infinilora.runtime.store import RedisStore
from support.procs import ValkeyServer

pytestmark = pytest.mark.integration

BASE = Fingerprint(digest_of(b"base"))
TENANT = "default"
MANY = 20_000
BYTES_BEFORE, BYTES_AFTER = 450, 50
"""Of a deleted name of 16 letters, in all: what an older gateway left at least, what is left now at most."""


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


def tombstone(name: str, *, last_version: int = 7) -> AdapterRecord:
    """What gateways once wrote in the place of a deleted adapter's record."""
    return AdapterRecord(
        tenant=TENANT,
        name=name,
        base=BASE,
        revision=9,
        current=digest_of(name.encode()),
        versions=(),
        deleted_at="2026-11-30T09:00:00+00:00",
        last_version=last_version,
    )


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


async def test_the_tombstones_of_older_gateways_shrink_to_numbers_of_some_bytes(world: World) -> None:
    names = [f"customer-{number:07}" for number in range(MANY)]
    empty = await world.used_bytes()
    for start in range(0, MANY, 1000):
        batch = [tombstone(name) for name in names[start : start + 1000]]
        await world.redis.mset({keys.adapter(TENANT, record.name): msgspec.json.encode(record) for record in batch})
        await world.redis.zadd(
            keys.REGISTRY_JOURNAL, {f"{TENANT}/{record.name}": start + n for n, record in enumerate(batch, start=1)}
        )
    await world.redis.set(keys.REGISTRY_REVISION, MANY)
    before = (await world.used_bytes() - empty) / MANY
    await world.behind.refresh()
    revision = await world.store.counter(keys.REGISTRY_REVISION)
    while await world.store.trim(keys.REGISTRY_JOURNAL, marks=keys.GRAVES, floor=keys.REGISTRY_FLOOR, up_to=revision):
        continue
    after = (await world.used_bytes() - empty) / MANY
    print(f"bytes of a deleted name: {before:.0f} before, {after:.0f} after")
    assert before > BYTES_BEFORE
    assert after < BYTES_AFTER
    assert len(world.behind) == 0
    record = await world.point(names[5], "y")
    assert [version.version for version in record.versions] == [8]


async def test_a_tombstone_is_no_way_back_for_a_number(world: World) -> None:
    """An older gateway that knew nothing of the number took the name again, and deleted it."""
    for _ in range(3):
        await world.point("a")
        await world.delete("a")
    key, hashed = keys.adapter(TENANT, "a"), keys.last_versions(TENANT, "a")
    assert await world.redis.hget(hashed, "a") == b"3"
    await world.store.put(key, tombstone("a", last_version=1))
    found = await world.store.get(key, AdapterRecord)
    assert found is not None
    await shrink(world.store, [found])
    await shrink(world.store, [found])
    assert (await world.redis.exists(key), await world.redis.hget(hashed, "a")) == (0, b"3")


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


async def test_what_an_old_set_names_is_entered_once_and_only_if_it_is_there(world: World) -> None:
    await world.point("listed")
    record = (await world.redis.get(keys.adapter(TENANT, "listed"))).replace(b'"listed"', b'"old"')
    await world.redis.set(keys.adapter(TENANT, "old"), record)
    await world.redis.sadd(keys.REGISTRY_INDEX, "default/old", "default/listed", "default/gone")
    revision = await world.store.counter(keys.REGISTRY_REVISION)
    await adopt(world.store)
    assert await world.journal() == ["default/listed", "default/old"]
    await adopt(world.store)
    assert await world.store.counter(keys.REGISTRY_REVISION) == revision + 1
    await world.mirror.refresh()
    await world.delete("old")
    await adopt(world.store)
    await world.behind.refresh()
    assert [entry.name for entry in world.behind.page(TENANT, "", 10)] == ["listed"]


async def test_nothing_is_deleted_before_old_names_are_taken_up(world: World) -> None:
    """Two names of one content: the coordinator must know of the second when the first is deleted."""
    shared: Digest = (await world.point("first")).current
    record = (await world.redis.get(keys.adapter(TENANT, "first"))).replace(b'"first"', b'"second"')
    await world.redis.set(keys.adapter(TENANT, "second"), record)
    await world.redis.sadd(keys.REGISTRY_INDEX, "default/first", "default/second")
    fresh = Ledger(world.store, MemoryBus(), Registry(world.store, MemoryBus()))
    await fresh.delete(TENANT, "first")
    ((condemned, number),) = await world.store.journal(keys.CONDEMNED, 0, 10)
    entered = dict(await world.store.journal(keys.REGISTRY_JOURNAL, 0, 10))
    assert condemned == shared
    assert entered["default/second"] < number, "whoever sees the deletion sees the other name"
