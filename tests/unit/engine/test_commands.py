"""What a coordinator may order of an engine."""

from typing import Any

import pytest

from infinilora.engine.worker import Commands, Engine
from infinilora.protocol.control import Command, Drain, Forget, Stage
from infinilora.protocol.errors import InvalidRequest, StaleEpoch
from infinilora.protocol.ids import Digest, digest_of

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
