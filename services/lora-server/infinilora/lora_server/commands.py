"""What the leading coordinator may order: stage, evict, pin, drain, forget. None breaks a lease."""

import logging
from typing import assert_never

from infinilora.pool.pool import AdapterPool
from infinilora.protocol.control import Command, CommandReply, Drain, Evict, Forget, Pin, Stage
from infinilora.runtime.fence import Fence

logger = logging.getLogger(__name__)


class Commands:
    """Of leaders that are none any more, none is taken."""

    def __init__(self, pool: AdapterPool) -> None:
        self._pool = pool
        self.fence = Fence()
        self._is_stopping = False
        self.is_draining = False

    async def handle(self, command: Command) -> CommandReply:
        self.fence.check(command)
        match command.body:
            case Stage(digest=digest, over=over):
                self._pool.stage(digest, over)
            case Evict(digest=digest):
                self._pool.evict(digest)
            case Pin(digest=digest, pinned=pinned):
                self._pool.pin(digest, pinned=pinned)
            case Forget(digest=digest):
                self._pool.forget(digest)
            case Drain(draining=draining):
                self._drain(draining=draining or self._is_stopping)
            case _:
                assert_never(command.body)
        logger.info("command", extra={"body": type(command.body).__name__, "epoch": command.epoch})
        return CommandReply(command_id=command.command_id)

    def stop(self) -> None:
        """The process is asked to end: drain, and no command undoes it."""
        self._is_stopping = True
        self._drain(draining=True)

    def _drain(self, *, draining: bool) -> None:
        self.is_draining = draining
        self._pool.drain(draining=draining)
