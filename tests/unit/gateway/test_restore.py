"""A store that has lost the registry: mirrors of gateways put it back, and nothing newer is written over."""

import asyncio
from uuid import uuid4

import pytest

from infinilora.gateway.ledger import Ledger
from infinilora.gateway.registry import Registry
from infinilora.gateway.versions import Content
from infinilora.protocol import keys
from infinilora.protocol.adapter import AdapterRecord, RegistryLife
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.memory import MemoryBus, MemoryStore
from support.emptied_store import Emptied


def digest(letter: str) -> Digest:
    return Digest("sha256:" + letter * 64)


def content(letter: str) -> Content:
    return Content(Fingerprint("b"), digest(letter), "upload", 1, 1, 2, may_replace=True)


class House:
    """A store, and gateways each with a mirror of its own."""

    def __init__(self, num_gateways: int = 1, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.mirrors = [Registry(self.store, MemoryBus()) for _ in range(num_gateways)]
        self.ledgers = [Ledger(self.store, MemoryBus(), mirror) for mirror in self.mirrors]

    async def seen(self) -> None:
        for mirror in self.mirrors:
            await mirror.refresh()

    async def fresh(self) -> dict[str, Digest]:
        """What a gateway that starts now finds."""
        registry = Registry(self.store, MemoryBus())
        await registry.refresh()
        return held(registry)

    async def life(self) -> RegistryLife:
        found = await self.store.get(keys.REGISTRY_LIFE, RegistryLife)
        assert found is not None
        return found.value


def held(registry: Registry) -> dict[str, Digest]:
    return {entry.name: entry.current for entry in registry.page("t", "", 2000) if isinstance(entry, AdapterRecord)}


async def test_what_a_gateway_knows_is_put_back_whole() -> None:
    house = House()
    ledger, mirror = house.ledgers[0], house.mirrors[0]
    await ledger.point("t", "a", content("a"))
    await ledger.point("t", "a", content("b"))
    await ledger.pin("t", "a", pinned=True)
    await ledger.alias("t", "prod", "a@v1")
    await house.seen()
    before = mirror.get("t", "a")
    house.store.empty()
    await house.seen()
    fresh = Registry(house.store, MemoryBus())
    await fresh.refresh()
    for registry in (mirror, fresh):
        alias = registry.alias("t", "prod")
        assert registry.get("t", "a") == before
        assert alias is not None
        assert alias.target == "a@v1"
    record = (await ledger.point("t", "a", content("c"))).record
    assert [version.version for version in record.versions] == [1, 2, 3]


async def test_of_many_gateways_each_finds_all_of_it_again() -> None:
    house = House(3)
    for number in range(1100):
        await house.ledgers[number % 3].point("t", f"n{number:04}", content("a"))
    await house.seen()
    house.store.empty()
    await asyncio.gather(*(mirror.look() for mirror in house.mirrors))
    await house.seen()
    assert [len(mirror) for mirror in house.mirrors] == [1100] * 3
    assert len(await house.fresh()) == 1100
    assert (await house.life()).number == 2


async def test_a_name_that_was_deleted_afterwards_stays_so_whoever_looks_late() -> None:
    house = House(2)
    for name in ("a", "b"):
        await house.ledgers[0].point("t", name, content(name))
    await house.seen()
    house.store.empty()
    await house.mirrors[0].refresh()
    await house.ledgers[0].delete("t", "a")
    await house.mirrors[1].refresh()
    assert held(house.mirrors[1]) == {"b": digest("b")} == await house.fresh()


async def test_who_has_read_further_adds_what_the_faster_did_not_know() -> None:
    house = House(2)
    await house.ledgers[0].point("t", "a", content("a"))
    await house.seen()
    await house.ledgers[1].point("t", "late", content("b"))
    house.store.empty()
    await house.mirrors[0].refresh()
    assert "late" not in held(house.mirrors[0])
    await house.seen()
    assert await house.fresh() == {"a": digest("a"), "late": digest("b")}
    await house.seen()
    assert held(house.mirrors[0]) == await house.fresh()


async def test_a_change_before_anybody_has_looked_waits_for_what_was_there() -> None:
    house = House()
    await house.ledgers[0].point("t", "a", content("a"))
    house.store.empty()
    record = (await house.ledgers[0].point("t", "a", content("b"))).record
    assert [(version.version, version.digest) for version in record.versions] == [(1, digest("a")), (2, digest("b"))]


async def test_what_is_lost_while_it_is_read_is_not_lost_in_memory() -> None:
    store = Emptied()
    house = House(store=store)
    await house.ledgers[0].point("t", "a", content("a"))
    await store.put(keys.REGISTRY_LIFE, RegistryLife(id=uuid4().hex))  # another one: it is read anew
    store.is_due = True
    with pytest.raises(Unavailable):
        await house.mirrors[0].refresh()
    assert held(house.mirrors[0]) == {"a": digest("a")}
