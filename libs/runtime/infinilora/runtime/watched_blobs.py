"""A blob store, and whether it answers: what a process tells of it in its beats, metrics and readiness.

What the latest call found is what is so. While the store is away a process that has what it serves calls it no more,
so `ask_while_away` does, for a single byte. Knows no adapter.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from infinilora.protocol.errors import StoreFull, Unavailable
from infinilora.runtime.blob_store import Blob, BlobStore, Changed

logger = logging.getLogger(__name__)

ASK_S = 1.0
"""Seconds between two looks whether it is away, and between two questions while it is."""
STORE = "store"
"""Its name among what may be away."""


class WatchedBlobs:
    """The store behind it, call by call. Any thread.

    A store that does not let us in does not answer; one that has no room, or not this object, does.
    """

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self.answers = True

    @property
    def away(self) -> tuple[str, ...]:
        """`store` while it does not answer, for a beat."""
        return () if self.answers else (STORE,)

    @property
    def most_ahead_bytes(self) -> int:
        return self._blobs.most_ahead_bytes

    async def ask_while_away(self, name: str, *, every_s: float = ASK_S) -> None:
        """Ask for a byte of this object while the store does not answer. Runs for ever."""
        while True:
            await asyncio.sleep(every_s)
            if not self.answers:
                with suppress(FileNotFoundError, Unavailable):
                    await asyncio.to_thread(self.get_range, name, 0, 1)

    def put_file(self, name: str, path: Path, *, if_absent: bool = False) -> bool:
        with self._noted():
            return self._blobs.put_file(name, path, if_absent=if_absent)

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        with self._noted():
            return self._blobs.put(name, data, if_absent=if_absent)

    def get(self, name: str, *, etag: str | None = None) -> bytes:
        with self._noted():
            return self._blobs.get(name, etag=etag)

    def get_range(self, name: str, offset: int, num_bytes: int, *, etag: str | None = None) -> bytes:
        with self._noted():
            return self._blobs.get_range(name, offset, num_bytes, etag=etag)

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        with self._noted():
            return self._blobs.read_into(name, offset, into)

    def stat(self, name: str) -> Blob | None:
        with self._noted():
            return self._blobs.stat(name)

    def list(self, prefix: str = "") -> list[str]:
        with self._noted():
            return self._blobs.list(prefix)

    def delete(self, name: str) -> None:
        with self._noted():
            self._blobs.delete(name)

    def deletion(self, name: str, *, within_s: int) -> Callable[[], None]:
        """Not noted: one that comes too late fails whatever the store does."""
        return self._blobs.deletion(name, within_s=within_s)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, Changed, StoreFull):
            self._note(answers=True)
            raise
        except Unavailable as error:
            self._note(answers=False, why=error.message)
            raise
        self._note(answers=True)

    def _note(self, *, answers: bool, why: str = "") -> None:
        if answers == self.answers:
            return
        self.answers = answers
        if answers:
            logger.info("object store answers again")
        else:
            logger.warning("object store is away", extra={"reason": why})
