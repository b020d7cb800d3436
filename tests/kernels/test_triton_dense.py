"""Maths = reference = Triton on dense sites, for every dtype of weights and activations; no other adapter passes."""

import random
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from infinilora.kernels import reference
from infinilora.kernels.batch import SiteWeights, segment_table
from support import lora_maths
from support.triton_sites import (
    FAULT,
    TOLERANCE,
    aligned,
    largest_error,
    make_bound,
    make_table,
    poisoned,
    poisoned_scratch,
)

if TYPE_CHECKING:
    from infinilora.kernels.moe import Path

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
IN_DIM, OUTS, GAP = 72, (40, 16, 9), 3
OUT_DIM = sum(OUTS) + len(OUTS) * GAP
RANKS = ((1, 1, 1), (4, 4, 4), (16, 0, 16), (20, 7, 3), (0, 0, 5))
SEGMENTS = ((0, 1, 0), (1, 2, 3), (3, 0, 2), (5, 3, 2), (8, 17, 1), (25, 1, 4), (26, 2, 9))
NUM_ROWS = 30


def run(
    bound: dict[int, SiteWeights],
    x: Tensor,
    device: str,
    *,
    out: Tensor | None = None,
    segments: tuple[tuple[int, int, int], ...] = SEGMENTS,
    out_dim: int = OUT_DIM,
    path: "Path" = "auto",
) -> Tensor:
    """The delta, into poisoned memory; or added to `out`."""
    from infinilora.kernels.moe import dense
    from infinilora.kernels.tiles import StepRows

    table = make_table(bound, num_parts=3, in_dim=x.shape[1], out_dim=out_dim, device=device)
    rows = StepRows.of(segment_table(segments), len(x), device)
    y = poisoned(len(x), out_dim, device=device) if out is None else out.to(device)
    dense(table, rows, x.to(device), y, accumulate=out is not None, path=path)
    return y


def random_rows(num_rows: int = NUM_ROWS, in_dim: int = IN_DIM, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, in_dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "activations"), [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F32, BF16), (F16, BF16)]
)
def test_dense_equals_the_maths_and_the_reference(
    device: str, path: "Path", dtype: torch.dtype, activations: torch.dtype
) -> None:
    bound = make_bound(RANKS, OUTS, in_dim=IN_DIM, dtypes=[dtype], gap=GAP)
    x = random_rows(dtype=activations)
    wanted = lora_maths.dense(bound, SEGMENTS, x, OUT_DIM)
    plain = torch.empty(NUM_ROWS, OUT_DIM)
    reference.dense(bound, segment_table(SEGMENTS), x, plain, accumulate=False)
    found = run(bound, x, device, path=path)
    assert largest_error(found, wanted) < TOLERANCE[dtype]
    assert largest_error(found, plain) < TOLERANCE[dtype]


@pytest.mark.parametrize("half", ["a", "bt"])
def test_another_adapters_factor_does_not_pass(device: str, path: "Path", half: str) -> None:
    bound = make_bound(RANKS, OUTS, in_dim=IN_DIM, dtypes=[F32], gap=GAP)
    other = make_bound(RANKS, OUTS, in_dim=IN_DIM, dtypes=[F32], gap=GAP, seed=2)
    mixed = {
        slot: tuple(
            type(p)(q.a, p.bt, p.scale, p.out_offset) if half == "a" else type(p)(p.a, q.bt, p.scale, p.out_offset)
            for p, q in zip(parts, other[slot], strict=True)
        )
        for slot, parts in bound.items()
    }
    found = run(mixed, random_rows(), device, path=path)
    wanted = lora_maths.dense(bound, SEGMENTS, random_rows(), OUT_DIM)
    for start, num, slot in SEGMENTS:
        if num and slot in bound:
            assert largest_error(found[start : start + num], wanted[start : start + num]) > FAULT


