"""Sites of true models with random adapters on a GPU: what the GPU benchmarks run.

Qwen3-30B-A3B   hidden 2048, q 4096, k and v 512, 128 experts of 768, 8 a row
Mixtral-8x7B    hidden 4096, q 4096, k and v 1024, 8 experts of 14336, 2 a row
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from infinilora.kernels import expand, moe, shrink
from infinilora.kernels.batch import Part, segment_table
from infinilora.kernels.site_table import SiteTable
from infinilora.kernels.tile_table import Cut, Launch, Loads, Sums, TileTable
from infinilora.kernels.tiles import StepRows

from device import RING_BYTES  # isort: skip


SCALE = 0.5
"""Of every adapter."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One site of a model. `experts` 0: dense."""

    name: str
    in_dim: int
    outs: tuple[int, ...]
    experts: int = 0
    top_k: int = 1
    is_down: bool = False


SHAPES = (
    Shape("qwen3-30b-a3b qkv", 2048, (4096, 512, 512)),
    Shape("qwen3-30b-a3b o", 4096, (2048,)),
    Shape("qwen3-30b-a3b moe_gate_up", 2048, (768, 768), 128, 8),
    Shape("qwen3-30b-a3b moe_down", 768, (2048,), 128, 8, is_down=True),
    Shape("mixtral-8x7b qkv", 4096, (4096, 1024, 1024)),
    Shape("mixtral-8x7b moe_gate_up", 4096, (14336, 14336), 8, 2),
    Shape("mixtral-8x7b moe_down", 14336, (4096,), 8, 2, is_down=True),
)


class Variant(TileTable):
    """The rules' blocks, for bf16 in tiles of `block_rows`, but walked, read and summed in another way."""

    def __init__(self, block_rows: int, per_sm: int, loads: Loads, sums: Sums, *, num_sms: int) -> None:
        super().__init__({}, num_sms=num_sms)
        self._shrink = replace(shrink.by_rule(torch.bfloat16), per_sm=per_sm, loads=loads)
        reads: Loads = "pointers" if loads == "pointers" else "descriptors"
        self._expand = replace(expand.by_rule(block_rows), per_sm=per_sm, loads=reads, sums=sums)

    @override
    def find(self, launch: Launch) -> Cut:
        return self._shrink if launch.op == "shrink" else self._expand


@dataclass(frozen=True, slots=True)
class Site:
    """`tables[i]` are one layer's; `run(i)` adds its deltas of x to out; `num_bytes` is what it must read and write."""

    tables: list[SiteTable]
    x: Tensor
    out: Tensor
    run: Callable[[int], None]
    num_bytes: int
    block_rows: int
    sums_pairs: bool

    def vary(self, per_sm: int, loads: Loads, sums: Sums) -> None:
        """From now on launches are cut by the rules, but walk, read and sum so."""
        for table in self.tables:
            table.tiles = Variant(self.block_rows, per_sm, loads, sums, num_sms=table.tiles.num_sms)


def part_of(rank: int, in_dim: int, out_dim: int, offset: int, experts: int, device: torch.device) -> Part:
    lead = (experts,) if experts else ()
    a, bt = (torch.randn(*lead, rank, n, device=device, dtype=torch.bfloat16) for n in (in_dim, out_dim))
    return Part(a, bt, SCALE, offset)


def make_site(
    shape: Shape, *, rows: int, adapters: int, rank: int, device: torch.device, path: moe.Path = "auto"
) -> Site:
    """bf16 rows dealt evenly to the adapters. As many layers as RING_BYTES hold, one at least and 16 at most."""
    per_part = sum(shape.in_dim + out for out in shape.outs) * rank * 2
    layer_bytes = per_part * max(shape.experts, 1) * adapters
    layers = max(1, min(16, RING_BYTES // layer_bytes))
    tables = [_table(shape, adapters, rank, device) for _ in range(layers)]
    each = rows // adapters
    step = StepRows.of(segment_table((s * each, each, s) for s in range(adapters)), rows, device)
    x, ids, weights, out = _rows_of(shape, rows, device)

    def run(layer: int) -> None:
        if not shape.experts:
            moe.dense(tables[layer], step, x, out, accumulate=True, path=path)
        elif shape.is_down:
            moe.moe_down(tables[layer], step, x, ids, weights, out, accumulate=True, path=path)
        else:
            moe.moe_gate_up(tables[layer], step, x, ids, out, accumulate=True, path=path)

    used = {(t // each, int(e)) for t, row in enumerate(ids.tolist()) for e in row} if shape.experts else adapters
    touched = len(used) if isinstance(used, set) else used
    moved = x.numel() * 2 + 2 * out.numel() * 2
    return Site(tables, x, out, run, touched * per_part + moved, step.block_rows, shape.is_down)


def _table(shape: Shape, adapters: int, rank: int, device: torch.device) -> SiteTable:
    table = SiteTable(
        num_slots=adapters, num_parts=len(shape.outs), in_dim=shape.in_dim, out_dim=sum(shape.outs), device=device
    )
    for slot in range(adapters):
        offsets = [sum(shape.outs[:i]) for i in range(len(shape.outs))]
        table.bind(
            slot,
            tuple(
                part_of(rank, shape.in_dim, out, offset, shape.experts, device)
                for out, offset in zip(shape.outs, offsets, strict=True)
            ),
        )
    return table


def _rows_of(shape: Shape, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, topk_ids, topk_weights, out."""
    columns = sum(shape.outs)
    ids = torch.stack([torch.randperm(max(shape.experts, 1))[: shape.top_k] for _ in range(rows)]).int().to(device)
    weights = torch.rand(rows, shape.top_k, device=device)
    choices = (shape.top_k,) if shape.experts else ()
    x_choices, out_choices = (choices, ()) if shape.is_down else ((), choices)
    x = torch.randn(rows, *x_choices, shape.in_dim, device=device, dtype=torch.bfloat16)
    return x, ids, weights, torch.zeros(rows, *out_choices, columns, device=device, dtype=torch.bfloat16)
