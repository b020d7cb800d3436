"""make bench-cpu-ops: what a CPU engine computes besides LoRA, each beside its floor (roof.py).

Shapes are SmolLM2-135M's, at decode and at prefill.

    python benchmarks/bench_cpu_ops.py [--threads N] [--seconds S] [--only TEXT]
"""

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import report
from roof import RoofMeter, best_s
from torch.nn import functional

from infinilora.kernels import cpu_ops, native
from infinilora.kernels.large_pages import SideBySide
from infinilora.kernels.settings import LEVELS

TARGET = 0.7
HIDDEN, FFN, QKV = 576, 1536, 960
RING_BYTES = 384 << 20
"""Weights of each case are taken in turn from so much memory, as a step walks through its layers."""


@dataclass(frozen=True, slots=True)
class Case:
    """`run(i)` works on the i-th of `copies` sets of weights. `num_bytes` and `flops` are of one run."""

    name: str
    run: Callable[[int], object]
    copies: int
    num_bytes: float
    flops: float


def copies_of(num_bytes: int) -> int:
    return max(2, RING_BYTES // max(num_bytes, 1)) if num_bytes < RING_BYTES else 1


def linear_case(rows: int, in_dim: int, out_dim: int, storage: cpu_ops.Storage) -> Case:
    width = 4 if storage == "fp32" else 2
    copies = copies_of(in_dim * out_dim * width)
    weight = torch.randn(out_dim, in_dim)
    memory = SideBySide()
    packed = [cpu_ops.PackedWeight.pack(weight, storage=storage, memory=memory) for _ in range(copies)]
    x, out = torch.randn(rows, in_dim), torch.empty(rows, out_dim)
    return Case(
        f"linear {storage} {rows}x{in_dim}x{out_dim}",
        lambda i: cpu_ops.linear(x, packed[i], out=out),
        copies,
        width * in_dim * out_dim + 4 * rows * (in_dim + out_dim),
        2 * rows * in_dim * out_dim,
    )


def attention_case(sequences: int, rows: int, context: int) -> Case:
    block, heads, kv_heads, head_dim = 16, 9, 3, 64
    blocks = -(-context // block)
    kv_bytes = sequences * context * kv_heads * head_dim * 8
    layers = copies_of(kv_bytes)
    caches = [torch.randn(2, sequences * blocks, block, kv_heads, head_dim) for _ in range(layers)]
    tables = torch.randperm(sequences * blocks).view(sequences, blocks).int()
    starts = torch.arange(sequences + 1, dtype=torch.int32) * rows
    contexts = torch.full((sequences,), context, dtype=torch.int32)
    q = torch.randn(sequences * rows, heads, head_dim)
    pairs = sequences * heads * rows * (context - (rows - 1) / 2)
    return Case(
        f"attention {sequences} x {rows} rows over {context}",
        lambda i: cpu_ops.paged_attention(q, caches[i][0], caches[i][1], tables, starts, contexts, 0.125),
        layers,
        kv_bytes,
        4 * pairs * head_dim,
    )


def row_cases() -> list[Case]:
    x, weight, gate_up = torch.randn(32, HIDDEN), torch.ones(HIDDEN), torch.randn(32, 2 * FFN)
    residual = torch.randn(32, HIDDEN)
    return [
        Case("rms_norm 32 rows", lambda _: cpu_ops.rms_norm(x, weight, 1e-5, residual), 1, 4 * 4 * x.numel(), 0),
        Case("silu_mul 32 rows", lambda _: cpu_ops.silu_mul(gate_up), 1, 6 * gate_up.numel(), 0),
    ]


def cases() -> list[Case]:
    found = [
        linear_case(rows, in_dim, out_dim, storage)
        for storage in ("fp32", "bf16")
        for in_dim, out_dim in ((HIDDEN, QKV), (HIDDEN, 2 * FFN), (FFN, HIDDEN))
        for rows in (1, 8, 32)
    ]
    found += [linear_case(rows, HIDDEN, 49152, "fp32") for rows in (1, 32)]
    found += [linear_case(512, HIDDEN, 2 * FFN, "fp32")]
    found += [attention_case(32, 1, 128), attention_case(1, 1, 2048), attention_case(1, 256, 256)]
    return found + row_cases()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.4, help="for each case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    library = native.load()
    if library is None:
        raise SystemExit("no native library: nothing to measure")
    threads = cpu_ops.set_threads(arguments.threads)
    meter = RoofMeter(library, 2 * arguments.seconds)
    roof = meter.roof
    print(f"{threads} threads: {roof.bytes_per_s / 1e9:.1f} GB/s, {roof.flops_per_s / 1e9:.0f} GFLOP/s\n")
    print(f"{'case':58} {'us':>9} {'GB/s':>7} {'GFLOP/s':>8} {'of floor':>8}")
    ratios = {}
    for case in cases():
        if arguments.only not in case.name:
            continue
        took, beside = meter.beside(partial(best_s, case.run, case.copies, arguments.seconds), arguments.seconds / 4)
        ratio = beside.floor_s(case.num_bytes, case.flops) / took
        ratios[case.name] = ratio
        rates = f"{case.num_bytes / took / 1e9:7.1f} {case.flops / took / 1e9:8.1f}"
        print(f"{case.name:58} {took * 1e6:9.1f} {rates} {ratio:8.2f}")
    rows = torch.randn(512, HIDDEN)
    weight = torch.randn(2 * FFN, HIDDEN)
    torch_s = best_s(lambda _: functional.linear(rows, weight), 1, arguments.seconds)
    print(f"\ntorch's linear, 512x{HIDDEN}x{2 * FFN}: {torch_s * 1e6:.0f} us")
    value = math.exp(statistics.fmean(math.log(r) for r in ratios.values()))
    conditions: dict[str, Any] = {
        "threads": threads,
        "level": LEVELS[library.il_level()],
        "gb_per_s": round(roof.bytes_per_s / 1e9, 1),
        "gflop_per_s": round(roof.flops_per_s / 1e9),
        "ratios": {name: round(ratio, 2) for name, ratio in ratios.items()},
    }
    report("bench-cpu-ops", value, TARGET, **conditions)


if __name__ == "__main__":
    main()
