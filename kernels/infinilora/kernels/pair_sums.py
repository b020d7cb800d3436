"""How the weighted deltas of a row's pairs become the row's: out[t] (+)= Σ_j weighted[t · k + j], in their order.

By a launch of its own; or inside expand, by whichever program writes the last of a row's pairs. Programs are then
counted by atomics, and nothing is summed by them: the same batch gives the same bits either way.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from infinilora.kernels.site_table import FIELDS, SiteTable
from infinilora.kernels.tiles import StepRows

COLUMNS = 256


@dataclass(frozen=True, slots=True)
class PairSum:
    """Where expand adds the pairs of a row: out [T, columns]; topk_ids int32 [T, k], contiguous, says which exist."""

    out: Tensor
    topk_ids: Tensor
    num_experts: int


@triton.jit
def add_if_last(
    weighted,
    out,
    topk_ids,
    arrivals,
    num_experts,
    weighted_stride,
    out_stride,
    arrivals_stride,
    pair,
    in_tile,
    column,
    in_part,
    TOP_K: tl.constexpr,
):
    """Of the rows whose last pair was just written, here, by this program: out += the sum of their pairs.

    pair, in_tile [M]; column, in_part [N]. `arrivals` counts a row's pairs of this block of columns, from 0 on.
    """
    row = pair // TOP_K
    chosen = tl.zeros_like(row)
    for choice in range(TOP_K):
        expert = tl.load(topk_ids + row * TOP_K + choice, mask=in_tile, other=-1)
        chosen += ((expert >= 0) & (expert < num_experts)).to(chosen.dtype)
    # Every thread has stored before any counts, and has seen the count before any reads what others stored.
    tl.debug_barrier()
    before = tl.atomic_add(arrivals + row * arrivals_stride, 1, mask=in_tile, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    is_last = in_tile & (before + 1 == chosen)
    total = tl.zeros((in_tile.shape[0], in_part.shape[0]), dtype=tl.float32)
    for choice in range(TOP_K):
        expert = tl.load(topk_ids + row * TOP_K + choice, mask=is_last, other=-1)
        exists = is_last & (expert >= 0) & (expert < num_experts)
        place = weighted + (row * TOP_K + choice)[:, None] * weighted_stride + column[None, :]
        total += tl.load(place, mask=exists[:, None] & in_part[None, :], other=0.0, cache_modifier=".cg")
    place = out + row[:, None] * out_stride + column[None, :]
    mask = is_last[:, None] & in_part[None, :]
    total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sum_pairs_kernel(
    weighted,
    out,
    topk_ids,
    slot_index,
    slot_list,
    records,
    num_slots,
    num_experts,
    columns,
    out_stride,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    TOP_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[t] (+)= Σ_j weighted[t · TOP_K + j] over the choices that have weights. One program: a row, some columns."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    index = tl.load(slot_index + t)
    if index < num_slots:
        slot = tl.load(slot_list + index).to(tl.int64)
        bound = n < 0
        for part in tl.static_range(PARTS):
            record = records + (slot * PARTS + part) * FIELDS
            first, out_dim = tl.load(record + 3), tl.load(record + 4)
            bound = bound | ((tl.load(record + 2) > 0) & (n >= first) & (n < first + out_dim))
        for j in range(TOP_K):
            expert = tl.load(topk_ids + t * TOP_K + j)
            exists = (expert >= 0) & (expert < num_experts)
            pair = weighted + (t * TOP_K + j) * columns + n
            acc += tl.load(pair, mask=bound & exists, other=0.0)
    row = out + t * out_stride + n
    if ACCUMULATE:
        acc += tl.load(row, mask=n < columns, other=0.0).to(tl.float32)
    tl.store(row, acc.to(out.dtype.element_ty), mask=n < columns)


def sum_pairs(
    table: SiteTable, rows: StepRows, weighted: Tensor, topk_ids: Tensor, out: Tensor, *, accumulate: bool
) -> None:
    """Sum each row's pairs of weighted fp32 [T · k, h] into out [T, h], all of whose elements are written."""
    grid = (rows.num_rows, triton.cdiv(table.out_dim, COLUMNS))
    sum_pairs_kernel[grid](
        weighted,
        out,
        topk_ids.contiguous(),
        rows.slot_index,
        rows.slot_list,
        table.records,
        len(rows.slots),
        table.num_experts,
        table.out_dim,
        out.stride(0),
        PARTS=table.num_parts,
        FIELDS=FIELDS,
        TOP_K=topk_ids.shape[1],
        ACCUMULATE=accumulate,
        BLOCK_N=COLUMNS,
        num_warps=4,
    )
