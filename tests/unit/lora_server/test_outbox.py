import asyncio

from infinilora.lora_server.outbox import Message, Outbox
from infinilora.pool.pool import LeaseState
from infinilora.protocol.errors import AdapterFailed
from infinilora.protocol.ids import Digest

A = Digest("sha256:" + "a" * 64)


def state(layers: int, *, generation: int = 7) -> LeaseState:
    return LeaseState(A, slot=3, slot_generation=generation, layer_sites=(1, 2, 0), layers_ready=layers)


def kinds(messages: list[Message]) -> list[str | None]:
    return [message.WhichOneof("message") for message in messages]


async def test_a_grant_is_said_once_and_then_only_layers() -> None:
    outbox = Outbox(asyncio.get_running_loop())
    outbox.put(state(0))
    first = await outbox.take()
    assert kinds(first) == ["granted"]
    assert tuple(first[0].granted.layer_sites) == (1, 2, 0)
    outbox.put(state(2))
    assert kinds(await outbox.take()) == ["layers"]


async def test_a_slow_reader_gets_the_newest_state_only() -> None:
    outbox = Outbox(asyncio.get_running_loop())
    for layers in range(4):
        outbox.put(state(layers))
    messages = await outbox.take()
    assert kinds(messages) == ["granted", "layers"]
    assert messages[1].layers.count == 3


async def test_another_tenancy_is_a_new_grant() -> None:
    outbox = Outbox(asyncio.get_running_loop())
    outbox.put(state(3))
    await outbox.take()
    outbox.put(state(1, generation=8))
    messages = await outbox.take()
    assert kinds(messages) == ["granted", "layers"]
    assert messages[0].granted.slot_generation == 8


async def test_a_lost_lease_carries_code_and_words_and_a_later_one_is_granted_anew() -> None:
    outbox = Outbox(asyncio.get_running_loop())
    outbox.put(state(3))
    await outbox.take()
    outbox.put(LeaseState(A, error=AdapterFailed("block 3 is corrupt")))
    (lost,) = await outbox.take()
    assert (lost.failed.code, lost.failed.message) == ("adapter_failed", "block 3 is corrupt")
    outbox.put(state(3))
    assert kinds(await outbox.take()) == ["granted", "layers"]


async def test_what_is_unsent_of_a_lease_given_up_is_void() -> None:
    outbox = Outbox(asyncio.get_running_loop())
    outbox.put(state(3))
    outbox.forget(A)
    outbox.close()
    assert await outbox.take() == []
    assert await outbox.take() == []


async def test_it_is_filled_from_other_threads() -> None:
    outbox = Outbox(asyncio.get_running_loop())
    waiting = asyncio.get_running_loop().run_in_executor(None, outbox.put, state(1))
    async with asyncio.timeout(5):
        assert kinds(await outbox.take()) == ["granted", "layers"]
    await waiting
