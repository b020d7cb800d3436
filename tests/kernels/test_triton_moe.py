"""Maths = reference = Triton on expert sites: (adapter, expert) as virtual experts; none other passes."""

import random
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from infinilora.kernels import reference
from infinilora.kernels.batch import Part, SiteWeights, segment_table
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
HIDDEN, FF, EXPERTS, TOP_K, NUM_ROWS = 40, 24, 5, 2, 14
RANKS = (4, 20, 1)
SEGMENTS = ((0, 3, 2), (3, 5, 0), (9, 2, 1), (11, 1, 9))
Bound = dict[int, SiteWeights]


def gate_up_bound(dtype: torch.dtype, seed: int = 1) -> Bound:
    ranks = [(r, r + 3) for r in RANKS]
    return make_bound(ranks, (FF, FF), in_dim=HIDDEN, dtypes=[dtype], experts=EXPERTS, seed=seed)


def down_bound(dtype: torch.dtype, seed: int = 1) -> Bound:
    return make_bound([(r,) for r in RANKS], (HIDDEN,), in_dim=FF, dtypes=[dtype], experts=EXPERTS, seed=seed)


def routing(num_rows: int = NUM_ROWS) -> tuple[Tensor, Tensor]:
    """Experts without repetition in a row; some ids are no expert's."""
    rng = torch.Generator().manual_seed(7)
    ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:TOP_K] for _ in range(num_rows)]).to(torch.int32)
    ids[1, 0], ids[4, 1] = -1, EXPERTS
    return ids, torch.rand(num_rows, TOP_K, generator=rng)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run_gate_up(bound: Bound, x: Tensor, device: str, out: Tensor | None = None, *, path: "Path" = "auto") -> Tensor:
    from infinilora.kernels.moe import moe_gate_up
    from infinilora.kernels.tiles import StepRows

    table = make_table(bound, num_parts=2, in_dim=HIDDEN, out_dim=2 * FF, device=device)
    rows = StepRows.of(segment_table(SEGMENTS), len(x), device)
    y = poisoned(len(x), TOP_K, 2 * FF, device=device) if out is None else out.to(device)
    moe_gate_up(table, rows, x.to(device), routing()[0].to(device), y, accumulate=out is not None, path=path)
    return y


def run_down(bound: Bound, act: Tensor, device: str, out: Tensor | None = None, *, path: "Path" = "auto") -> Tensor:
    return down(bound, act, *routing(), device, out, path=path)


def down(
    bound: Bound,
    act: Tensor,
    ids: Tensor,
    weights: Tensor,
    device: str,
    out: Tensor | None = None,
    *,
    path: "Path",
) -> Tensor:
    from infinilora.kernels.moe import moe_down
    from infinilora.kernels.tiles import StepRows

    table = make_table(bound, num_parts=1, in_dim=FF, out_dim=HIDDEN, device=device)
    rows = StepRows.of(segment_table(SEGMENTS), len(act), device)
    y = poisoned(len(act), HIDDEN, device=device) if out is None else out.to(device)
    chosen, weighed = ids.to(device), weights.to(device)
    moe_down(table, rows, act.to(device), chosen, weighed, y, accumulate=out is not None, path=path)
    return y


@pytest.mark.parametrize(("dtype", "activations"), [(F32, F32), (BF16, BF16), (F16, F32)])
def test_gate_up_equals_the_maths_and_the_reference(
    device: str, path: "Path", dtype: torch.dtype, activations: torch.dtype
) -> None:
    bound, x, ids = gate_up_bound(dtype), normal(NUM_ROWS, HIDDEN, dtype=activations), routing()[0]
    plain = torch.empty(NUM_ROWS, TOP_K, 2 * FF)
    reference.moe_gate_up(bound, segment_table(SEGMENTS), x, ids, plain, accumulate=False)
    found = run_gate_up(bound, x, device, path=path)
    assert largest_error(found, lora_maths.moe_gate_up(bound, SEGMENTS, x, ids, 2 * FF)) < TOLERANCE[dtype]
    assert largest_error(found, plain) < TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "activations"), [(F32, F32), (BF16, BF16), (F16, F32)])
def test_down_equals_the_maths_and_the_reference(
    device: str, path: "Path", dtype: torch.dtype, activations: torch.dtype
) -> None:
    bound, act, (ids, weights) = down_bound(dtype), normal(NUM_ROWS, TOP_K, FF, dtype=activations), routing()
    plain = torch.empty(NUM_ROWS, HIDDEN)
    reference.moe_down(bound, segment_table(SEGMENTS), act, ids, weights, plain, accumulate=False)
    found = run_down(bound, act, device, path=path)
    assert largest_error(found, lora_maths.moe_down(bound, SEGMENTS, act, ids, weights, HIDDEN)) < TOLERANCE[dtype]
    assert largest_error(found, plain) < TOLERANCE[dtype]