def test_one_launch_serves_dtypes_and_ranks_side_by_side(device: str, path: "Path") -> None:
    bound = make_bound(RANKS, OUTS, in_dim=IN_DIM, dtypes=[F32, BF16, F16], gap=GAP)
    wanted = lora_maths.dense(bound, SEGMENTS, random_rows(), OUT_DIM)
    assert largest_error(run(bound, random_rows(), device, path=path), wanted) < TOLERANCE[BF16]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_read_in_vectors_give_the_same(device: str, path: "Path", dtype: torch.dtype) -> None:
    ranks, outs, segments = ((8, 4, 20), (1, 16, 5)), (32, 16, 16), ((0, 5, 0), (5, 18, 1))
    bound = aligned(make_bound(ranks, outs, in_dim=64, dtypes=[dtype]))
    table = make_table(bound, num_parts=3, in_dim=64, out_dim=64, device=device)
    assert [vectors for _, vectors in table.summary.kinds] == [True]
    x = random_rows(23, 64)
    found = run(bound, x, device, segments=segments, out_dim=64, path=path)
    assert largest_error(found, lora_maths.dense(bound, segments, x, 64)) < TOLERANCE[dtype]


def test_accumulating_adds_to_what_is_there_and_to_nothing_else(device: str, path: "Path") -> None:
    bound = make_bound(RANKS, OUTS, in_dim=IN_DIM, dtypes=[F32], gap=GAP)
    x, before = random_rows(), random_rows(NUM_ROWS, OUT_DIM, seed=5)
    delta = lora_maths.dense(bound, SEGMENTS, x, OUT_DIM)
    found = run(bound, x, device, out=before.clone(), path=path)
    assert largest_error(found, lora_maths.wide(before) + delta) < TOLERANCE[F32]
    untouched = torch.from_numpy(delta == 0)
    assert torch.equal(found.cpu()[untouched], before[untouched])


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_outputs_of_16_bits_are_off_by_one_step_at_most(device: str, path: "Path", dtype: torch.dtype) -> None:
    bound = make_bound(RANKS, OUTS, in_dim=IN_DIM, dtypes=[F32], gap=GAP)
    before = random_rows(NUM_ROWS, OUT_DIM, dtype, seed=5)
    wanted = lora_maths.wide(before) + lora_maths.dense(bound, SEGMENTS, random_rows(), OUT_DIM)
    found = run(bound, random_rows(), device, out=before.clone(), path=path)
    assert found.dtype is dtype
    steps = torch.from_numpy(wanted).abs() * torch.finfo(dtype).eps
    assert bool(((found.cpu().double() - torch.from_numpy(wanted)).abs() <= 1.01 * steps + 1e-5).all())


def test_strided_rows_are_read_and_written_in_place(device: str, path: "Path") -> None:
    bound = make_bound(RANKS, OUTS, in_dim=IN_DIM, dtypes=[F32], gap=GAP)
    x = random_rows(NUM_ROWS, IN_DIM + 8)[:, 4 : 4 + IN_DIM]
    wide = random_rows(NUM_ROWS, OUT_DIM + 6, seed=3).to(device)
    before = wide.clone()
    run(bound, x, device, out=wide[:, 2:-4], path=path)
    wanted = lora_maths.wide(before[:, 2:-4].cpu()) + lora_maths.dense(bound, SEGMENTS, x, OUT_DIM)
    assert largest_error(wide[:, 2:-4], wanted) < TOLERANCE[F32]
    assert torch.equal(wide[:, :2], before[:, :2])
    assert torch.equal(wide[:, -4:], before[:, -4:])


def test_many_rows_take_large_tiles(device: str) -> None:
    ranks, outs, segments = ((5, 0, 0), (24, 0, 0)), (33, 0, 0), ((0, 70, 0), (70, 6, 1))
    bound = make_bound(ranks, outs, in_dim=40, dtypes=[F32])
    x = random_rows(76, 40)
    found = run(bound, x, device, segments=segments, out_dim=33)
    assert largest_error(found, lora_maths.dense(bound, segments, x, 33)) < TOLERANCE[F32]


def test_a_wide_input_is_split_and_gives_the_same_bits_again(device: str, path: "Path") -> None:
    from infinilora.kernels.shrink import num_splits

    in_dim, segments = 1100, ((0, 2, 0), (2, 1, 1))
    assert num_splits(2, 6, 1, in_dim, 64) == 4
    bound = make_bound(((6, 0, 0), (3, 0, 0)), (8, 0, 0), in_dim=in_dim, dtypes=[F32])
    x = random_rows(3, in_dim)
    found = run(bound, x, device, segments=segments, out_dim=8, path=path)
    assert largest_error(found, lora_maths.dense(bound, segments, x, 8)) < TOLERANCE[F32]
    assert torch.equal(found, run(bound, x, device, segments=segments, out_dim=8, path=path))


