"""How fast this server computes: rows of one site in a second, by the same piece of work on every server of a base.

Not from the site calls of its traffic: those of a server that is given the rare and the outsize adapters are other
work than those of one with the hot, and what is given to it would follow from what was.
"""

import time

import torch

from infinilora.kernels.batch import Part, segment_table
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.protocol.adapter import Site

ADAPTERS, ROWS_EACH, RANK = 16, 2, 16
"""The rows of a decode step."""
WIDER = 4
"""A site's outputs, in widths of the model: as gate and up together have."""
TURNS = 200


def measure_rows_per_s(hidden_dim: int, *, threads: int, device: str = "cpu") -> float:
    """By the shortest of several turns: what else the machine does makes turns longer, never shorter. Blocking."""
    kernels = SlotKernels(num_slots=ADAPTERS, num_layers=1, device=device, threads=threads)
    out_dim = WIDER * hidden_dim
    for slot in range(ADAPTERS):
        part = Part(torch.ones(RANK, hidden_dim), torch.ones(RANK, out_dim), 1.0, 0)
        kernels.bind(slot, 0, Site.GATE_UP, (part,), hidden_dim, out_dim)
    segments = segment_table((slot * ROWS_EACH, ROWS_EACH, slot) for slot in range(ADAPTERS))
    x = torch.ones(ADAPTERS * ROWS_EACH, hidden_dim)
    out = torch.empty(len(x), out_dim)

    def turn() -> float:
        started = time.perf_counter()
        kernels.dense(0, Site.GATE_UP, segments, x, out, accumulate=False)
        return time.perf_counter() - started

    return len(x) / min(turn() for _ in range(TURNS))
