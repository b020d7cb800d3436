"""How a Triton launch is cut: as measured on this kind of device, else by the rule of the kernel that asks.

    measured/sm_90.json   {"device", "date", "commit", "entries": [{"op", "bits", "rows", "rank", ..., "block", ...}]}

Written by benchmarks/gpu/tune_tiles.py. An entry serves all launches whose rows, rank and dim round up to its own
powers of two. Knows no kernel.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import torch

MEASURED = Path(__file__).parent / "measured"

HOPPER_SMS = 132
"""Multiprocessors of an H100 or H200."""


class Launch(NamedTuple):
    """What a launch is known by: shrink or expand, rows, the largest rank, the site's in or out.

    Besides, what decides whether its blocks fit a multiprocessor: bits of the widest it multiplies, rows of a tile.
    """

    op: str
    bits: int
    rows: int
    rank: int
    dim: int
    tile_rows: int

    def rounded(self) -> "Launch":
        return self._replace(rows=_power(self.rows), rank=_power(self.rank), dim=_power(self.dim))


Loads = Literal["pointers", "descriptors", "specialized"]
"""How weights, and rows that lie side by side, are read: through pointers; through tensor descriptors where the tensors
are aligned; or so, and by warps that do nothing else, where tiles and ranks are large (shrink only)."""


Sums = Literal["apart", "inside"]
"""Where the pairs of a row of `down` are summed: in a launch of its own, or by the last program of expand."""


@dataclass(frozen=True, slots=True)
class Cut:
    """`block`: columns of a program's step (K of shrink, N of expand). `splits`: ranges of K; 0: by rule.

    `per_sm`: programs of a persistent grid on each multiprocessor; 0: a program for each item. The defaults are the
    rule of every launch that was not measured.
    """

    block: int
    splits: int
    warps: int
    stages: int
    per_sm: int = 0
    loads: Loads = "pointers"
    sums: Sums = "apart"

    def __post_init__(self) -> None:
        # Warps that fetch run ahead: of a next item they would rewrite the descriptor that copies still read.
        if self.per_sm < 0 or (self.per_sm and self.loads == "specialized"):
            raise ValueError(f"{self}: wanted per_sm 0 for specialized loads, and no less for others")


class TileTable:
    """Immutable. A launch that was not measured has no cut here."""

    def __init__(self, cuts: Mapping[Launch, Cut], *, num_sms: int = HOPPER_SMS) -> None:
        self.cuts = MappingProxyType(dict(cuts))
        self.num_sms = num_sms

    @classmethod
    def of_device(cls, device: torch.device) -> "TileTable":
        """That of the device's architecture; empty where it was never measured, and on a CPU."""
        if device.type != "cuda":
            return cls({})
        found = torch.cuda.get_device_properties(device)
        path = MEASURED / f"sm_{found.major}{found.minor}.json"
        table = cls.read(path) if path.exists() else cls({})
        return cls(table.cuts, num_sms=found.multi_processor_count)

    @classmethod
    def read(cls, path: Path) -> "TileTable":
        """ValueError, naming the file and the entry, for what no tuner writes."""
        try:
            entries = json.loads(path.read_text())["entries"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no tile table: wanted JSON with `entries`: {error}") from error
        cuts = {}
        for entry in entries:
            launch, cut = _entry(entry, path)
            cuts[launch.rounded()] = cut
        return cls(cuts)

    def find(self, launch: Launch) -> Cut | None:
        return self.cuts.get(launch.rounded()) if self.cuts else None

    def num_programs(self, cut: Cut, num_items: int) -> int:
        """Programs of a launch that is cut so; each walks the items that are its own."""
        return min(num_items, cut.per_sm * self.num_sms) if cut.per_sm else num_items


def _entry(entry: Mapping[str, int | str], path: Path) -> tuple[Launch, Cut]:
    try:
        launch = Launch(str(entry["op"]), *(int(entry[name]) for name in Launch._fields[1:]))
        numbers = {name: int(entry[name]) for name in ("block", "splits", "warps", "stages", "per_sm")}
        loads = next(known for known in get_args(Loads) if known == entry["loads"])
        sums = next(known for known in get_args(Sums) if known == entry["sums"])
        cut = Cut(**numbers, loads=loads, sums=sums)
    except (KeyError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(f"{path}: entry {entry!r} lacks what a launch is cut by: {error}") from error
    powers = (cut.block, cut.splits or 1, cut.warps)
    if launch.op not in ("shrink", "expand") or any(n < 1 or n & (n - 1) for n in powers) or cut.stages < 1:
        raise ValueError(f"{path}: entry {entry!r}; wanted op shrink or expand, and powers of two")
    if launch.op == "expand" and cut.loads == "specialized":
        raise ValueError(f"{path}: entry {entry!r}; wanted specialized loads of a shrink only")
    return launch, cut


def _power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(number - 1, 0).bit_length()
