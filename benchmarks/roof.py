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
from dataclasses import dataclass, replace

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


class RoofMeter:
    """Measures the limits. Bandwidths: of pieces in turn of memory too big for the caches, or for those near a core.

    Memory's is measured anew beside whatever is held against it: on a shared host it moves from minute to minute.
    """

    def __init__(self, library: ctypes.CDLL, seconds: float) -> None:
        self._library = library
        self._memory = large_pages(FAR_BYTES).view(torch.float32).fill_(1)
        flops_per_s = max(self._multiply_per_s(steps, seconds / len(FLOPS_STEPS)) for steps in FLOPS_STEPS)
        self.roof = Roof(self._read_per_s(FAR_BYTES, seconds), self._read_per_s(NEAR_BYTES, seconds), flops_per_s)

    def beside(self, run: Callable[[], float], seconds: float) -> tuple[float, Roof]:
        """What `run` says, and the roof with memory's better bandwidth of just before and just after."""
        before = self._read_per_s(FAR_BYTES, seconds)
        found = run()
        return found, replace(self.roof, bytes_per_s=max(before, self._read_per_s(FAR_BYTES, seconds)))

    def _read_per_s(self, area: int, seconds: float) -> float:
        def of(piece: int) -> float:
            start, read = self._memory.data_ptr(), self._library.il_measure_read
            took = best_s(lambda i: read(start + i * piece, piece // 4), area // piece, seconds / len(PIECES_BYTES))
            return piece / took

        return max(map(of, PIECES_BYTES))

    def _multiply_per_s(self, steps: int, seconds: float) -> float:
        """In registers."""
        took = best_s(lambda _: self._library.il_measure_flops(steps), 1, seconds)
        return float(self._library.il_measure_flops(steps)) / took
