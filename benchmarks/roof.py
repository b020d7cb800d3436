"""What a kernel's time is held against: bytes over bandwidth or multiply-adds over peak, whichever takes longer.

Both limits are measured in the run, on the threads of the kernels' own pool, in pieces as short as the kernels are; so
the ratio holds on any machine and mostly on a busy one. Every time is the best of many short repetitions.
"""

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

PIECE_BYTES, PIECES = 4 << 20, 96
FLOPS_STEPS = 2000


@dataclass(frozen=True, slots=True)
class Roof:
    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


def best_s(run: Callable[[int], object], copies: int, seconds: float) -> float:
    """The shortest of many runs, of copy after copy: what the machine does when nobody else takes it."""
    times = []
    end = time.perf_counter() + seconds
    i = 0
    while time.perf_counter() < end or i < 5:
        start = time.perf_counter()
        run(i % copies)
        times.append(time.perf_counter() - start)
        i += 1
    return statistics.fmean(sorted(times)[:3])


def measure_roof(library: ctypes.CDLL, seconds: float) -> Roof:
    """Bandwidth: 4 MiB at a time of memory too big for the caches near a core. Peak: multiply-adds in registers."""
    memory = torch.ones(PIECE_BYTES // 4 * PIECES)
    start = memory.data_ptr()
    read_s = best_s(lambda i: library.il_measure_read(start + i * PIECE_BYTES, PIECE_BYTES // 4), PIECES, seconds)
    flops = library.il_measure_flops(FLOPS_STEPS)
    return Roof(PIECE_BYTES / read_s, flops / best_s(lambda _: library.il_measure_flops(FLOPS_STEPS), 1, seconds))
