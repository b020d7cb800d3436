"""Prints how often memory was asked for while calls of the native library were made again and again, as JSON.

A program: with `counted_malloc.cpp` loaded before the C library, in a process of its own. `python counted_calls.py N`.
"""

import ctypes
import json
import sys
from collections.abc import Callable

import torch

from infinilora.kernels import cpu_ops, native
from infinilora.kernels.abi import AttentionCall
from infinilora.kernels.batch import MOE_DOWN, MOE_GATE_UP, Part, segment_table
from infinilora.kernels.slot_kernels import SlotKernels

ROWS, COLS, EXPERTS, PICKS, RANK, DENSE = 600, 64, 8, 4, 16, 1
WARM_UP = 20


class Step:
    """A planned step of a LoRA server with an adapter on three sites."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._compute = library.il_step_compute
        self._kernels = SlotKernels(num_slots=2, num_layers=1, threads=2)
        routed = Part(torch.ones(EXPERTS, RANK, COLS), torch.ones(EXPERTS, RANK, COLS), 1.0, 0)
        dense = Part(torch.ones(RANK, COLS), torch.ones(RANK, COLS), 1.0, 0)
        for site, part in ((DENSE, dense), (MOE_GATE_UP, routed), (MOE_DOWN, routed)):
            self._kernels.bind(1, 0, site, (part,), COLS, COLS)
        step = self._kernels.native_step()
        assert step is not None
        step.shut(1)
        step.load(9, segment_table([(0, ROWS, 1)]), ready_layers=1, version=1)
        self._step = step
        self._x, self._out = torch.ones(ROWS, PICKS * COLS), torch.ones(ROWS, PICKS * COLS)
        self._ids = torch.randint(0, EXPERTS, (ROWS, PICKS), dtype=torch.int32)
        self._named = torch.cat([torch.arange(ROWS, dtype=torch.int32)[:, None], self._ids], 1)
        self._weights = torch.ones(ROWS, PICKS + 1)

    def call(self, site: int, rows: int, *, named: bool = False) -> Callable[[], int]:
        """A site call, as the link's ring makes it."""
        wide_in, wide_out = (PICKS if site == wide else 1 for wide in (MOE_DOWN, MOE_GATE_UP))
        ids = self._named if named else self._ids
        at, topk = (None, 0) if site == DENSE else (ids.data_ptr(), ids.shape[1])
        shape = 9, 0, site, 0, rows, wide_in * COLS, wide_out * COLS, 0, 0, topk, int(named), None, 0
        tensors = self._x.data_ptr(), at, self._weights.data_ptr(), self._out.data_ptr()
        return lambda: int(self._compute(self._step.address, *shape, *tensors))


def linear(library: ctypes.CDLL) -> Callable[[], None]:
    packed = cpu_ops.PackedWeight.pack(torch.ones(1024, 512))
    x, out = torch.ones(32, 512), torch.empty(32, 1024)
    return lambda: library.il_linear(
        x.data_ptr(), 512, packed.panels.data_ptr(), 0, None, out.data_ptr(), 1024, 32, 512, 1024
    )


def attention(library: ctypes.CDLL) -> Callable[[], None]:
    q, cache = torch.ones(40, 4, 16), torch.ones(8, 16, 2, 16)
    tables = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([[0, 1, 2]], [0, 40], [40])]
    tensors = (q, cache, cache, torch.empty_like(q), *tables)
    sizes = {"sequences": 1, "max_blocks": 3, "block_size": 16, "heads": 4, "kv_heads": 2, "head_dim": 16}
    call = AttentionCall(*(tensor.data_ptr() for tensor in tensors), q_row_stride=64, scale=0.25, **sizes)

    def run(_keeps: object = tensors) -> None:
        library.il_paged_attention(ctypes.byref(call))

    return run


def main() -> None:
    library = native.load()
    assert library is not None
    step, process = Step(library), ctypes.CDLL(None)
    process.free.argtypes, process.malloc.restype = (ctypes.c_void_p,), ctypes.c_void_p
    calls: dict[str, Callable[[], object]] = {
        "asks each time": lambda: process.free(process.malloc(100)),
        "dense": step.call(DENSE, ROWS),
        "dense, few rows": step.call(DENSE, 8),
        "gate_up": step.call(MOE_GATE_UP, ROWS),
        "down": step.call(MOE_DOWN, ROWS),
        "gate_up, named rows": step.call(MOE_GATE_UP, ROWS, named=True),
        "down, named rows": step.call(MOE_DOWN, ROWS, named=True),
        "linear": linear(library),
        "attention": attention(library),
    }
    asked = {}
    for name, call in calls.items():
        for _ in range(WARM_UP):
            if call() and name != "asks each time":
                sys.exit(f"{name}: declined")
        before = process.num_allocations()
        for _ in range(int(sys.argv[1])):
            call()
        asked[name] = process.num_allocations() - before
    print(json.dumps(asked))


if __name__ == "__main__":
    main()
