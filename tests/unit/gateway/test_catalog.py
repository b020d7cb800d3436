"""What a gateway says of a name that it cannot serve: not yet, or never again, and what to do about it."""

import msgspec
import pytest

from infinilora.gateway.catalog import Catalog
from infinilora.gateway.fleet import Fleet
from infinilora.gateway.plan import Target
from infinilora.gateway.registry import Registry
from infinilora.protocol.adapter import FINGERPRINT_VERSION
from infinilora.protocol.control import Beat, EngineLoad
from infinilora.protocol.errors import AdapterInvalid, AdapterNotFound, ModelNotFound, Unavailable
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.membership import Member
from infinilora.runtime.memory import MemoryBus, MemoryStore
from infinilora.runtime.rpc import Channels
from support.cards import make_card

BASE = Fingerprint("b")
ENGINE = Beat(
    id="engine-0",
    kind="engine",
    incarnation="1",
    seq=1,
    state="ready",
    address="127.0.0.1:1",
    model="small",
    base=BASE,
    load=EngineLoad(),
)


async def test_no_name_is_unknown_to_a_gateway_that_has_just_begun() -> None:
    members: list[Member] = []
    registry = Registry(MemoryStore(), MemoryBus())
    async with Channels(token="of the test") as channels:
        catalog = Catalog(Fleet(lambda: members, channels), registry, {})
        for name in ("small", "base:small", "pirate"):
            with pytest.raises(Unavailable):
                catalog.resolve(name, "t")
        await registry.refresh()
        for name in ("small", "base:small", "pirate"):
            with pytest.raises(Unavailable):
                catalog.resolve(name, "t")
        members.append(Member(ENGINE, 0.0))
        assert catalog.resolve("small", "t").base == "b"
        with pytest.raises(ModelNotFound):
            catalog.resolve("base:other", "t")
        with pytest.raises(AdapterNotFound):
            catalog.resolve("pirate", "t")


async def test_a_base_model_that_was_not_heard_yet_is_neither_unknown_nor_left_out() -> None:
    has_heard_all = False
    registry = Registry(MemoryStore(), MemoryBus())
    await registry.refresh()
    async with Channels(token="of the test") as channels:
        fleet = Fleet(lambda: [Member(ENGINE, 0.0)], channels, has_heard_all=lambda: has_heard_all)
        catalog = Catalog(fleet, registry, {})
        assert catalog.resolve("small", "t").base == catalog.base_for_adapter("small") == "b"
        for name in ("large", "base:large"):
            with pytest.raises(Unavailable):
                catalog.resolve(name, "t")
        for base in ("large", None):
            with pytest.raises(Unavailable):
                catalog.base_for_adapter(base)
        has_heard_all = True
        with pytest.raises(ModelNotFound):
            catalog.resolve("base:large", "t")
        with pytest.raises(ModelNotFound):
            catalog.base_for_adapter("large")
        assert catalog.base_for_adapter(None) == "b"


async def test_an_adapter_proven_against_a_sample_of_its_base_is_to_be_registered_again() -> None:
    members: list[Member] = []
    old = make_card("llama")
    new = msgspec.structs.replace(old, fingerprint_version=FINGERPRINT_VERSION)
    adapter = Target(requested="pirate", base=BASE, digest=Digest("sha256:d"), name="pirate")
    async with Channels(token="of the test") as channels:
        catalog = Catalog(Fleet(lambda: members, channels), Registry(MemoryStore(), MemoryBus()), {})
        with pytest.raises(
            AdapterInvalid, match=r"'pirate'.*'tiny-llama'.*version 1, .*wanted 2: delete it and register"
        ):
            catalog.check_base(adapter, old)
        catalog.check_base(adapter, new)  # its engines are away, and may come back
        catalog.check_base(Target(requested="small", base=BASE), old)
        members.append(Member(ENGINE, 0.0))
        catalog.check_base(adapter, old)  # engines and gateways are replaced in either order


async def test_an_alias_hides_no_base_model_that_is_served_by_its_name() -> None:
    other = msgspec.structs.replace(ENGINE, id="engine-1", model="large", base=Fingerprint("l"))
    members = [Member(ENGINE, 0.0), Member(other, 0.0)]
    registry = Registry(MemoryStore(), MemoryBus())
    await registry.refresh()
    async with Channels(token="of the test") as channels:
        catalog = Catalog(Fleet(lambda: members, channels), registry, {"small": "large", "big": "large", "gone": "no"})
        for name, base in (("small", "b"), ("base:small", "b"), ("big", "l"), ("large", "l")):
            assert catalog.resolve(name, "t").base == base
        assert {entry.name: entry.base for entry in catalog.served_bases()} == {"small": "b", "big": "l", "large": "l"}
        assert catalog.known_bases() == {"small": "b", "big": "l", "large": "l", "gone": None}
