"""The coordinator's mirror: what a store has lost is not taken for what has no name any more."""

import pytest

from infinilora.coordinator.registry import Registry
from infinilora.protocol import keys
from infinilora.protocol.adapter import RegistryLife
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.memory import MemoryStore
from support.emptied_store import Emptied
from support.registered import register

BASE = Fingerprint("b")
A, B = Digest("sha256:" + "a" * 64), Digest("sha256:" + "b" * 64)


async def begin(store: MemoryStore, number: int) -> None:
    """As gateways do: the first time, and when they have put everything back."""
    await store.put(keys.REGISTRY_LIFE, RegistryLife(id="r", number=number))


async def with_a(store: MemoryStore) -> Registry:
    """A mirror that has read `a` out of a registry that has begun."""
    registry = Registry(store)
    await begin(store, 1)
    await register(store, "a", A, BASE)
    await registry.refresh()
    return registry


async def test_a_registry_that_is_gone_is_waited_for_and_keeps_its_names_meanwhile() -> None:
    store = MemoryStore()
    registry = await with_a(store)
    store.empty()
    for _ in range(2):
        with pytest.raises(Unavailable, match="puts it back"):
            await registry.refresh()
        assert registry.digests() == {A}


async def test_what_was_put_back_is_read_anew_though_its_numbers_are_no_lower() -> None:
    store = MemoryStore()
    registry = await with_a(store)
    store.empty()
    await register(store, "b", B, BASE)
    await begin(store, 2)
    await registry.refresh()
    assert registry.digests() == {B}


async def test_what_is_lost_while_it_is_read_leaves_nothing_that_could_be_acted_on() -> None:
    store = Emptied()
    registry = await with_a(store)
    await register(store, "b", B, BASE)
    store.is_due = True
    with pytest.raises(Unavailable):
        await registry.refresh()
    await register(store, "a", A, BASE)
    await begin(store, 2)
    await registry.refresh()
    assert registry.digests() == {A}


async def test_a_registry_of_older_gateways_has_no_life_and_is_read() -> None:
    store = MemoryStore()
    registry = Registry(store)
    await register(store, "a", A, BASE)
    await registry.refresh()
    assert registry.digests() == {A}