def swapped(bound: Bound, other: Bound, half: str) -> Bound:
    def mix(p: Part, q: Part) -> Part:
        return Part(q.a, p.bt, p.scale, p.out_offset) if half == "a" else Part(p.a, q.bt, p.scale, p.out_offset)

    return {slot: tuple(mix(p, q) for p, q in zip(parts, other[slot], strict=True)) for slot, parts in bound.items()}


@pytest.mark.parametrize("half", ["a", "bt"])
def test_another_adapters_factor_does_not_pass(device: str, path: "Path", half: str) -> None:
    x, act, (ids, weights) = normal(NUM_ROWS, HIDDEN), normal(NUM_ROWS, TOP_K, FF), routing()
    gate_up, downward = gate_up_bound(F32), down_bound(F32)
    found = run_gate_up(swapped(gate_up, gate_up_bound(F32, seed=2), half), x, device, path=path)
    summed = run_down(swapped(downward, down_bound(F32, seed=2), half), act, device, path=path)
    wanted = lora_maths.moe_gate_up(gate_up, SEGMENTS, x, ids, 2 * FF)
    wanted_sum = lora_maths.moe_down(downward, SEGMENTS, act, ids, weights, HIDDEN)
    for start, num, _ in SEGMENTS[:3]:
        rows = slice(start, start + num)
        assert largest_error(found[rows], wanted[rows]) > FAULT
        assert largest_error(summed[rows], wanted_sum[rows]) > FAULT


@pytest.mark.parametrize("half", ["a", "bt"])
def test_another_experts_factor_does_not_pass(device: str, path: "Path", half: str) -> None:
    def rolled(bound: Bound) -> Bound:
        return {
            slot: tuple(Part(p.a.roll(1, 0), p.bt.roll(1, 0), p.scale, p.out_offset) for p in parts)
            for slot, parts in bound.items()
        }

    bound, x = gate_up_bound(F32), normal(NUM_ROWS, HIDDEN)
    wanted = lora_maths.moe_gate_up(bound, SEGMENTS, x, routing()[0], 2 * FF)
    assert largest_error(run_gate_up(swapped(bound, rolled(bound), half), x, device, path=path), wanted) > FAULT


def test_accumulating_adds_to_what_is_there(device: str, path: "Path") -> None:
    x, act, (ids, weights) = normal(NUM_ROWS, HIDDEN), normal(NUM_ROWS, TOP_K, FF), routing()
    gate_up, downward = gate_up_bound(F32), down_bound(F32)
    before, before_sum = normal(NUM_ROWS, TOP_K, 2 * FF, seed=3), normal(NUM_ROWS, HIDDEN, seed=4)
    found = run_gate_up(gate_up, x, device, before.clone(), path=path)
    summed = run_down(downward, act, device, before_sum.clone(), path=path)
    wanted = lora_maths.wide(before) + lora_maths.moe_gate_up(gate_up, SEGMENTS, x, ids, 2 * FF)
    wanted_sum = lora_maths.wide(before_sum) + lora_maths.moe_down(downward, SEGMENTS, act, ids, weights, HIDDEN)
    assert largest_error(found, wanted) < TOLERANCE[F32]
    assert largest_error(summed, wanted_sum) < TOLERANCE[F32]
    assert torch.equal(summed.cpu()[8], before_sum[8])
    assert torch.equal(summed.cpu()[11:], before_sum[11:])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_read_in_vectors_give_the_same(device: str, path: "Path", dtype: torch.dtype) -> None:
    bound, act, (ids, weights) = aligned(down_bound(dtype)), normal(NUM_ROWS, TOP_K, FF), routing()
    table = make_table(bound, num_parts=1, in_dim=FF, out_dim=HIDDEN, device=device)
    assert [vectors for _, vectors in table.summary.kinds] == [True]
    wanted = lora_maths.moe_down(bound, SEGMENTS, act, ids, weights, HIDDEN)
    assert largest_error(run_down(bound, act, device, path=path), wanted) < TOLERANCE[dtype]


def test_a_column_that_no_part_covers_is_zero(device: str, path: "Path") -> None:
    whole = down_bound(F32)
    bound: Bound = {slot: (Part(p[0].a, p[0].bt[:, :, 8:30].contiguous(), p[0].scale, 8),) for slot, p in whole.items()}
    act, (ids, weights) = normal(NUM_ROWS, TOP_K, FF), routing()
    wanted = lora_maths.moe_down(bound, SEGMENTS, act, ids, weights, HIDDEN)
    assert not wanted[:, :8].any()
    assert largest_error(run_down(bound, act, device, path=path), wanted) < TOLERANCE[F32]


