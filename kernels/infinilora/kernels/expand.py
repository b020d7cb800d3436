"""Expand on a device: out[row, columns of part] (+)= scale · weight · (Σ_s v[s, row, part]) · Bt[slot, part, expert].

Each part writes its own slice of the columns. The scale is fp32 and is applied once, to the fp32 sum. v keeps
its fp32 precision against 16-bit weights too: it is multiplied as the sum of two bf16 halves.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilora.kernels.descriptors import launch_with_scratch
from infinilora.kernels.pair_sums import PairSum, add_if_last
from infinilora.kernels.shrink import padded_rank, rank_block, weights_of
from infinilora.kernels.site_table import FIELDS, KINDS, SiteTable
from infinilora.kernels.tile_table import Cut, Launch
from infinilora.kernels.tiles import SMALL

SMALL_COLUMNS, LARGE_COLUMNS = 64, 128


@triton.jit
def add_product(acc, v_block, bt_block, KIND: tl.constexpr, UPCAST: tl.constexpr):
    """Return acc + v · Bt of fp32 v: against bf16 weights as the sum of two bf16 halves."""
    if KIND == 1:
        high = v_block.to(tl.bfloat16)
        low = (v_block - high.to(tl.float32)).to(tl.bfloat16)
        if UPCAST:
            acc = tl.dot(high.to(tl.float32), bt_block.to(tl.float32), acc)
            acc = tl.dot(low.to(tl.float32), bt_block.to(tl.float32), acc)
        else:
            acc = tl.dot(high, bt_block, acc)
            acc = tl.dot(low, bt_block, acc)
    else:
        acc = tl.dot(v_block, bt_block.to(tl.float32), acc, input_precision="tf32x3")
    return acc


@triton.jit(do_not_specialize=["num_tiles", "num_items", "num_experts", "num_blocks"])
def expand_kernel(
    v,
    out,
    tiles,
    order,
    pair_weights,
    records,
    topk_ids,
    arrivals,
    summed,
    num_tiles,
    num_items,
    num_experts,
    num_blocks,
    v_plane,
    v_stride,
    v_part,
    out_stride,
    summed_stride,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIBED: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One item: one tile of rows, one block of output columns of one part; all ranks. A program walks its items.

    v fp32 [SPLITS, rows or pairs, PARTS x v_part]; out [rows or pairs, columns]; tiles int32 [n, 4]. TOP_K 0: pairs
    are not summed.
    """
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tile, block = tiles + item % num_tiles * 4, item // num_tiles
        start, rows, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        part = block % PARTS
        record = records + (slot.to(tl.int64) * PARTS + part) * FIELDS
        rank = tl.load(record + 2).to(tl.int32)
        out_dim = tl.load(record + 4).to(tl.int32)
        first = block // PARTS * BLOCK_N
        if (rows > 0) & (first < out_dim) & (tl.load(record + 6) == KIND):
            expert = tl.load(tile + 3).to(tl.int64)
            bt = weights_of(record, 1, 8, expert, KIND, ALIGNED)
            if ALIGNED:
                # 16 bytes of the narrowest type; wider ones are aligned the more.
                out_dim = tl.multiple_of(out_dim, 8 if KIND else 4)
            m = tl.arange(0, BLOCK_M)
            in_tile = m < rows
            row = tl.load(order + start + m, mask=in_tile, other=0) if GATHER else start + m
            row = row.to(tl.int64)
            n = first + tl.arange(0, BLOCK_N)
            v_rows = v + row[:, None] * v_stride + part * v_part
            bt_box = (
                tl.make_tensor_descriptor(bt, [rank, out_dim], [out_dim, 1], [BLOCK_R, BLOCK_N]) if DESCRIBED else bt
            )
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for r0 in range(0, rank, BLOCK_R):
                r = r0 + tl.arange(0, BLOCK_R)
                v_mask = in_tile[:, None] & (r < padded_rank(rank))[None, :]
                v_block = tl.load(v_rows + r[None, :], mask=v_mask, other=0.0)
                for split in tl.static_range(1, SPLITS):
                    v_block += tl.load(v_rows + split * v_plane + r[None, :], mask=v_mask, other=0.0)
                if DESCRIBED:
                    bt_block = bt_box.load([r0, first])
                else:
                    bt_block = tl.load(
                        bt + r[:, None].to(tl.int64) * out_dim + n[None, :],
                        mask=(r < rank)[:, None] & (n < out_dim)[None, :],
                        other=0.0,
                    )
                acc = add_product(acc, v_block, bt_block, KIND, UPCAST)
            acc *= tl.load(record + 5).to(tl.int32).to(tl.float32, bitcast=True)
            if WEIGHTED:
                acc *= tl.load(pair_weights + row, mask=in_tile, other=0.0).to(tl.float32)[:, None]
            offset = tl.load(record + 3).to(tl.int32)
            if ALIGNED:
                offset = tl.multiple_of(offset, 8)
            out_block = out + row[:, None] * out_stride + offset + n[None, :]
            mask = in_tile[:, None] & (n < out_dim)[None, :]
            if ACCUMULATE:
                acc += tl.load(out_block, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_block, acc.to(out.dtype.element_ty), mask=mask)
            if TOP_K:
                add_if_last(
                    out,
                    summed,
                    topk_ids,
                    arrivals + block,
                    num_experts,
                    out_stride,
                    summed_stride,
                    num_blocks,
                    row,
                    in_tile,
                    offset + n,
                    n < out_dim,
                    TOP_K,
                )


