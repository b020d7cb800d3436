"""Tensor descriptors made on the device, which Hopper's copy engine (TMA) reads boxes of weights and rows by.

A page of weights becomes its own descriptor when an item is taken up: [its true rank, its width], so that what lies
beyond the rank reads as zero and no thread computes an address. A descriptor is 128 bytes of memory for each program,
which Triton asks for at a launch. Knows no kernel.
"""

# mypy: allow-untyped-calls

import contextvars
from collections.abc import Callable

import torch
import triton
from torch import Tensor

_UNIT_BYTES = 16
"""What the base and the row stride of a described tensor must be multiples of."""


def can_describe(rows: Tensor) -> bool:
    """Whether `rows` [T, columns], contiguous in its rows, can be read through a descriptor."""
    stride_bytes = rows.stride(0) * rows.element_size()
    return rows.data_ptr() % _UNIT_BYTES == 0 and stride_bytes > 0 and stride_bytes % _UNIT_BYTES == 0


def launch_with_scratch(launch: Callable[[], object], device: torch.device) -> None:
    """Launch a kernel that makes descriptors. Their memory is torch's: in a capture, of the graph's own pool.

    Triton keeps its allocator in a context variable: it is set in a copy of the caller's context, not in the caller's.
    """

    def scratch(size: int, _alignment: int, _stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    context = contextvars.copy_context()
    context.run(triton.set_allocator, scratch)
    context.run(launch)
