"""Host memory that kernels read a lot of: adapters and weights. Knows neither."""

import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
_LINE = 64


def large_pages(num_bytes: int) -> Tensor:
    """Bytes of no certain value in host memory: uint8 [num_bytes], from a page's start.

    What nobody has touched costs no memory: a capacity is a limit, not a reservation. It is in large pages where the
    system has them: a kernel reads short rows that lie far apart, each page of them once, and of long ones the
    processor fetches ahead up to a page's end.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones are a file's: small
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


class SideBySide:
    """Tensors that come once and stay, one behind the other in large pages: most are no whole number of them.

    Memory goes chunk by chunk, when the last tensor in it does. Not for several threads at once.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of no certain value, from the start of a cache line."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._left):
            self._left = large_pages(max(num_bytes, self._chunk_bytes))
        found, self._left = self._left[:num_bytes], self._left[-(-num_bytes // _LINE) * _LINE :]
        return found.view(dtype).view(tuple(shape))
