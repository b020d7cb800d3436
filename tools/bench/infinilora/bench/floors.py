"""What this machine can do at best, measured in the run: memory bandwidth, fp32 multiply-adds, memcpy.

A benchmark's floor is bytes over bandwidth or operations over peak, whichever takes longer.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from infinilora.kernels import cpu_ops, native

FLOPS_STEPS = 200_000


@dataclass(frozen=True, slots=True)
class Machine:
    """Best of several tries, with `threads` threads."""

    threads: int
    read_bytes_per_s: float
    flops_per_s: float

    def floor_s(self, *, num_bytes: float, flops: float) -> float:
        """The least time that reading num_bytes and doing flops can take."""
        return max(num_bytes / self.read_bytes_per_s, flops / self.flops_per_s)


def measure(threads: int) -> Machine:
    """About two seconds."""
    return Machine(threads, read_bandwidth(threads), fp32_peak(threads))


def _best(run: Callable[[], object], *, tries: int) -> float:
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def read_bandwidth(threads: int, *, num_bytes: int = 512 << 20, tries: int = 8) -> float:
    """Bytes per second of summing arrays far larger than any cache, one per thread."""
    arrays = [np.ones(num_bytes // threads // 4, dtype=np.float32) for _ in range(threads)]

    def read(array: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> None:
        np.dot(array[: len(array) // 2], array[len(array) // 2 :])  # two streams of reads, no writes

    def together() -> None:
        workers = [threading.Thread(target=read, args=(a,)) for a in arrays]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return num_bytes / _best(together, tries=tries)


def fp32_peak(threads: int, *, tries: int = 8) -> float:
    """FLOP/s of multiply-adds in registers on every thread; of a matrix product where no native library is."""
    library = native.load()
    if library is None:
        return _matmul_peak(threads, tries=tries)
    cpu_ops.set_threads(threads)
    flops = library.il_measure_flops(FLOPS_STEPS)
    return float(flops) / _best(lambda: library.il_measure_flops(FLOPS_STEPS), tries=tries)


def _matmul_peak(threads: int, *, size: int = 1536, tries: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    seconds = _best(lambda: torch.mm(a, b, out=out), tries=tries)
    torch.set_num_threads(before)
    return 2 * size**3 / seconds
