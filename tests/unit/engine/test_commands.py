"""What a coordinator may order of an engine."""

from typing import Any

from infinilora.engine.worker import Commands, Engine
from infinilora.protocol.control import Command, Drain


async def test_no_command_undoes_the_drain_of_a_process_that_ends() -> None:
    unused: Any = None
    engine = Engine(unused, unused, unused, unused)
    commands = Commands(engine)
    for stops, draining in ((False, True), (False, False), (True, False)):
        if stops:
            engine.stop()
        await commands.handle(Command(command_id="c", epoch=1, body=Drain(draining=draining)))
        assert engine.is_draining == (draining or stops)
