"""Shrink on a device: v[s, p, part, :] = x[row of p, k-range of s] · A[slot, part, expert]ᵀ, summed in fp32.

The input width is cut into `splits` ranges so that few rows still fill the device; each range writes its own
plane of v and expand adds the planes in order. No atomics: the same batch gives the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilora.kernels.site_table import FIELDS, KINDS, SiteTable
from infinilora.kernels.tile_table import Cut, Launch

NUM_PROGRAMS = 264
"""Two programs for each of the 132 multiprocessors of a Hopper GPU: what a launch should reach."""

MAX_SPLITS = 16
MIN_RANK_BLOCK, MAX_RANK_BLOCK = 16, 64


@triton.jit
def weights_of(
    record, FIELD: tl.constexpr, EXPERT_FIELD: tl.constexpr, expert, KIND: tl.constexpr, ALIGNED: tl.constexpr
):
    """A typed pointer to an expert's A or Bt, from the address and the expert stride of a record."""
    address = tl.load(record + FIELD)
    if KIND == 0:
        pointer = address.to(tl.pointer_type(tl.float32))
    elif KIND == 1:
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    else:
        pointer = address.to(tl.pointer_type(tl.float16))
    pointer += expert * tl.load(record + EXPERT_FIELD)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def padded_rank(rank):
    """Ranks of v that are written: the rank, up to a multiple of 16, so that v is read in vectors. Zeros beyond it."""
    return tl.multiple_of((rank + 15) // 16 * 16, 16)


@triton.jit
def shrink_kernel(
    x,
    v,
    tiles,
    order,
    records,
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
    GATHER: tl.constexpr,
    TOP_K: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: one tile of rows, one block of ranks of one part, one range of the input.

    x [rows, in_dim] fp32, bf16 or fp16; v fp32 [splits, rows or pairs, PARTS x v_part]; tiles int32 [n, 4].
    """
    tile = tiles + tl.program_id(0) * 4
    start, rows, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if rows == 0:
        return
    part = tl.program_id(1) % PARTS
    record = records + (slot.to(tl.int64) * PARTS + part) * FIELDS
    rank = tl.load(record + 2).to(tl.int32)
    first_rank = (tl.program_id(1) // PARTS) * BLOCK_R
    if first_rank >= rank:
        return
    if tl.load(record + 6) != KIND:
        return
    expert = tl.load(tile + 3).to(tl.int64)
    a = weights_of(record, 0, 7, expert, KIND, ALIGNED)

    m = tl.arange(0, BLOCK_M)
    in_tile = m < rows
    v_row = tl.load(order + start + m, mask=in_tile, other=0) if GATHER else start + m
    v_row = v_row.to(tl.int64)
    x_rows = x + (v_row // TOP_K)[:, None] * x_stride
    r = first_rank + tl.arange(0, BLOCK_R)
    a_rows = a + r[None, :].to(tl.int64) * in_dim
    begin = tl.program_id(2) * split_width
    end = tl.minimum(begin + split_width, in_dim)
    acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for k0 in range(begin, end, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x_block = tl.load(x_rows + k[None, :], mask=in_tile[:, None] & (k < end)[None, :], other=0.0)
        a_block = tl.load(a_rows + k[:, None], mask=(k < end)[:, None] & (r < rank)[None, :], other=0.0)
        if NATIVE:
            acc = tl.dot(x_block, a_block, acc)
        else:
            acc = tl.dot(x_block.to(tl.float32), a_block.to(tl.float32), acc, input_precision="tf32x3")
    v_block = v + tl.program_id(2).to(tl.int64) * v_plane + v_row[:, None] * v_stride + part * v_part + r[None, :]
    tl.store(v_block, acc, mask=in_tile[:, None] & (r < padded_rank(rank))[None, :])


def rank_block(max_rank: int) -> int:
    """Ranks of one program: all of them if they are few."""
    return min(MAX_RANK_BLOCK, max(MIN_RANK_BLOCK, 1 << (max_rank - 1).bit_length()))


def num_splits(num_tiles: int, max_rank: int, num_parts: int, in_dim: int, block_k: int) -> int:
    """Ranges of the input: as many as fill the device, none shorter than four blocks; a power of two."""
    programs = num_tiles * num_parts * triton.cdiv(max_rank, rank_block(max_rank))
    wanted = triton.cdiv(NUM_PROGRAMS, max(programs, 1))
    possible = max(1, in_dim // (4 * block_k))
    splits = 1
    while splits * 2 <= min(wanted, possible, MAX_SPLITS):
        splits *= 2
    return splits


def shrink(
    table: SiteTable, x: Tensor, tiles: Tensor, *, order: Tensor | None, top_k: int, num_rows: int, block_rows: int
) -> Tensor:
    """Launch on every dtype bound in `table`; return v fp32 [splits, num_rows, parts, ranks], unwritten elsewhere.

    x [T, in_dim], contiguous in its rows. `order` None: tiles are of rows of x; else of pairs, whose row of x
    is pair // top_k. `num_rows` counts rows of v: rows, or pairs.
    """
    max_rank = table.summary.max_rank
    launch = Launch("shrink", 8 * x.element_size(), num_rows, max_rank, table.in_dim)
    cut = table.tiles.find(launch) or Cut(64 if x.dtype is torch.float32 else 128, 0, 4, 3)
    block_k = cut.block
    ranks = triton.cdiv(max_rank, MIN_RANK_BLOCK) * MIN_RANK_BLOCK
    splits = cut.splits or num_splits(len(tiles), max_rank, table.num_parts, table.in_dim, block_k)
    split_width = triton.cdiv(triton.cdiv(table.in_dim, splits), block_k) * block_k
    v = torch.empty(splits, num_rows, table.num_parts, ranks, dtype=torch.float32, device=x.device)
    block_r = rank_block(max_rank)
    grid = (len(tiles), table.num_parts * triton.cdiv(max_rank, block_r), splits)
    for kind, aligned in table.summary.kinds:
        shrink_kernel[grid](
            x,
            v,
            tiles,
            tiles if order is None else order,
            table.records,
            table.in_dim,
            x.stride(0),
            v.stride(0),
            v.stride(1),
            v.stride(2),
            split_width,
            PARTS=table.num_parts,
            FIELDS=FIELDS,
            KIND=kind,
            ALIGNED=aligned,
            GATHER=order is not None,
            TOP_K=top_k,
            NATIVE=is_native(x.dtype, KINDS[kind]),
            BLOCK_M=block_rows,
            BLOCK_R=block_r,
            BLOCK_K=block_k,
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
    return v


def is_native(left: torch.dtype, right: torch.dtype) -> bool:
    """Whether tensor cores multiply these as they are. The interpreter cannot multiply 16-bit floats at all."""
    return left == right and left is not torch.float32 and not triton.knobs.runtime.interpret