def test_no_segments_give_zeros_or_leave_all_as_it_was(device: str, path: "Path") -> None:
    bound = make_bound(RANKS, OUTS, in_dim=IN_DIM, dtypes=[F32], gap=GAP)
    assert not run(bound, random_rows(), device, segments=(), path=path).any()
    before = random_rows(NUM_ROWS, OUT_DIM, seed=5)
    assert torch.equal(run(bound, random_rows(), device, out=before.clone(), segments=(), path=path).cpu(), before)


def test_a_cleared_slot_adds_nothing(device: str) -> None:
    from infinilora.kernels.moe import dense
    from infinilora.kernels.tiles import StepRows

    bound = make_bound(RANKS, OUTS, in_dim=IN_DIM, dtypes=[F32], gap=GAP)
    table = make_table(bound, num_parts=3, in_dim=IN_DIM, out_dim=OUT_DIM, device=device)
    table.clear(3)
    rows = StepRows.of(segment_table(SEGMENTS), NUM_ROWS, device)
    found = poisoned(NUM_ROWS, OUT_DIM, device=device)
    dense(table, rows, random_rows().to(device), found, accumulate=False)
    del bound[3]
    assert largest_error(found, lora_maths.dense(bound, SEGMENTS, random_rows(), OUT_DIM)) < TOLERANCE[F32]
    assert table.summary.max_rank == 16


@pytest.mark.parametrize("segment", [(-1, 2, 0), (0, 31, 0), (0, 1, -1), (0, 1, 10)])
def test_rows_and_slots_that_do_not_exist_are_refused(device: str, segment: tuple[int, int, int]) -> None:
    bound = make_bound(RANKS, OUTS, in_dim=IN_DIM, dtypes=[F32], gap=GAP)
    with pytest.raises(ValueError, match="slot"):
        run(bound, random_rows(), device, segments=(segment,))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_nothing_unwritten_is_read_at_ranks_of_several_blocks(device: str, path: "Path", dtype: torch.dtype) -> None:
    ranks, outs, segments = ((70, 3, 0), (17, 64, 0)), (20, 12, 0), ((0, 3, 0), (3, 2, 1))
    bound = make_bound(ranks, outs, in_dim=40, dtypes=[dtype])
    x = random_rows(6, 40)
    with poisoned_scratch():
        assert bool(torch.empty(3).isnan().all())
        found = run(bound, x, device, segments=segments, out_dim=32, path=path)
    assert largest_error(found, lora_maths.dense(bound, segments, x, 32)) < TOLERANCE[dtype]


@pytest.mark.parametrize("seed", range(4))
def test_random_ranks_and_popularities(device: str, path: "Path", seed: int) -> None:
    """Ranks 1 to 256; segments empty, of one row, and one that has most rows; slots that nobody bound."""
    dice = random.Random(seed)
    ranks = [[dice.choice((1, 2, 8, 17, 64, 100, 256)) for _ in OUTS] for _ in range(5)]
    bound = make_bound(ranks, OUTS, in_dim=IN_DIM, dtypes=[F32, BF16], gap=GAP, seed=seed)
    counts = [dice.choice((0, 1, 1, 2, 3)) for _ in range(6)]
    counts[dice.randrange(6)] = 19
    slots = dice.sample(range(7), 6)
    starts = [sum(counts[:i]) + i // 3 for i in range(6)]
    segments = tuple(zip(starts, counts, slots, strict=True))
    x = random_rows(starts[-1] + counts[-1] + 1, seed=seed)
    found = run(bound, x, device, segments=segments, path=path)
    assert largest_error(found, lora_maths.dense(bound, segments, x, OUT_DIM)) < TOLERANCE[BF16]


@pytest.mark.parametrize(("num_rows", "is_indexed"), [(1, True), (16, True), (17, False)])
def test_few_rows_find_their_own_weights_and_many_are_sorted(num_rows: int, is_indexed: bool) -> None:
    from infinilora.kernels import indexed, moe

    assert moe._is_indexed("auto", num_rows, indexed.MAX_ROWS) is is_indexed
