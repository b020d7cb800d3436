"""The answers that are under way: each ends at its deadline, and all of them when the gateway stops.

Engines keep deadlines too, but an answer whose client reads nothing waits for nobody but that client. Knows neither
signals nor HTTP: whoever answers has the error told as any other.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from infinilora.protocol.errors import DeadlineExceeded, Unavailable


class UnderWay:
    """Of one gateway. Each answer is here for as long as it is made."""

    def __init__(self) -> None:
        self._leashes: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def one(self, deadline: float) -> AsyncIterator[None]:
        """An answer is made within the block, by one task.

        Raises from it DeadlineExceeded past `deadline`, on the clock of the loop, and Unavailable when `end` is called.
        """
        leash = asyncio.timeout_at(deadline)
        self._leashes.add(leash)
        try:
            async with leash:
                yield
        except TimeoutError:
            if not leash.expired():
                raise
            if leash in self._leashes:
                raise DeadlineExceeded("the request's deadline passed before it finished") from None
            raise Unavailable("this gateway stops before the answer is whole; ask again", retry_after_s=1.0) from None
        finally:
            self._leashes.discard(leash)

    def end(self) -> None:
        """Every answer under way fails now."""
        now = asyncio.get_running_loop().time()
        while self._leashes:
            self._leashes.pop().reschedule(now)
