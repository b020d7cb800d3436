"""make bench-shared-launch: site calls of several engines one after the other, or together in one launch.

Sharing costs a copy: calls lie in the rings of their own links, and a launch takes its rows in one piece. `apart` is
a launch for each call, straight from ring to ring; `together` gathers the rows, launches once and scatters the deltas.
A server computes each call apart, which is right where `together_over_apart` is 1 or more in the median (`met`).
Floor: each adapter of the launch read once. SmolLM2's shapes, one thread, weights of bf16 that come from memory.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from harness import report

from infinilora.bench.floors import measure
from infinilora.kernels.batch import Part, segment_table
from infinilora.kernels.slot_kernels import SlotKernels

RING_BYTES, RANK, WIDTH = 128 << 20, 16, 2
WARM = 20
"""Turns that are not counted."""
SITES = {"qkv": (576, (576, 192, 192)), "gate_up": (576, (1536, 1536)), "down": (1536, (576,))}


class Case(NamedTuple):
    """So many engines, each with so many rows of so many adapters, the same in all or each its own."""

    engines: int
    rows: int
    adapters: int
    is_same: bool

    @property
    def name(self) -> str:
        return f"{self.engines} x {self.rows} rows of {self.adapters} {'same' if self.is_same else 'other'} adapters"


CASES = [
    Case(engines, rows, adapters, is_same)
    for engines in (2, 4)
    for rows, adapters in ((1, 1), (8, 1), (8, 8), (32, 16))
    for is_same in (True, False)
]


def kernels_of(case: Case, in_dim: int, outs: tuple[int, ...]) -> tuple[SlotKernels, int, int]:
    """Bound kernels, their number of layers, and the bytes of one adapter at one layer."""
    num_slots = case.adapters * (1 if case.is_same else case.engines)
    num_bytes = RANK * (len(outs) * in_dim + sum(outs)) * WIDTH
    layers = max(2, RING_BYTES // (num_bytes * num_slots))
    kernels = SlotKernels(num_slots=num_slots, num_layers=layers, threads=1)
    for layer in range(layers):
        for slot in range(num_slots):
            parts = tuple(
                Part(torch.randn(RANK, in_dim).bfloat16(), torch.randn(RANK, o).bfloat16(), 1.0, sum(outs[:i]))
                for i, o in enumerate(outs)
            )
            kernels.bind(slot, layer, 0, parts, in_dim, sum(outs))
    return kernels, layers, num_bytes * num_slots


def segments_of(case: Case, engine: int, first_row: int) -> list[tuple[int, int, int]]:
    each, base = case.rows // case.adapters, 0 if case.is_same else engine * case.adapters
    return [(first_row + a * each, each, base + a) for a in range(case.adapters)]


def measure_case(case: Case, in_dim: int, outs: tuple[int, ...], bytes_per_s: float, n: int) -> dict[str, float]:
    kernels, layers, num_bytes = kernels_of(case, in_dim, outs)
    xs = [torch.randn(case.rows, in_dim) for _ in range(case.engines)]
    replies = [torch.zeros(case.rows, sum(outs)) for _ in xs]
    own = [segment_table(segments_of(case, 0 if case.is_same else e, 0)) for e in range(case.engines)]
    # As a server would have it: rows of one adapter are neighbours in the launch only within an engine.
    joined = segment_table(s for e in range(case.engines) for s in segments_of(case, e, e * case.rows))
    x, y = torch.empty(case.engines * case.rows, in_dim), torch.empty(case.engines * case.rows, sum(outs))

    def apart(layer: int) -> None:
        for rows, table, out in zip(xs, own, replies, strict=True):
            kernels.dense(layer, 0, table, rows, out, accumulate=False)

    def together(layer: int) -> None:
        torch.cat(xs, out=x)
        kernels.dense(layer, 0, joined, x, y, accumulate=False)
        for out, part in zip(replies, torch.split(y, case.rows), strict=True):
            out.copy_(part)

    apart_s, together_s = turns(apart, together, layers, n)
    return {
        "apart_us": round(1e6 * apart_s, 1),
        "together_us": round(1e6 * together_s, 1),
        "together_over_apart": round(together_s / apart_s, 3),
        "floor_us": round(1e6 * num_bytes / bytes_per_s, 1),
    }


def turns(first: Callable[[int], None], second: Callable[[int], None], layers: int, n: int) -> tuple[float, float]:
    """The median of n turns of each, each turn on the next layer."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * (n + WARM)):
        started = time.perf_counter()
        (first, second)[turn % 2](turn // 2 % layers if turn % 2 == 0 else (turn // 2 + layers // 2) % layers)
        times[turn % 2].append(time.perf_counter() - started)
    return statistics.median(times[0][WARM:]), statistics.median(times[1][WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=380, help="turns of each that a median is of")
    n = parser.parse_args().n
    torch.manual_seed(0)
    torch.set_num_threads(1)
    bytes_per_s = measure(1).read_bytes_per_s
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        for site, (in_dim, outs) in SITES.items():
            found[f"{site} {case.name}"] = figures = measure_case(case, in_dim, outs, bytes_per_s, n)
            print(f"{site:8} {case.name:36} {figures}", flush=True)
    ratios = [figures["together_over_apart"] for figures in found.values()]
    print(f"together over apart: {statistics.median(ratios):.3f} in the median; a server computes apart")
    report(
        "bench-shared-launch",
        statistics.median(ratios),
        1.0,
        unit="time of one launch for several engines over a launch for each, median over cases; below 1: sharing pays",
        least=min(ratios),
        most=max(ratios),
        rank=RANK,
        n=n,
        cases=found,
    )


if __name__ == "__main__":
    main()
