"""What a kernel's time is held against: bytes over bandwidth or multiply-adds over peak, whichever takes longest.

The limits are measured in the run, on the threads of the kernels' own pool, in pieces as short and as long as the
kernels are; so the ratio holds on any machine and mostly on a busy one. Every time is a short one of many short
repetitions, and a bandwidth the best of any length of piece: a floor that a kernel goes below was measured too high.

What was in use a while ago (the buffers of a link) comes from the last cache, and faster than memory reads: it counts
with its own bandwidth, together with what memory sends through that cache.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from infinilora.kernels.large_pages import large_pages

PIECES_BYTES = (1 << 20, 4 << 20, 16 << 20)
FAR_BYTES, NEAR_BYTES = 384 << 20, 16 << 20
"""More than the last cache holds; and as much as the buffers that lora_points takes in turn."""
FLOPS_STEPS = (300, 2000)


@dataclass(frozen=True, slots=True)
class Roof:
    """`bytes_per_s` from memory, `near_per_s` from the last cache."""

    bytes_per_s: float
    near_per_s: float
    flops_per_s: float

    def floor_s(self, num_bytes: float, flops: float, near_bytes: float = 0) -> float:
        passed = num_bytes + near_bytes
        return max(num_bytes / self.bytes_per_s, passed / self.near_per_s, flops / self.flops_per_s)


def best_of(times: Sequence[float]) -> float:
    """What the machine does when nobody else takes it: one of twenty is shorter.

    Not the shortest: of some thousand readings from memory a few took a third of what all the others did.
    """
    return sorted(times)[len(times) // 20]


def best_s(run: Callable[[int], object], copies: int, seconds: float) -> float:
    """`best_of` many runs, of copy after copy."""
    times = []
    end = time.perf_counter() + seconds
    i = 0
    while time.perf_counter() < end or i < 5:
        start = time.perf_counter()
        run(i % copies)
        times.append(time.perf_counter() - start)
        i += 1
    return best_of(times)


def measure_roof(library: ctypes.CDLL, seconds: float) -> Roof:
    """Bandwidths: pieces in turn of memory too big for the caches, or for those near a core. Peak: in registers."""
    memory = large_pages(FAR_BYTES).view(torch.float32).fill_(1)

    def read_per_s(area: int) -> float:
        return max(_read_per_s(library, memory, area, piece, seconds / len(PIECES_BYTES)) for piece in PIECES_BYTES)

    def multiply_per_s(steps: int) -> float:
        took = best_s(lambda _: library.il_measure_flops(steps), 1, seconds / len(FLOPS_STEPS))
        return float(library.il_measure_flops(steps)) / took

    return Roof(read_per_s(FAR_BYTES), read_per_s(NEAR_BYTES), max(multiply_per_s(steps) for steps in FLOPS_STEPS))


def _read_per_s(library: ctypes.CDLL, memory: torch.Tensor, area: int, piece: int, seconds: float) -> float:
    start = memory.data_ptr()
    took = best_s(lambda i: library.il_measure_read(start + i * piece, piece // 4), area // piece, seconds)
    return piece / took
