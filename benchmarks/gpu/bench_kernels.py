"""Each Triton LoRA kernel beside its floor on a GPU: bytes that must move over the bandwidth of a copy, measured here.

    python benchmarks/gpu/bench_kernels.py [--only NAME] [--quick]

Decode batches, and one of a prompt's rows, of bf16 over adapters of one rank, at the true shapes of Qwen3-30B-A3B and
Mixtral. Both ways of finding weights are timed, and of the grouped one every way to walk and to read; the ratio is of
what a call would take. Where vLLM is installed, its public kernels run the dense sites beside ours, on the same rows.
"""

import argparse
import statistics

import torch
from device import bytes_per_s, conditions, graph_s, report, require_device
from public import public_run
from sites import SHAPES, Shape, make_site

from infinilora.kernels.shrink import can_specialize
from infinilora.kernels.tile_table import Loads, Sums

TARGET, OVER_PUBLIC = 0.75, 1.2
BATCHES = ((1, 1), (16, 8), (64, 8), (64, 16), (512, 4))
"""(rows, adapters): decode, and one of prompts."""
DECODE_ROWS = 64
"""Batches of more rows are timed and not held to the floor: they multiply more than they move."""
VARIANTS: dict[str, tuple[int, Loads, Sums]] = {
    "persistent": (2, "pointers", "apart"),
    "descriptors": (0, "descriptors", "apart"),
    "both": (2, "descriptors", "apart"),
    "specialized": (0, "specialized", "apart"),
    "summed inside": (0, "pointers", "inside"),
}
"""(programs a multiprocessor, how they read, where they sum): what the tile table can choose, each beside the rule."""


def microseconds(
    shape: Shape, rows: int, adapters: int, rank: int, device: torch.device
) -> tuple[dict[str, float], int]:
    """Of each way to compute the site; and the bytes that any must move."""
    took = {}
    for path in ("auto", "indexed"):
        site = make_site(shape, rows=rows, adapters=adapters, rank=rank, device=device, path=path)
        took[path] = graph_s(site.run, len(site.tables)) * 1e6
    site = make_site(shape, rows=rows, adapters=adapters, rank=rank, device=device, path="grouped")
    took["grouped"] = graph_s(site.run, len(site.tables)) * 1e6
    if not shape.experts and (run := public_run(site, adapters)):
        took["vllm"] = graph_s(run, len(site.tables)) * 1e6
    can_read = {"pointers", "descriptors"}
    if not shape.experts and can_specialize(site.block_rows, rank):
        can_read.add("specialized")
    for name, (per_sm, loads, sums) in VARIANTS.items():
        if loads in can_read and (sums == "apart" or site.sums_pairs):
            site.vary(per_sm, loads, sums)
            took[name] = graph_s(site.run, len(site.tables)) * 1e6
    return {name: round(us, 2) for name, us in took.items()}, site.num_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="sites whose name contains this")
    parser.add_argument("--quick", action="store_true", help="one batch and one rank: whether it runs at all")
    options = parser.parse_args()
    device = require_device()
    torch.manual_seed(0)
    bandwidth = bytes_per_s(device)
    print(f"{torch.cuda.get_device_name(device)}: a copy moves {bandwidth / 1e9:.0f} GB/s\n")
    print(f"{'site':28} {'rows':>5} {'adapters':>8} {'rank':>5} {'floor us':>9} {'of floor':>8}  us of each way")
    ratios: dict[str, float] = {}
    over_public: dict[str, float] = {}
    times: dict[str, dict[str, float]] = {}
    for shape in (s for s in SHAPES if options.only in s.name):
        for rank in (16,) if options.quick else (16, 64, 128):
            for rows, adapters in BATCHES[2:3] if options.quick else BATCHES:
                point = f"{shape.name} {rows}x{adapters} r{rank}"
                times[point], num_bytes = microseconds(shape, rows, adapters, rank, device)
                floor_us = num_bytes / bandwidth * 1e6
                ratio = floor_us / times[point]["auto"]
                if rows <= DECODE_ROWS:
                    ratios[point] = round(ratio, 3)
                    if public_us := times[point].get("vllm"):
                        over_public[point] = round(public_us / times[point]["auto"], 2)
                each = "  ".join(f"{name} {us:.1f}" for name, us in times[point].items() if name != "auto")
                print(f"{shape.name:28} {rows:5} {adapters:8} {rank:5} {floor_us:9.1f} {ratio:8.2f}  {each}")
    value = statistics.geometric_mean(ratios.values())
    if not over_public:
        print("vLLM is not installed, or no dense site was asked for: public kernels are not timed")
    facts = conditions(device, gb_per_s=round(bandwidth / 1e9), ratios=ratios, over_public=over_public, us=times)
    met = min(ratios.values()) >= TARGET and min(over_public.values(), default=OVER_PUBLIC) >= OVER_PUBLIC
    report("gpu-kernels", value, TARGET, met=met, **facts)


if __name__ == "__main__":
    main()
