"""The host tier: whole adapters in this machine's memory, between the device's and the disk. At most so many bytes.

One stretch of memory, taken at the start and handed out in pages: a layer is one run, from a page's start, and one copy
to the device. Where there is a CUDA device its driver is told of the stretch (pinned), so that copies need no other
buffer. Bytes were verified as they came in and are this process's own: they are not verified again. The least recently
used adapter goes first, never one that is open. Thread-safe.
"""

import logging
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from infinilora.kernels.large_pages import large_pages
from infinilora.pool.pages import PAGE_BYTES, PageArena, Run
from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.ids import Digest
from infinilora.weights.packed import PackedHeader, packed_ranges

logger = logging.getLogger(__name__)


class HostAdapter:
    """One adapter's layers. Whoever opened it may read them until `HostTier.close`."""

    def __init__(self, digest: Digest, whole: PackedHeader, runs: Sequence[Run]) -> None:
        self.digest = digest
        self.whole = whole
        """The header of the packed file, of which this may be a share."""
        self.runs = runs
        self.num_users = 1

    def layer(self, layer: int) -> Tensor:
        """uint8 [bytes of the layer's sites], as they lie in the packed file."""
        return self.runs[layer].data


class HostTier:
    """`_whole` is in order of use, the next to go first. A page is free or of an adapter that is whole or open."""

    def __init__(self, max_bytes: int, *, is_pinned: bool) -> None:
        if max_bytes < PAGE_BYTES:
            raise InvalidRequest(f"host_bytes is {max_bytes}; wanted 0, or at least one page of {PAGE_BYTES}")
        self._lock = threading.Lock()
        self._whole: dict[Digest, HostAdapter] = {}
        memory = large_pages(max_bytes)
        self._arena = PageArena(max_bytes, memory=memory)
        if is_pinned:
            _pin(memory)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._arena.capacity_bytes - self._arena.free_bytes

    def open(self, digest: Digest) -> HostAdapter | None:
        """The adapter, now the most recently used; None if it is not here."""
        with self._lock:
            found = self._whole.pop(digest, None)
            if found:
                self._whole[digest] = found
                found.num_users += 1
            return found

    def begin(self, digest: Digest, header: PackedHeader, whole: PackedHeader | None = None) -> HostAdapter | None:
        """Memory for an adapter, to be filled, and then `keep` and `close`; None where no room can be made.

        `whole`: the packed file's own header, where `header` is of a share of it.
        """
        layers = range(header.manifest.num_layers + 1)
        sizes = [sum(num_bytes for _, _, num_bytes in packed_ranges(header, layer)) for layer in layers]
        with self._lock:
            if digest in self._whole:
                return None
            runs = self._make_room(sizes)
        return None if runs is None else HostAdapter(digest, whole or header, runs)

    def keep(self, adapter: HostAdapter) -> None:
        """All its bytes are there, and verified. If another load was first, this one goes when it is closed."""
        with self._lock:
            self._whole.setdefault(adapter.digest, adapter)

    def close(self, adapter: HostAdapter) -> None:
        """The caller reads it no more; one that is not kept, or was forgotten, goes with its last reader."""
        with self._lock:
            adapter.num_users -= 1
            if not adapter.num_users and self._whole.get(adapter.digest) is not adapter:
                self._arena.free(adapter.runs)

    def forget(self, digest: Digest) -> bool:
        """Nobody will ask for it again. False if it was not here."""
        with self._lock:
            adapter = self._whole.pop(digest, None)
            if adapter and not adapter.num_users:
                self._arena.free(adapter.runs)
            return adapter is not None

    def check(self) -> None:
        """Raise AssertionError unless every page is accounted for and nothing is open."""
        with self._lock:
            self._arena.check(run for adapter in self._whole.values() for run in adapter.runs)
            assert not any(a.num_users for a in self._whole.values())

    def _make_room(self, sizes: Sequence[int]) -> tuple[Run, ...] | None:
        idle = [adapter for adapter in self._whole.values() if not adapter.num_users]
        may_be_freed = sum(run.pages for adapter in idle for run in adapter.runs) * self._arena.page_bytes
        if self._arena.cost(sizes) > self._arena.free_bytes + may_be_freed:
            return None
        for adapter in idle:
            if runs := self._arena.allocate(sizes):
                return runs
            del self._whole[adapter.digest]
            self._arena.free(adapter.runs)
        return self._arena.allocate(sizes)


def _pin(memory: Tensor) -> None:
    """For the life of the process."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]
    if int(error):
        logger.warning("host memory not pinned; copies are slower", extra={"bytes": memory.numel(), "cuda": int(error)})
