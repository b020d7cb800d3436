"""LoRA of a tiny batch on a device: every row, or pair, finds its own weights; nothing is sorted into tiles.

    shrink   v[s, p, part] = x of p, k-range of s · A[slot of p, part, expert of p]ᵀ       one program a (pair, part, s)
    expand   out[t] (+)= scale · Σ_j weight_j · (Σ_s v[s, pair j of t]) · Bt[slot, expert_j]    one a (row, columns)

Few rows share no weights, so a product of one row reads no more than a tile of sixteen would, and the dozen launches
that sort pairs by virtual expert would take longer than both. `expand` adds the choices of a row in registers: where
they are to be summed (`down`), the pairs' deltas are never written. All sums are fp32, in order: same bits again.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilora.kernels.shrink import MIN_RANK_BLOCK, num_splits, padded_rank, rank_block, weights_of
from infinilora.kernels.site_table import FIELDS, SiteTable
from infinilora.kernels.tiles import StepRows

MAX_ROWS = 16
"""Rows of a dense site up to which each finds its own weights. Not measured: the least that a tensor core takes."""

MAX_PAIRS = 128
"""Pairs of an expert site likewise: as many as the experts of a large model, so few of them share one. Not measured."""

COLUMNS, WIDTH = 128, 256


@dataclass(frozen=True, slots=True)
class Pairs:
    """Which weights each row of v is computed with. Dense: a pair is a row, and `topk_ids` is None."""

    rows: StepRows
    topk_ids: Tensor | None

    @property
    def top_k(self) -> int:
        return 1 if self.topk_ids is None else self.topk_ids.shape[1]

    @property
    def count(self) -> int:
        return self.rows.num_rows * self.top_k


@triton.jit
def slot_of(row, slot_index, slot_list, num_slots):
    """(slot, whether there is one) of a row of the step."""
    index = tl.load(slot_index + row)
    exists = index < num_slots
    return tl.load(slot_list + tl.where(exists, index, 0)).to(tl.int64), exists


@triton.jit
def expert_of(pair, topk_ids, num_experts, ROUTED: tl.constexpr):
    """(expert, whether there is one) of a pair; a dense site has one, number 0."""
    if ROUTED:
        chosen = tl.load(topk_ids + pair).to(tl.int64)
        exists = (chosen >= 0) & (chosen < num_experts)
        return tl.where(exists, chosen, 0), exists
    return pair - pair, pair >= 0


@triton.jit
def indexed_shrink_kernel(
    x,
    v,
    slot_index,
    slot_list,
    topk_ids,
    records,
    num_slots,
    num_experts,
    in_dim,
    x_stride,
    v_plane,
    v_stride,
    v_part,
    split_width,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOP_K: tl.constexpr,
    ROUTED: tl.constexpr,
    X_TOP_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: one pair, one block of ranks of one part, one range of the input. Row of x: pair // X_TOP_K."""
    pair = tl.program_id(0).to(tl.int64)
    slot, has_slot = slot_of(pair // TOP_K, slot_index, slot_list, num_slots)
    expert, has_expert = expert_of(pair, topk_ids, num_experts, ROUTED)
    part = tl.program_id(1) % PARTS
    record = records + (slot * PARTS + part) * FIELDS
    rank = tl.load(record + 2).to(tl.int32)
    first_rank = (tl.program_id(1) // PARTS) * BLOCK_R
    if (first_rank >= rank) | (tl.load(record + 6) != KIND):
        return
    if (has_slot & has_expert) == 0:
        return
    a = weights_of(record, 0, 7, expert, KIND, ALIGNED)
    r = first_rank + tl.arange(0, BLOCK_R)
    x_row = x + (pair // X_TOP_K) * x_stride
    a_rows = a + r[:, None].to(tl.int64) * in_dim
    begin = tl.program_id(2) * split_width
    end = tl.minimum(begin + split_width, in_dim)
    acc = tl.zeros((BLOCK_R, BLOCK_K), dtype=tl.float32)
    for k0 in range(begin, end, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x_block = tl.load(x_row + k, mask=k < end, other=0.0).to(tl.float32)
        a_block = tl.load(a_rows + k[None, :], mask=(r < rank)[:, None] & (k < end)[None, :], other=0.0)
        acc += a_block.to(tl.float32) * x_block[None, :]
    v_block = v + tl.program_id(2).to(tl.int64) * v_plane + pair * v_stride + part * v_part + r
    tl.store(v_block, tl.sum(acc, 1), mask=r < padded_rank(rank))


@triton.jit
def indexed_expand_kernel(
    v,
    out,
    slot_index,
    slot_list,
    topk_ids,
    pair_weights,
    records,
    num_slots,
    num_experts,
    v_plane,
    v_stride,
    v_part,
    out_stride,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOP_K: tl.constexpr,
    ROUTED: tl.constexpr,
    SUMMED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: one row of out, one block of columns of one part; the sum of the row's SUMMED pairs is added."""
    row = tl.program_id(0).to(tl.int64)
    slot, has_slot = slot_of(row * SUMMED // TOP_K, slot_index, slot_list, num_slots)
    part = tl.program_id(1) % PARTS
    record = records + (slot * PARTS + part) * FIELDS
    rank = tl.load(record + 2).to(tl.int32)
    out_dim = tl.load(record + 4).to(tl.int32)
    first = (tl.program_id(1) // PARTS) * BLOCK_N
    if (has_slot == 0) | (rank == 0) | (first >= out_dim):
        return
    if tl.load(record + 6) != KIND:
        return
    if ALIGNED:
        out_dim = tl.multiple_of(out_dim, 8 if KIND else 4)
    n = first + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for choice in range(SUMMED):
        pair = row * SUMMED + choice
        expert, has_expert = expert_of(pair, topk_ids, num_experts, ROUTED)
        bt = weights_of(record, 1, 8, expert, KIND, ALIGNED)
        acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for r0 in range(0, tl.where(has_expert, rank, 0), BLOCK_R):
            r = r0 + tl.arange(0, BLOCK_R)
            v_row = v + pair * v_stride + part * v_part + r
            v_block = tl.load(v_row, mask=r < rank, other=0.0)
            for split in tl.static_range(1, SPLITS):
                v_block += tl.load(v_row + split * v_plane, mask=r < rank, other=0.0)
            bt_block = tl.load(
                bt + r[:, None].to(tl.int64) * out_dim + n[None, :],
                mask=(r < rank)[:, None] & (n < out_dim)[None, :],
                other=0.0,
            )
            acc += tl.sum(v_block[:, None] * bt_block.to(tl.float32), 0)
        if WEIGHTED:
            acc *= tl.load(pair_weights + pair).to(tl.float32)
        total += tl.where(has_expert, acc, 0.0)
    total *= tl.load(record + 5).to(tl.int32).to(tl.float32, bitcast=True)
    place = out + row * out_stride + tl.load(record + 3).to(tl.int32) + n
    total += tl.load(place, mask=n < out_dim, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=n < out_dim)


def indexed(
    table: SiteTable, pairs: Pairs, x: Tensor, out: Tensor, *, x_top_k: int, summed: int, pair_weights: Tensor | None
) -> None:
    """Launch both on every dtype bound in `table`: out (+)= the deltas, in place.

    x [T or T · k, in_dim], row pair // x_top_k of it for a pair; out [T · k / summed, columns]. Both contiguous in
    their rows. `pair_weights` fp32 [T · k], contiguous.
    """
    for kind, aligned in table.summary.kinds:
        v = _shrink(table, pairs, x, kind, aligned=aligned, x_top_k=x_top_k)
        _expand(table, pairs, v, out, kind, aligned=aligned, summed=summed, pair_weights=pair_weights)


def _shrink(table: SiteTable, pairs: Pairs, x: Tensor, kind: int, *, aligned: bool, x_top_k: int) -> Tensor:
    max_rank = table.summary.max_rank
    ranks = triton.cdiv(max_rank, MIN_RANK_BLOCK) * MIN_RANK_BLOCK
    splits = num_splits(pairs.count, max_rank, table.num_parts, table.in_dim, WIDTH)
    v = torch.empty(splits, pairs.count, table.num_parts, ranks, dtype=torch.float32, device=x.device)
    block_r = min(MIN_RANK_BLOCK, rank_block(max_rank))
    grid = (pairs.count, table.num_parts * triton.cdiv(max_rank, block_r), splits)
    indexed_shrink_kernel[grid](
        x,
        v,
        *_places(table, pairs),
        table.in_dim,
        x.stride(0),
        v.stride(0),
        v.stride(1),
        v.stride(2),
        triton.cdiv(triton.cdiv(table.in_dim, splits), WIDTH) * WIDTH,
        PARTS=table.num_parts,
        FIELDS=FIELDS,
        KIND=kind,
        ALIGNED=aligned,
        TOP_K=pairs.top_k,
        ROUTED=pairs.topk_ids is not None,
        X_TOP_K=x_top_k,
        BLOCK_R=block_r,
        BLOCK_K=WIDTH,
        num_warps=4,
    )
    return v


def _expand(
    table: SiteTable,
    pairs: Pairs,
    v: Tensor,
    out: Tensor,
    kind: int,
    *,
    aligned: bool,
    summed: int,
    pair_weights: Tensor | None,
) -> None:
    slot_index, slot_list, topk_ids, records, num_slots, num_experts = _places(table, pairs)
    indexed_expand_kernel[(len(out), table.num_parts * triton.cdiv(table.out_dim, COLUMNS))](
        v,
        out,
        slot_index,
        slot_list,
        topk_ids,
        v if pair_weights is None else pair_weights,
        records,
        num_slots,
        num_experts,
        v.stride(0),
        v.stride(1),
        v.stride(2),
        out.stride(0),
        PARTS=table.num_parts,
        FIELDS=FIELDS,
        KIND=kind,
        ALIGNED=aligned,
        TOP_K=pairs.top_k,
        ROUTED=pairs.topk_ids is not None,
        SUMMED=summed,
        WEIGHTED=pair_weights is not None,
        SPLITS=v.shape[0],
        BLOCK_R=MIN_RANK_BLOCK,
        BLOCK_N=COLUMNS,
        num_warps=4,
    )


def _places(table: SiteTable, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """What both kernels find a pair's weights by; `topk_ids` of a dense site is never read."""
    rows = pairs.rows
    topk_ids = rows.slot_list if pairs.topk_ids is None else pairs.topk_ids
    return rows.slot_index, rows.slot_list, topk_ids, table.records, len(rows.slots), table.num_experts
