"""The bases that have no engine, as a gateway knows them."""

from infinilora.gateway.asleep import Asleep
from infinilora.protocol import keys
from infinilora.protocol.ids import Fingerprint
from infinilora.runtime.memory import MemoryStore


async def test_a_store_that_has_lost_everything_does_not_say_that_a_base_woke() -> None:
    store, base = MemoryStore(), Fingerprint("b")
    asleep = Asleep(store)
    await asleep.look()
    assert asleep.models == {}
    await store.put(keys.ASLEEP, {base: "m"})
    await asleep.look()
    store.empty()
    await asleep.look()
    assert asleep.models == {base: "m"}
    await store.put(keys.ASLEEP, {})
    await asleep.look()
    assert asleep.models == {}
