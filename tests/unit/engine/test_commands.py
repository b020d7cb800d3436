"""What a coordinator may order of an engine."""

from typing import Any

import pytest

from infinilora.engine.worker import Commands, Engine
from infinilora.protocol import keys
from infinilora.protocol.control import Command, Drain, Forget, Stage
from infinilora.protocol.errors import InvalidRequest, StaleEpoch
from infinilora.protocol.ids import Digest, digest_of
from infinilora.runtime.memory import MemoryStore

ADAPTER = digest_of(b"a")


@pytest.fixture
def engine() -> Engine:
    unused: Any = None
    return Engine(unused, unused, unused, unused)


def order(epoch: int, body: Drain | Forget | Stage) -> Command:
    return Command(command_id="c", epoch=epoch, body=body)


async def test_no_command_undoes_the_drain_of_a_process_that_ends(engine: Engine) -> None:
    commands = Commands(engine, lambda digest: None)
    for stops, draining in ((False, True), (False, False), (True, False)):
        if stops:
            engine.stop()
        await commands.handle(order(1, Drain(draining=draining)))
        assert engine.is_draining == (draining or stops)


async def test_a_deleted_adapter_is_forgotten_by_order_of_the_leader_only(engine: Engine) -> None:
    forgotten: list[Digest] = []
    commands = Commands(engine, forgotten.append)
    await commands.handle(order(2, Forget(digest=ADAPTER)))
    with pytest.raises(StaleEpoch):
        await commands.handle(order(1, Forget(digest=ADAPTER)))
    assert forgotten == [ADAPTER]


async def test_an_order_that_an_engine_does_not_take_is_not_said_to_be_done(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="takes no stage command; wanted drain or forget"):
        await Commands(engine, lambda digest: None).handle(order(1, Stage(digest=ADAPTER)))


async def test_a_fresh_engine_refuses_a_leader_that_was_deposed_before_it_started(engine: Engine) -> None:
    store = MemoryStore()
    for owner in ("first", "second"):
        await store.acquire_lease(keys.LEADER, owner, 10)
        await store.release_lease(keys.LEADER, owner, 1 if owner == "first" else 2)
    commands = Commands(engine, lambda digest: None)
    await commands.fence.read(store)
    with pytest.raises(StaleEpoch, match="epoch 1 was deposed; this process has seen 2"):
        await commands.handle(order(1, Drain()))
    assert not engine.is_draining


async def test_while_the_store_is_away_an_engine_takes_orders_and_reads_the_epoch_later(engine: Engine) -> None:
    store, commands = MemoryStore(), Commands(engine, lambda digest: None)
    await store.acquire_lease(keys.LEADER, "first", 10)
    store.is_connected = False
    await commands.fence.read(store)
    assert not commands.fence.is_known
    store.is_connected = True
    await commands.fence.read(store)
    assert (commands.fence.is_known, commands.fence.epoch) == (True, 1)
