"""The memory that adapters lie in. Knows neither pages nor adapters."""

import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor


def adapter_memory(num_bytes: int) -> Tensor:
    """Bytes of no certain value in host memory: uint8 [num_bytes], from a page's start.

    What nobody has touched costs no memory: a capacity is a limit, not a reservation. It is in large pages where the
    system has them: a kernel reads short rows that lie far apart, each page of them once.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones are a file's: small
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