def test_every_pair_is_in_exactly_one_tile_of_its_virtual_expert(device: str) -> None:
    from infinilora.kernels.tiles import LARGE, SMALL, PairTiles, StepRows

    rng = torch.Generator().manual_seed(3)
    for num_rows, num_experts, wanted_rows in ((4, 5, SMALL), (37, 3, SMALL), (300, 2, LARGE)):
        segments = ((0, num_rows // 3, 4), (num_rows // 3, num_rows // 2, 1))
        ids = torch.randint(-1, num_experts + 1, (num_rows, 2), generator=rng, dtype=torch.int32)
        rows = StepRows.of(segment_table(segments), num_rows, device)
        pairs = PairTiles.of(rows, ids.to(device), num_experts)
        assert pairs.block_rows == wanted_rows
        slots = {t: slot for start, num, slot in segments for t in range(start, start + num)}
        placed = {}
        for start, num, slot, expert in pairs.tiles.tolist():
            assert num <= pairs.block_rows
            for pair in pairs.order[start : start + num].tolist():
                assert pair not in placed
                placed[pair] = (slot, expert)
        assert placed == {
            t * 2 + j: (slots[t], int(ids[t, j])) for t in slots for j in range(2) if 0 <= ids[t, j] < num_experts
        }


def test_nothing_unwritten_is_read(device: str, path: "Path") -> None:
    x, act, (ids, weights) = normal(NUM_ROWS, HIDDEN), normal(NUM_ROWS, TOP_K, FF), routing()
    gate_up, downward = gate_up_bound(F32), down_bound(F32)
    with poisoned_scratch():
        assert bool(torch.empty(3).isnan().all())
        found, summed = run_gate_up(gate_up, x, device, path=path), run_down(downward, act, device, path=path)
    assert largest_error(found, lora_maths.moe_gate_up(gate_up, SEGMENTS, x, ids, 2 * FF)) < TOLERANCE[F32]
    wanted = lora_maths.moe_down(downward, SEGMENTS, act, ids, weights, HIDDEN)
    assert largest_error(summed, wanted) < TOLERANCE[F32]


def test_many_pairs_of_an_expert_take_large_tiles(device: str) -> None:
    from infinilora.kernels.moe import moe_down
    from infinilora.kernels.tiles import StepRows

    bound = make_bound([(3,)], (9,), in_dim=11, dtypes=[F32], experts=2)
    segments, act = ((0, 150, 0),), normal(150, 1, 11)
    ids = (torch.arange(150) % 2).to(torch.int32)[:, None]
    weights, out = normal(150, 1, seed=2).abs(), poisoned(150, 9, device=device)
    table = make_table(bound, num_parts=1, in_dim=11, out_dim=9, device=device)
    rows = StepRows.of(segment_table(segments), 150, device)
    moe_down(table, rows, act.to(device), ids.to(device), weights.to(device), out, accumulate=False)
    wanted = lora_maths.moe_down(bound, segments, act, ids, weights, 9)
    assert largest_error(out, wanted) < TOLERANCE[F32]


@pytest.mark.parametrize("seed", range(3))
def test_random_ranks_and_routing(device: str, path: "Path", seed: int) -> None:
    """Ranks 1 to 256; experts that nobody chose, that everybody did, and ids that are no expert's."""
    dice = random.Random(seed)
    ranks = [(dice.choice((1, 8, 33, 128, 256)),) for _ in range(3)]
    bound = make_bound(ranks, (HIDDEN,), in_dim=FF, dtypes=[F32, BF16], experts=EXPERTS, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    ids = torch.where(torch.rand(NUM_ROWS, TOP_K, generator=rng) < 0.5, 1, EXPERTS - 1).to(torch.int32)
    ids[:, 1] = torch.randint(-1, EXPERTS + 1, (NUM_ROWS,), generator=rng)
    act, weights = normal(NUM_ROWS, TOP_K, FF, seed=seed), torch.rand(NUM_ROWS, TOP_K, generator=rng)
    found = down(bound, act, ids, weights, device, path=path)
    assert largest_error(found, lora_maths.moe_down(bound, SEGMENTS, act, ids, weights, HIDDEN)) < TOLERANCE[BF16]


def test_the_weight_of_a_pair_without_an_expert_may_be_anything(device: str, path: "Path") -> None:
    bound, act, (ids, weights) = down_bound(F32), normal(NUM_ROWS, TOP_K, FF), routing()
    wanted = lora_maths.moe_down(bound, SEGMENTS, act, ids, weights, HIDDEN)
    weights[1, 0] = weights[4, 1] = float("nan")
    found = down(bound, act, ids, weights, device, path=path)
    assert largest_error(found, wanted) < TOLERANCE[F32]
