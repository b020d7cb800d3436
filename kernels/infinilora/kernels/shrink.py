"""Shrink on a device: v[s, p, part, :] = x[row of p, k-range of s] · A[slot, part, expert]ᵀ, summed in fp32.

The input width is cut into `splits` ranges so that few rows still fill the device; each range writes its own
plane of v and expand adds the planes in order. No atomics: the same batch gives the same bits.

A launch is a list of items, which its programs walk: one each, or, with a persistent grid, as many as come. Blocks are
read through pointers, or through descriptors (`descriptors`). `Cut` says which.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilora.kernels.descriptors import can_describe, launch_with_scratch
from infinilora.kernels.site_table import FIELDS, KINDS, SiteTable
from infinilora.kernels.tile_table import Cut, Launch
from infinilora.kernels.tiles import LARGE

NUM_PROGRAMS = 264
"""Two programs for each of the 132 multiprocessors of a Hopper GPU: what a launch should reach."""

MAX_SPLITS = 16
MIN_RANK_BLOCK, MAX_RANK_BLOCK = 16, 64
SPECIALIZED_RANK_BLOCK = 2 * MAX_RANK_BLOCK
"""Triton makes two groups of warps that multiply, 64 ranks each; of fewer, both would compute the same."""


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


@triton.jit(do_not_specialize=["num_tiles", "num_blocks", "num_items", "x_rows"])
def shrink_kernel(
    x,
    v,
    tiles,
    order,
    records,
    num_tiles,
    num_blocks,
    num_items,
    x_rows,
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
    DESCRIBED: tl.constexpr,
    DESCRIBED_X: tl.constexpr,
    SPECIALIZED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One item: one tile of rows, one block of ranks of one part, one range of the input. A program walks its items.

    x [x_rows, in_dim] fp32, bf16 or fp16; v fp32 [splits, rows or pairs, PARTS x v_part]; tiles int32 [n, 4].
    """
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tile = tiles + item % num_tiles * 4
        block, split = item // num_tiles % num_blocks, item // num_tiles // num_blocks
        start, rows, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        part = block % PARTS
        record = records + (slot.to(tl.int64) * PARTS + part) * FIELDS
        rank = tl.load(record + 2).to(tl.int32)
        first_rank = block // PARTS * BLOCK_R
        if (rows > 0) & (first_rank < rank) & (tl.load(record + 6) == KIND):
            expert = tl.load(tile + 3).to(tl.int64)
            a = weights_of(record, 0, 7, expert, KIND, ALIGNED)
            m = tl.arange(0, BLOCK_M)
            in_tile = m < rows
            v_row = tl.load(order + start + m, mask=in_tile, other=0) if GATHER else start + m
            v_row = v_row.to(tl.int64)
            x_places = x + (v_row // TOP_K)[:, None] * x_stride
            r = first_rank + tl.arange(0, BLOCK_R)
            a_places = a + r[None, :].to(tl.int64) * in_dim
            a_box = tl.make_tensor_descriptor(a, [rank, in_dim], [in_dim, 1], [BLOCK_R, BLOCK_K]) if DESCRIBED else a
            x_box = (
                tl.make_tensor_descriptor(x, [x_rows, in_dim], [x_stride, 1], [BLOCK_M, BLOCK_K]) if DESCRIBED_X else x
            )
            begin = split * split_width
            end = tl.minimum(begin + split_width, in_dim)
            # Two groups of warps take half of a product's rows each: let those be the ranks, of which there are 128.
            acc = tl.zeros((BLOCK_R, BLOCK_M) if SPECIALIZED else (BLOCK_M, BLOCK_R), dtype=tl.float32)
            for k0 in tl.range(begin, end, BLOCK_K, warp_specialize=SPECIALIZED):
                k = k0 + tl.arange(0, BLOCK_K)
                if DESCRIBED_X:
                    x_block = x_box.load([start, k0])
                else:
                    x_block = tl.load(x_places + k[None, :], mask=in_tile[:, None] & (k < end)[None, :], other=0.0)
                if DESCRIBED:
                    a_block = a_box.load([first_rank, k0]).T
                else:
                    a_block = tl.load(a_places + k[:, None], mask=(k < end)[:, None] & (r < rank)[None, :], other=0.0)
                left, right = (a_block.T, x_block.T) if SPECIALIZED else (x_block, a_block)
                if NATIVE:
                    acc = tl.dot(left, right, acc)
                else:
                    acc = tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision="tf32x3")
            v_block = v + split.to(tl.int64) * v_plane + v_row[:, None] * v_stride + part * v_part + r[None, :]
            if SPECIALIZED:
                acc = acc.T
            tl.store(v_block, acc, mask=in_tile[:, None] & (r < padded_rank(rank))[None, :])


def rank_block(max_rank: int) -> int:
    """Ranks of one program: all of them if they are few."""
    return min(MAX_RANK_BLOCK, max(MIN_RANK_BLOCK, 1 << (max_rank - 1).bit_length()))


def by_rule(dtype: torch.dtype) -> Cut:
    """The cut of a launch on x of this dtype that was not measured."""
    return Cut(64 if dtype is torch.float32 else 128, 0, 4, 3)


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
    widest = max((x.element_size(), *(KINDS[kind].itemsize for kind, _ in table.summary.kinds)))
    launch = Launch("shrink", 8 * widest, num_rows, max_rank, table.in_dim, block_rows)
    cut = table.tiles.find(launch) or by_rule(x.dtype)
    block_k = cut.block
    ranks = triton.cdiv(max_rank, MIN_RANK_BLOCK) * MIN_RANK_BLOCK
    splits = cut.splits or num_splits(len(tiles), max_rank, table.num_parts, table.in_dim, block_k)
    split_width = triton.cdiv(triton.cdiv(table.in_dim, splits), block_k) * block_k
    v = torch.empty(splits, num_rows, table.num_parts, ranks, dtype=torch.float32, device=x.device)
    for kind, aligned in table.summary.kinds:
        native = is_native(x.dtype, KINDS[kind])
        described = cut.loads != "pointers" and aligned
        described_x = described and order is None and can_describe(x)
        specialized = cut.loads == "specialized" and described_x and native and can_specialize(block_rows, max_rank)
        block_r = SPECIALIZED_RANK_BLOCK if specialized else rank_block(max_rank)
        num_blocks = table.num_parts * triton.cdiv(max_rank, block_r)
        num_items = len(tiles) * num_blocks * splits
        run = partial(
            shrink_kernel[(table.tiles.num_programs(cut, num_items),)],
            x,
            v,
            tiles,
            tiles if order is None else order,
            table.records,
            len(tiles),
            num_blocks,
            num_items,
            len(x),
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
            NATIVE=native and not triton.knobs.runtime.interpret,  # which cannot multiply 16-bit floats
            DESCRIBED=described,
            DESCRIBED_X=described_x,
            SPECIALIZED=specialized,
            BLOCK_M=block_rows,
            BLOCK_R=block_r,
            BLOCK_K=block_k,
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
        if described:
            launch_with_scratch(run, x.device)
        else:
            run()
    return v


def can_specialize(block_rows: int, max_rank: int) -> bool:
    """Whether two groups of warps can multiply half of the ranks each, while a third fetches for both."""
    return block_rows == LARGE and max_rank >= SPECIALIZED_RANK_BLOCK


def is_native(left: torch.dtype, right: torch.dtype) -> bool:
    """Whether tensor cores multiply these as they are."""
    return left == right and left is not torch.float32
