"""What the leading coordinator may order: stage, evict, pin, drain, forget. None breaks a lease."""

import logging
from typing import assert_never

from infinilora.pool.pool import AdapterPool
from infinilora.protocol import keys
from infinilora.protocol.control import Command, CommandReply, Drain, Evict, Forget, Pin, Stage
from infinilora.protocol.errors import StaleEpoch, Unavailable
from infinilora.runtime.store import Store

logger = logging.getLogger(__name__)


class Commands:
    """`epoch` is the highest seen, from a command or from the store; lower ones are refused."""

    def __init__(self, pool: AdapterPool) -> None:
        self._pool = pool
        self.epoch = 0
        self._knows_epoch = False
        self._is_stopping = False
        self.is_draining = False

    async def read_epoch(self, store: Store) -> None:
        """Learn the present epoch, once; without a store, serve on and learn it later."""
        if self._knows_epoch:
            return
        try:
            self.epoch = max(self.epoch, await store.counter(keys.EPOCH))
            self._knows_epoch = True
        except Unavailable as error:
            logger.warning("epoch not read yet", extra={"reason": error.message})

    async def handle(self, command: Command) -> CommandReply:
        if command.epoch < self.epoch:
            raise StaleEpoch(f"epoch {command.epoch} was deposed; this server has seen {self.epoch}")
        self.epoch = command.epoch
        match command.body:
            case Stage(digest=digest):
                self._pool.stage(digest)
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
