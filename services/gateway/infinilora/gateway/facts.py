"""Carries a worker's questions about a base's weights to an engine of that base, and the answer back. Opens neither.

The worker has no network and the gateway no weights. No engine of the base that answers is `unavailable`: the
adapter is not at fault, and may be registered when there is one.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from infinilora.gateway.fleet import Engine, Fleet
from infinilora.gateway.scratch import disk_errors
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import (
    DeadlineExceeded,
    InfiniLoraError,
    Internal,
    InvalidRequest,
    TooLarge,
    Unavailable,
)

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
MAX_ANSWER_BYTES = 4 << 30


class FactsRoad:
    """The road to the engines. Holds nothing between questions."""

    def __init__(self, fleet: Fleet, *, timeout_s: float) -> None:
        self._fleet = fleet
        self._timeout_s = timeout_s

    async def ask(self, card: BaseCard, request: Path, answer: Path) -> None:
        """Have the request file answered into `answer`. Raises Unavailable where no engine of the base does it now."""
        deadline = time.monotonic() + self._timeout_s
        tried: set[str] = set()
        reason = "none is alive"
        too_large: TooLarge | None = None
        while engine := self._fleet.pick(card.fingerprint, None, tried):
            tried.add(engine.key)
            try:
                return await self._ask(engine, request, answer, deadline)
            except TooLarge as error:  # another engine may take more
                too_large = error
            except (InvalidRequest, DeadlineExceeded, Internal) as error:
                logger.exception("facts not answered", extra={"engine_id": engine.id})
                raise Internal("the base's engine could not answer what this adapter needs; see the logs") from error
            except InfiniLoraError as error:
                reason = f"{engine.id}: {error.message}"
        if too_large is not None:
            raise TooLarge(
                f"this adapter needs more facts than an engine of '{card.name}' gives: {too_large.message}"
            ) from too_large
        raise Unavailable(
            f"this adapter needs facts of base model '{card.name}' that only an engine of it knows; no engine answers "
            f"({reason}); try again when one does",
            retry_after_s=2.0,
        )

    async def _ask(self, engine: Engine, request: Path, answer: Path, deadline: float) -> None:
        with disk_errors(), answer.open("wb") as file:
            num_bytes = 0
            async with aclosing(self._fleet.facts(engine, _pieces(request), deadline)) as pieces:
                async for piece in pieces:
                    num_bytes += len(piece)
                    if num_bytes > MAX_ANSWER_BYTES:
                        raise TooLarge(f"what the base model would answer is more than {MAX_ANSWER_BYTES} bytes")
                    await asyncio.to_thread(file.write, piece)


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece
