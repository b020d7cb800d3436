"""make bench-kernels: the CPU's LoRA kernels at decode, beside their floor and beside torch.

    delta[t] = scale · (x[t] · Aᵀ) · Bt       rows of up to 64 adapters in one call

Floor: A and Bt of each adapter of the batch from memory once, these and x and the delta through the last cache once, or
the multiply-adds, whichever takes longest; all limits are measured in the run, memory's beside each point. Every call
works on the next of many layers, and x and the delta lie in rings as long as a link's, so nothing is in a cache that
would not be there in a server. Torch does the same in the best of its ways: a product for each adapter (of 16-bit
weights also widened), or A and Bt gathered for each row.

    python benchmarks/bench_kernels.py [--threads N] [--seconds S] [--only TEXT] [--without-torch]
"""

import argparse
import ctypes
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from harness import report
from lora_points import Buffers, Calls, Memory, Point, num_flops, row_bytes, torch_ways, weight_bytes
from roof import Roof, RoofMeter, best_s

from infinilora.kernels import cpu_ops, native
from infinilora.kernels.batch import MOE_DOWN, MOE_GATE_UP
from infinilora.kernels.settings import LEVELS

FLOOR_TARGET, TORCH_TARGET = 0.6, 2.0
ROWS, RANKS, ADAPTERS = (8, 32, 64), (8, 16, 32, 64), (1, 4, 16, 64)
DIMS = ((576, 576), (576, 1536), (4096, 4096))
EVEN: tuple[int, ...] = (2,) * 16
SKEWED: tuple[int, ...] = (19, 5, 3, 2, 1, 1, 1)
"""Rows of each adapter: where all are asked for alike, and where a few are asked for most."""


def points() -> Iterator[Point]:
    """Every combination that has a row for each adapter; then sites of several parts, and experts."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype, (in_dim, out), rank, rows, adapters in itertools.product((bf16, fp32), DIMS, RANKS, ROWS, ADAPTERS):
        if adapters <= rows:
            yield Point(dtype, rank, in_dim, (out,), (rows // adapters,) * adapters)
    for outs, each in itertools.product(((576, 192, 192), (1536, 1536)), (EVEN, SKEWED)):
        yield Point(bf16, 16, 576, outs, each)
    for each in (EVEN, SKEWED):
        yield Point(bf16, 16, 576, (1536, 1536), each, MOE_GATE_UP)
        yield Point(bf16, 16, 1536, (576,), each, MOE_DOWN)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.15, help="for each measurement")
    parser.add_argument("--only", default="", help="points whose name contains this")
    parser.add_argument("--without-torch", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    library = native.load()
    if library is None:
        raise SystemExit("no native library: nothing to measure")
    threads = cpu_ops.set_threads(options.threads)
    meter = RoofMeter(library, 1.0)
    roof = meter.roof
    far, near, peak = (limit / 1e9 for limit in (roof.bytes_per_s, roof.near_per_s, roof.flops_per_s))
    print(f"{threads} threads: {far:.1f} GB/s from memory, {near:.1f} from the last cache, {peak:.0f} GFLOP/s\n")
    print(f"{'adapters x rows':45} {'KB':>7} {'MFLOP':>7} {'floor us':>9} {'us':>8} {'of floor':>8} {'x torch':>8}")
    memory, ratios, gains, bandwidths = Memory(), {}, {}, [roof.bytes_per_s]
    for point in (p for p in points() if options.only in p.name):
        ratio, gain, beside = measure(point, memory, library, meter, options)
        ratios[point.name] = ratio
        bandwidths.append(beside.bytes_per_s)
        if gain is not None:
            gains[point.name] = gain
    tell(ratios, gains, threads=threads, level=LEVELS[library.il_level()], roof=roof, bandwidths=bandwidths)


def measure(
    point: Point, memory: Memory, library: ctypes.CDLL, meter: RoofMeter, options: argparse.Namespace
) -> tuple[float, float | None, Roof]:
    """(floor over time, torch's time over ours, the roof beside it), and a line of the table."""
    buffers = Buffers.of(point)
    calls = Calls(point, memory, buffers)
    took, roof = meter.beside(lambda: calls.best_s(library, options.seconds), options.seconds / 2)
    ways = [] if options.without_torch else torch_ways(point, memory, buffers)
    torch_s = min((best_s(way, point.copies, options.seconds / 2) for way in ways), default=None)
    weights, rows, flops = weight_bytes(point, buffers), row_bytes(buffers), num_flops(point)
    floor = roof.floor_s(weights, flops, near_bytes=rows)
    ratio, gain = floor / took, torch_s / took if torch_s else None
    sizes = f"{(weights + rows) / 1024:7.0f} {flops / 1e6:7.2f} {floor * 1e6:9.1f} {took * 1e6:8.1f}"
    print(f"{point.name:45} {sizes} {ratio:8.2f} {f'{gain:8.1f}' if gain else ''}", flush=True)
    return ratio, gain, roof


def tell(
    ratios: dict[str, float],
    gains: dict[str, float],
    *,
    threads: int,
    level: str,
    roof: Roof,
    bandwidths: Sequence[float],
) -> None:
    worst = min(ratios, key=lambda name: ratios[name])
    slowest = min(gains, key=lambda name: gains[name], default=None)
    conditions: dict[str, Any] = {
        "threads": threads,
        "level": level,
        "gb_per_s": [round(limit(bandwidths) / 1e9, 1) for limit in (min, max)],
        "near_gb_per_s": round(roof.near_per_s / 1e9, 1),
        "gflop_per_s": round(roof.flops_per_s / 1e9),
        "points": len(ratios),
        "median": round(statistics.median(ratios.values()), 2),
        "worst": [worst, round(ratios[worst], 2)],
        "at_least_target": sum(r >= FLOOR_TARGET for r in ratios.values()),
    }
    if slowest is not None:
        conditions["over_torch"] = {
            "target": TORCH_TARGET,
            "median": round(statistics.median(gains.values()), 1),
            "worst": [slowest, round(gains[slowest], 2)],
            "at_least_target": sum(g >= TORCH_TARGET for g in gains.values()),
        }
    met = ratios[worst] >= FLOOR_TARGET and (slowest is None or gains[slowest] >= TORCH_TARGET)
    report("bench-kernels", conditions["median"], FLOOR_TARGET, met=met, **conditions)


if __name__ == "__main__":
    main()
