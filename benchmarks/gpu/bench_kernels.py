"""Each Triton LoRA kernel beside its floor on a GPU: bytes that must move over the bandwidth of a copy, measured here.

    python benchmarks/gpu/bench_kernels.py [--only NAME] [--quick]

Decode batches of bf16 rows over adapters of one rank, at the true shapes of Qwen3-30B-A3B and Mixtral. Both ways of
finding weights are timed; the ratio is of the one that a call would take.
"""

import argparse
import statistics

import torch
from device import bytes_per_s, conditions, graph_s, report, require_device
from sites import SHAPES, make_site

TARGET = 0.75
BATCHES = ((1, 1), (16, 8), (64, 8), (64, 16))
"""(rows, adapters)."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="sites whose name contains this")
    parser.add_argument("--quick", action="store_true", help="one batch and one rank: whether it runs at all")
    options = parser.parse_args()
    device = require_device()
    torch.manual_seed(0)
    bandwidth = bytes_per_s(device)
    print(f"{torch.cuda.get_device_name(device)}: a copy moves {bandwidth / 1e9:.0f} GB/s\n")
    print(
        f"{'site':28} {'rows':>5} {'adapters':>8} {'rank':>5} {'floor us':>9} "
        f"{'grouped':>9} {'indexed':>9} {'of floor':>8}"
    )
    ratios: dict[str, float] = {}
    for shape in (s for s in SHAPES if options.only in s.name):
        for rank in (16,) if options.quick else (16, 64):
            for rows, adapters in BATCHES[2:3] if options.quick else BATCHES:
                took = {}
                for path in ("auto", "grouped", "indexed"):
                    site = make_site(shape, rows=rows, adapters=adapters, rank=rank, device=device, path=path)
                    took[path] = graph_s(site.run, len(site.tables))
                floor_s = site.num_bytes / bandwidth
                ratio = floor_s / took["auto"]
                ratios[f"{shape.name} {rows}x{adapters} r{rank}"] = round(ratio, 3)
                print(
                    f"{shape.name:28} {rows:5} {adapters:8} {rank:5} {floor_s * 1e6:9.1f} "
                    f"{took['grouped'] * 1e6:9.1f} {took['indexed'] * 1e6:9.1f} {ratio:8.2f}"
                )
    value = statistics.geometric_mean(ratios.values())
    facts = conditions(device, gb_per_s=round(bandwidth / 1e9), ratios=ratios)
    report("gpu-kernels", value, TARGET, met=min(ratios.values()) >= TARGET, **facts)


if __name__ == "__main__":
    main()
