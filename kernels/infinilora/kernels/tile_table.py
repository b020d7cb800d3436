"""How a Triton launch is cut: as measured on this kind of device, else by the rule of the kernel that asks.

    measured/sm_90.json   {"device", "date", "commit", "entries": [{"op", "bits", "rows", "rank", "dim", "block", ...}]}

Written by benchmarks/gpu/tune_tiles.py. An entry serves all launches whose rows, rank and dim round up to its own
powers of two. Knows no kernel.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

MEASURED = Path(__file__).parent / "measured"


class Launch(NamedTuple):
    """What a launch is known by: shrink or expand, bits of a weight, rows, the largest rank, the site's in or out."""

    op: str
    bits: int
    rows: int
    rank: int
    dim: int

    def rounded(self) -> "Launch":
        return self._replace(rows=_power(self.rows), rank=_power(self.rank), dim=_power(self.dim))


@dataclass(frozen=True, slots=True)
class Cut:
    """`block`: columns of a program's step (K of shrink, N of expand). `splits`: ranges of K; 0: by rule."""

    block: int
    splits: int
    warps: int
    stages: int


class TileTable:
    """Immutable. A launch that was not measured has no cut here."""

    def __init__(self, cuts: Mapping[Launch, Cut]) -> None:
        self._cuts = dict(cuts)

    @classmethod
    def of_device(cls, device: torch.device) -> "TileTable":
        """That of the device's architecture; empty where it was never measured, and on a CPU."""
        if device.type != "cuda":
            return cls({})
        major, minor = torch.cuda.get_device_capability(device)
        path = MEASURED / f"sm_{major}{minor}.json"
        return cls.read(path) if path.exists() else cls({})

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
        return self._cuts.get(launch.rounded()) if self._cuts else None


def _entry(entry: Mapping[str, int | str], path: Path) -> tuple[Launch, Cut]:
    try:
        launch = Launch(str(entry["op"]), *(int(entry[name]) for name in ("bits", "rows", "rank", "dim")))
        cut = Cut(*(int(entry[name]) for name in ("block", "splits", "warps", "stages")))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: entry {entry!r} lacks a number: {error}") from error
    powers = (cut.block, cut.splits or 1, cut.warps)
    if launch.op not in ("shrink", "expand") or any(n < 1 or n & (n - 1) for n in powers) or cut.stages < 1:
        raise ValueError(f"{path}: entry {entry!r}; wanted op shrink or expand, and powers of two")
    return launch, cut


def _power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(number - 1, 0).bit_length()
