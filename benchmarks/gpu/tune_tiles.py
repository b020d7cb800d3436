"""Measure how launches are best cut on this GPU, and write the table that the kernels read.

    python benchmarks/gpu/tune_tiles.py [--out PATH]

Every shape and a grid of rows and ranks; each candidate is timed as a step runs it, shrink and expand in turn, and kept
only where it beats the kernel's own rule by more than the spread of its repetitions. First blocks, splits and warps are
chosen; then, for the best of these, how programs walk and how they read.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from device import conditions, graph_s, require_device
from sites import SHAPES, Shape, Site, make_site
from triton.runtime.errors import OutOfResources

from infinilora.kernels.shrink import can_specialize
from infinilora.kernels.tile_table import MEASURED, Cut, Launch, TileTable

ROWS = ((16, 8), (64, 8), (64, 1), (512, 64), (512, 8))
"""(rows, adapters): both sizes of tiles where rows are many."""
RANKS, EXPERT_RANKS = (16, 64, 256), (16, 64)
PER_SM = (0, 1, 2, 4)
WORTH = 0.97
"""A cut is kept where it takes less than this part of the rule's time."""

SHRINKS = [Cut(b, s, w, n) for b, s, w, n in itertools.product((64, 128, 256), (1, 4, 16), (4, 8), (2, 4))]
EXPANDS = [Cut(b, 0, w, n) for b, w, n in itertools.product((32, 64, 128, 256), (2, 4, 8), (2, 3))]


def time_site(site: Site) -> float | None:
    """Seconds of a layer; None where the device has not the memory of its own for the way it is cut."""
    try:
        return graph_s(site.run, len(site.tables), replays=15)
    except OutOfResources:
        torch.cuda.synchronize()
        return None


def variants(launch: Launch, cut: Cut, *, sums_pairs: bool) -> list[Cut]:
    """The same blocks: walked, read, and a row's pairs summed where there are any, in every other way there is."""
    others = [replace(cut, per_sm=n, loads=loads) for n in PER_SM for loads in ("pointers", "descriptors")]
    if launch.op == "shrink" and can_specialize(launch.tile_rows, launch.rank):
        others.append(replace(cut, per_sm=0, loads="specialized"))
    if launch.op == "expand" and sums_pairs:
        others += [replace(other, sums="inside") for other in (cut, *others)]
    return [other for other in others if other != cut]


def best(
    site: Site, launch: Launch, cuts: list[Cut], seconds: Callable[[Site], float | None] = time_site
) -> Cut | None:
    """The cut that is worth an entry, or None: the rule is as good."""

    def times_of(tried: list[Cut]) -> dict[Cut, float]:
        return {cut: took for cut in tried if (took := seconds(cut_by(site, {launch: cut}))) is not None}

    rule_s = seconds(cut_by(site, {}))
    times = times_of(cuts)
    if times:
        times |= times_of(variants(launch, min(times, key=times.__getitem__), sums_pairs=site.sums_pairs))
    winner = min(times, key=times.__getitem__, default=None)
    if winner is None or rule_s is None or times[winner] > WORTH * rule_s:
        print(f"{launch}: the rule, {rule_s} s")
        return None
    print(f"{launch}: {winner}, {times[winner] * 1e6:.1f} us; the rule {rule_s * 1e6:.1f} us")
    return winner


def cut_by(site: Site, cuts: Mapping[Launch, Cut]) -> Site:
    """The same site, whose launches are from now on cut so, and by the rule where `cuts` has nothing."""
    for table in site.tables:
        table.tiles = TileTable(cuts, num_sms=table.tiles.num_sms)
    return site


def write(out: Path, found: Mapping[Launch, Cut], facts: Mapping[str, Any]) -> None:
    entries = [launch._asdict() | asdict(cut) for launch, cut in found.items()]
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({**facts, "entries": entries}, indent=1) + "\n")


def launches(shape: Shape, rows: int, rank: int, tile_rows: int) -> list[tuple[Launch, list[Cut]]]:
    """Both of a site, as its kernels look them up: an expert site has a row for each choice."""
    pairs = rows * shape.top_k
    return [
        (Launch("shrink", 16, pairs, rank, shape.in_dim, tile_rows).rounded(), SHRINKS),
        (Launch("expand", 16, pairs, rank, sum(shape.outs), tile_rows).rounded(), EXPANDS),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = require_device()
    major, minor = torch.cuda.get_device_capability(device)
    out = options.out or MEASURED / f"sm_{major}{minor}.json"
    found: dict[Launch, Cut] = {}
    points = itertools.product(SHAPES, ROWS, RANKS)
    for shape, (rows, adapters), rank in points:
        if shape.experts and rank not in EXPERT_RANKS:
            continue
        site = make_site(shape, rows=rows, adapters=adapters, rank=rank, device=device, path="grouped")
        for launch, cuts in launches(shape, rows, rank, site.block_rows):
            if launch not in found and (cut := best(site, launch, cuts)):
                found[launch] = cut
    write(out, found, conditions(device))
    print(json.dumps({"name": "tune-tiles", "value": len(found), "conditions": conditions(device, file=str(out))}))


if __name__ == "__main__":
    main()
