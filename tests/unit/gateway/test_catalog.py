"""What a gateway says of a name while it has heard of nothing yet: to come back, never that the name does not exist."""

import pytest

from infinilora.gateway.catalog import Catalog
from infinilora.gateway.fleet import Fleet
from infinilora.gateway.registry import Registry
from infinilora.protocol.control import Beat, EngineLoad
from infinilora.protocol.errors import AdapterNotFound, ModelNotFound, Unavailable
from infinilora.protocol.ids import Fingerprint
from infinilora.runtime.membership import Member
from infinilora.runtime.memory import MemoryBus, MemoryStore
from infinilora.runtime.rpc import Channels

ENGINE = Beat(
    id="engine-0",
    kind="engine",
    incarnation="1",
    seq=1,
    state="ready",
    address="127.0.0.1:1",
    model="small",
    base=Fingerprint("b"),
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
