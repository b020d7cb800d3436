"""Measure how launches are best cut on this GPU, and write the table that the kernels read.

    python benchmarks/gpu/tune_tiles.py [--out PATH]

Every dense shape and a grid of rows and ranks; each candidate is timed as a step runs it, shrink and expand in turn,
and kept only where it beats the kernel's own rule by more than the spread of its repetitions.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch
from device import conditions, graph_s, require_device
from sites import SHAPES, Shape, Site, make_site
from triton.runtime.errors import OutOfResources

from infinilora.kernels.tile_table import MEASURED, Cut, Launch, TileTable

ROWS = ((16, 8), (64, 8), (512, 8))
"""(rows, adapters)."""
RANKS = (16, 64, 256)
WORTH = 0.97
"""A cut is kept where it takes less than this part of the rule's time."""

SHRINKS = [Cut(b, s, w, n) for b, s, w, n in itertools.product((64, 128, 256), (1, 4, 16), (4, 8), (2, 4))]
EXPANDS = [Cut(b, 0, w, n) for b, w, n in itertools.product((32, 64, 128, 256), (2, 4, 8), (2, 3))]


def timed(site: Site, launch: Launch, cut: Cut) -> float | None:
    """None where the device has not the memory of its own for this cut."""
    for table in site.tables:
        table.tiles = TileTable({launch.rounded(): cut})
    try:
        return graph_s(site.run, len(site.tables), replays=15)
    except OutOfResources:
        torch.cuda.synchronize()
        return None


def best(site: Site, launch: Launch, cuts: list[Cut]) -> Cut | None:
    for table in site.tables:
        table.tiles = TileTable({})
    rule_s = graph_s(site.run, len(site.tables), replays=15)
    times = {cut: took for cut in cuts if (took := timed(site, launch, cut)) is not None}
    winner = min(times, key=times.__getitem__, default=None)
    if winner is None or times[winner] > WORTH * rule_s:
        print(f"{launch}: the rule, {rule_s * 1e6:.1f} us")
        return None
    print(f"{launch}: {winner}, {times[winner] * 1e6:.1f} us; the rule {rule_s * 1e6:.1f} us")
    return winner


def launches(shape: Shape, rows: int, rank: int) -> list[tuple[Launch, list[Cut]]]:
    return [
        (Launch("shrink", 16, rows, rank, shape.in_dim).rounded(), SHRINKS),
        (Launch("expand", 16, rows, rank, sum(shape.outs)).rounded(), EXPANDS),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = require_device()
    major, minor = torch.cuda.get_device_capability(device)
    out = options.out or MEASURED / f"sm_{major}{minor}.json"
    found: dict[Launch, Cut] = {}
    dense = [shape for shape in SHAPES if not shape.experts]
    for shape, (rows, adapters), rank in itertools.product(dense, ROWS, RANKS):
        site = make_site(shape, rows=rows, adapters=adapters, rank=rank, device=device, path="grouped")
        for launch, cuts in launches(shape, rows, rank):
            if launch not in found and (cut := best(site, launch, cuts)):
                found[launch] = cut
    entries = [
        launch._asdict() | {"block": c.block, "splits": c.splits, "warps": c.warps, "stages": c.stages}
        for launch, c in found.items()
    ]
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(conditions(device) | {"entries": entries}, indent=1) + "\n")
    print(json.dumps({"name": "tune-tiles", "value": len(entries), "conditions": conditions(device, file=str(out))}))


if __name__ == "__main__":
    main()
