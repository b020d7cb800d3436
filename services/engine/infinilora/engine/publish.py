"""Puts the base card and the tokenizer's files into the store, where gateway and ingest read them."""

import asyncio
import logging
from pathlib import Path

import msgspec

from infinilora.protocol import keys
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import Unavailable
from infinilora.runtime.blobs import BlobStore

logger = logging.getLogger(__name__)

_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)


def publish(blobs: BlobStore, card: BaseCard, directory: Path) -> None:
    """Files first, the card last: whoever sees the card finds its files. Blocking; raises Unavailable."""
    for name in card.tokenizer_files:
        blobs.put(keys.base_file(card.fingerprint, name), (directory / name).read_bytes())
    blobs.put(keys.base_card(card.fingerprint), msgspec.json.encode(card))


async def keep_publishing(blobs: BlobStore, card: BaseCard, directory: Path) -> None:
    """Until it succeeded once. An engine serves on while the store is away."""
    tries = 0
    while True:
        try:
            await asyncio.to_thread(publish, blobs, card, directory)
        except Unavailable as error:
            pause = _RETRY_S[min(tries, len(_RETRY_S) - 1)]
            logger.warning("base card not published yet", extra={"error": error.message, "retry_s": pause})
            await asyncio.sleep(pause)
            tries += 1
        else:
            logger.info("base card published", extra={"fingerprint": card.fingerprint, "tries": tries + 1})
            return
