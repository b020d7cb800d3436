"""The host tier: whole adapters in this machine's memory, between the device's and the disk. At most so many bytes.

Bytes lie as in the packed file's data section, from a page's start, so that a layer is one range and one copy to the
device; where there is a CUDA device its driver is told of them (pinned), so that the copy needs no other buffer.
They were verified as they came in and are this process's own: they are not verified again. The least recently used go
first, never one that is open. Thread-safe.
"""

import logging
import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

from infinilora.protocol.ids import Digest
from infinilora.weights.packed import PackedHeader

logger = logging.getLogger(__name__)


class HostAdapter:
    """One adapter's bytes: those of `header`'s data section. Whoever opened it may read until `HostTier.close`."""

    def __init__(self, digest: Digest, header: PackedHeader, data: Tensor) -> None:
        self.digest = digest
        self.header = header
        self._data = data
        self._view = data.numpy().data
        self.num_users = 1

    @property
    def num_bytes(self) -> int:
        return self._data.numel()

    def span(self, start: int, num_bytes: int) -> memoryview:
        """Bytes [start, start + num_bytes) of the packed file."""
        at = start - self.header.data_start
        return self._view[at : at + num_bytes]

    @property
    def address(self) -> int:
        return self._data.data_ptr()


class HostTier:
    """`_whole` is in order of use, the next to go first. `used_bytes` counts all that has not been given back."""

    def __init__(self, max_bytes: int, *, is_pinned: bool) -> None:
        self._max_bytes = max_bytes
        self._is_pinned = is_pinned
        self._lock = threading.Lock()
        self._whole: dict[Digest, HostAdapter] = {}
        self.used_bytes = 0

    def open(self, digest: Digest) -> HostAdapter | None:
        """The adapter, now the most recently used; None if it is not here."""
        with self._lock:
            found = self._whole.pop(digest, None)
            if found:
                self._whole[digest] = found
                found.num_users += 1
            return found

    def begin(self, digest: Digest, header: PackedHeader) -> HostAdapter | None:
        """Memory for an adapter, to be filled, and then `keep` and `close`; None where no room can be made."""
        num_bytes = header.manifest.data_bytes
        with self._lock:
            if not num_bytes or digest in self._whole or not self._make_room(num_bytes):
                return None
            self.used_bytes += num_bytes
        data = _pages(num_bytes)
        if self._is_pinned:
            _pin(data)
        return HostAdapter(digest, header, data)

    def keep(self, adapter: HostAdapter) -> None:
        """All its bytes are there, and verified. If another load was first, this one goes when it is closed."""
        with self._lock:
            self._whole.setdefault(adapter.digest, adapter)

    def close(self, adapter: HostAdapter) -> None:
        """The caller reads it no more; one that is not kept, or was forgotten, goes with its last reader."""
        with self._lock:
            adapter.num_users -= 1
            if not adapter.num_users and self._whole.get(adapter.digest) is not adapter:
                self._give_back(adapter)

    def forget(self, digest: Digest) -> bool:
        """Nobody will ask for it again. False if it was not here."""
        with self._lock:
            adapter = self._whole.pop(digest, None)
            if adapter and not adapter.num_users:
                self._give_back(adapter)
            return adapter is not None

    def check(self) -> None:
        """Raise AssertionError unless the cap holds and nothing is open."""
        with self._lock:
            assert self.used_bytes <= self._max_bytes, self.used_bytes
            assert self.used_bytes == sum(a.num_bytes for a in self._whole.values()), self.used_bytes
            assert not any(a.num_users for a in self._whole.values())

    def _make_room(self, num_bytes: int) -> bool:
        idle = [adapter for adapter in self._whole.values() if not adapter.num_users]
        if self.used_bytes - sum(a.num_bytes for a in idle) + num_bytes > self._max_bytes:
            return False
        for adapter in idle:
            if self.used_bytes + num_bytes <= self._max_bytes:
                break
            del self._whole[adapter.digest]
            self._give_back(adapter)
        return True

    def _give_back(self, adapter: HostAdapter) -> None:
        self.used_bytes -= adapter.num_bytes
        if self._is_pinned:
            _unpin(adapter.address)


def _pages(num_bytes: int) -> Tensor:
    """Memory of our own from a page's start: uint8 [num_bytes]."""
    pages = mmap.mmap(-1, num_bytes)
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer faults while it fills
    return torch.frombuffer(pages, dtype=torch.uint8)


def _pin(data: Tensor) -> None:
    error = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)  # type: ignore[no-untyped-call]
    if int(error):
        logger.warning("host memory not pinned; copies are slower", extra={"bytes": data.numel(), "cuda": int(error)})


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
