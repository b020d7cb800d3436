"""A receiver's side of leadership: commands of a leader that was deposed are refused.

A process that has just started has seen no leader yet, so it reads the present epoch before it takes commands; while
the store is away it takes what comes, and reads it later.
"""

import logging

from infinilora.protocol import keys
from infinilora.protocol.control import Command
from infinilora.protocol.errors import Internal, StaleEpoch, Unavailable
from infinilora.runtime.store import Store

logger = logging.getLogger(__name__)


class Fence:
    """`epoch` is the highest seen, from a command or from the store."""

    def __init__(self) -> None:
        self.epoch = 0
        self.is_known = False
        """The store has been read."""

    async def read(self, store: Store) -> None:
        """Learn the present epoch, once."""
        if self.is_known:
            return
        try:
            self.epoch = max(self.epoch, await store.counter(keys.EPOCH))
            self.is_known = True
        except Unavailable as error:
            logger.warning("epoch not read yet", extra={"reason": error.message})
        except Internal as error:  # a person must mend it
            logger.error("epoch unreadable", extra={"reason": error.message})  # noqa: TRY400 - no traceback

    def check(self, command: Command) -> None:
        """Raises StaleEpoch for a command of a leader that is none any more."""
        if command.epoch < self.epoch:
            raise StaleEpoch(f"epoch {command.epoch} was deposed; this process has seen {self.epoch}")
        self.epoch = command.epoch
