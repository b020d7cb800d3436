"""How fast this server computes: rows of one site in a second, by the same piece of work on every server of a base.

Not from the site calls of its traffic: those of a server that is given the rare and the outsize adapters are other
work than those of one with the hot, and what is given to it would follow from what was.
"""

import time
from functools import partial

import torch

from infinilora.kernels.batch import Part, segment_table
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.pool.device import Device, HostDevice
from infinilora.protocol.adapter import Site

ADAPTERS, ROWS_EACH, RANK = 16, 2, 16
"""The rows of a decode step."""
WIDER = 4
"""A site's outputs, in widths of the model: as gate and up together have."""
TURNS = 200


def measure_rows_per_s(hidden_dim: int, *, threads: int, device: Device | None = None) -> float:
    """By the shortest of several turns: what else the machine does makes turns longer, never shorter. Blocking."""
    device = device or HostDevice()
    kernels = SlotKernels(num_slots=ADAPTERS, num_layers=1, device=device.torch_device, threads=threads)
    ones, out_dim = partial(torch.ones, device=device.torch_device), WIDER * hidden_dim
    for slot in range(ADAPTERS):
        part = Part(ones(RANK, hidden_dim), ones(RANK, out_dim), 1.0, 0)
        kernels.bind(slot, 0, Site.GATE_UP, (part,), hidden_dim, out_dim)
    segments = segment_table((slot * ROWS_EACH, ROWS_EACH, slot) for slot in range(ADAPTERS))
    x = ones(ADAPTERS * ROWS_EACH, hidden_dim)
    out = x.new_empty(len(x), out_dim)

    def turn() -> float:
        started = time.perf_counter()
        kernels.dense(0, Site.GATE_UP, segments, x, out, accumulate=False)
        device.stream().event().wait()
        return time.perf_counter() - started

    return len(x) / min(turn() for _ in range(TURNS))