def by_rule(block_rows: int) -> Cut:
    """The cut of a launch over tiles of so many rows that was not measured."""
    return Cut(SMALL_COLUMNS if block_rows == SMALL else LARGE_COLUMNS, 0, 4, 2)


def cuts_of(table: SiteTable, num_rows: int, block_rows: int) -> list[Cut]:
    """How expand is cut on `num_rows` rows of v: one for each of the dtypes bound in `table`."""
    bits = [8 * KINDS[kind].itemsize for kind, _ in table.summary.kinds]
    launches = [Launch("expand", b, num_rows, table.summary.max_rank, table.out_dim, block_rows) for b in bits]
    return [table.tiles.find(launch) or by_rule(block_rows) for launch in launches]


def expand(
    table: SiteTable,
    v: Tensor,
    out: Tensor,
    tiles: Tensor,
    *,
    order: Tensor | None,
    pair_weights: Tensor | None,
    accumulate: bool,
    block_rows: int,
    pair_sum: PairSum | None = None,
) -> None:
    """Launch on every dtype bound in `table`. Writes only the rows of tiles and the columns of bound parts.

    v as `shrink` returned it for the same tiles; out [rows or pairs, columns], contiguous in its rows.
    `pair_weights` fp32 [pairs] multiplies each row once. With `pair_sum`, the pairs of a row are added there besides.
    """
    summed = pair_sum or PairSum(out, tiles, 0)
    for (kind, aligned), cut in zip(table.summary.kinds, cuts_of(table, v.shape[1], block_rows), strict=True):
        described = cut.loads != "pointers" and aligned
        num_blocks = table.num_parts * triton.cdiv(table.out_dim, cut.block)
        num_items = len(tiles) * num_blocks
        arrivals = tiles
        if pair_sum is not None:
            arrivals = torch.zeros(len(pair_sum.out), num_blocks, dtype=torch.int32, device=out.device)
        run = partial(
            expand_kernel[(table.tiles.num_programs(cut, num_items),)],
            v,
            out,
            tiles,
            tiles if order is None else order,
            v if pair_weights is None else pair_weights,
            table.records,
            summed.topk_ids,
            arrivals,
            summed.out,
            len(tiles),
            num_items,
            summed.num_experts,
            num_blocks,
            v.stride(0),
            v.stride(1),
            v.stride(2),
            out.stride(0),
            summed.out.stride(0),
            PARTS=table.num_parts,
            FIELDS=FIELDS,
            KIND=kind,
            ALIGNED=aligned,
            GATHER=order is not None,
            WEIGHTED=pair_weights is not None,
            ACCUMULATE=accumulate,
            UPCAST=bool(triton.knobs.runtime.interpret),
            DESCRIBED=described,
            TOP_K=pair_sum.topk_ids.shape[1] if pair_sum else 0,
            SPLITS=v.shape[0],
            BLOCK_M=block_rows,
            BLOCK_R=rank_block(table.summary.max_rank),
            BLOCK_N=cut.block,
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
        if described:
            launch_with_scratch(run, v.device)
        else:
            run()
