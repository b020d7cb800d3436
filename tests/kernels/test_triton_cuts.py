"""However a launch is cut, it computes the same: persistent grids, tensor descriptors, specialized warps.

Segments here are skewed, empty and of one row; rows that nobody may read hold NaN, next to those of a tile.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from infinilora.kernels import reference
from infinilora.kernels.batch import SiteWeights, segment_table
from infinilora.kernels.site_table import SiteTable
from infinilora.kernels.tile_table import Cut
from support import lora_maths
from support.triton_sites import (
    FAULT,
    TOLERANCE,
    EveryLaunch,
    aligned,
    largest_error,
    make_bound,
    make_table,
    poisoned,
    poisoned_scratch,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Bound = dict[int, SiteWeights]
Segments = tuple[tuple[int, int, int], ...]

NUM_SMS = 3
PLAIN = Cut(32, 2, 4, 2)
CUTS = {
    "persistent": (replace(PLAIN, per_sm=1), replace(PLAIN, per_sm=1)),
    "descriptors": (replace(PLAIN, loads="descriptors"), replace(PLAIN, loads="descriptors")),
    "both": (replace(PLAIN, per_sm=2, loads="descriptors"), replace(PLAIN, per_sm=1, loads="descriptors")),
    "specialized": (replace(PLAIN, loads="specialized"), replace(PLAIN, per_sm=1)),
}

IN_DIM, OUTS = 72, (40, 16, 8)
OUT_DIM = sum(OUTS)
RANKS = ((1, 1, 1), (4, 4, 4), (16, 0, 16), (20, 7, 3), (0, 0, 5))
SEGMENTS = ((0, 1, 0), (1, 2, 3), (3, 0, 2), (5, 3, 2), (8, 17, 1), (25, 1, 4), (26, 2, 9))
UNREAD = (3, 4, 26, 27, 28, 29)
"""In no segment, or of a slot that nobody bound."""
NUM_ROWS = 30

FF, EXPERTS, TOP_K = 24, 5, 2
MOE_RANKS = (4, 20, 1)
MOE_SEGMENTS = ((0, 3, 2), (3, 5, 0), (9, 2, 1), (11, 1, 9))
MOE_ROWS = 14


@pytest.fixture(params=CUTS)
def cuts(request: pytest.FixtureRequest) -> EveryLaunch:
    shrink, expand = CUTS[request.param]
    return EveryLaunch(shrink, expand, num_sms=NUM_SMS)


def table_of(bound: Bound, cuts: EveryLaunch, *, in_dim: int, outs: Sequence[int], device: str) -> SiteTable:
    table = make_table(bound, num_parts=len(outs), in_dim=in_dim, out_dim=sum(outs), device=device)
    table.tiles = cuts
    return table


def dense(
    bound: Bound,
    x: Tensor,
    cuts: EveryLaunch,
    device: str,
    *,
    segments: Segments = SEGMENTS,
    outs: Sequence[int] = OUTS,
    out: Tensor | None = None,
) -> Tensor:
    from infinilora.kernels import moe
    from infinilora.kernels.tiles import StepRows

    table = table_of(bound, cuts, in_dim=x.shape[1], outs=outs, device=device)
    found = poisoned(len(x), sum(outs), device=device) if out is None else out.to(device)
    rows = StepRows.of(segment_table(segments), len(x), device)
    moe.dense(table, rows, x.to(device), found, accumulate=out is not None, path="grouped")
    return found


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense_bound(dtype: torch.dtype, seed: int = 1) -> Bound:
    return aligned(make_bound(RANKS, OUTS, in_dim=IN_DIM, dtypes=[dtype], seed=seed))


def swapped(bound: Bound, other: Bound, half: str) -> Bound:
    return {
        slot: tuple(replace(p, **{half: getattr(q, half)}) for p, q in zip(parts, other[slot], strict=True))
        for slot, parts in bound.items()
    }


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_dense_equals_the_maths_and_the_reference(device: str, cuts: EveryLaunch, dtype: torch.dtype) -> None:
    bound, x = dense_bound(dtype), normal(NUM_ROWS, IN_DIM, dtype=dtype)
    wanted, plain = lora_maths.dense(bound, SEGMENTS, x, OUT_DIM), torch.empty(NUM_ROWS, OUT_DIM)
    reference.dense(bound, segment_table(SEGMENTS), x, plain, accumulate=False)
    x[list(UNREAD)] = float("nan")
    with poisoned_scratch():
        found = dense(bound, x, cuts, device)
    assert largest_error(found, wanted) < TOLERANCE[dtype]
    assert largest_error(found, plain) < TOLERANCE[dtype]


@pytest.mark.parametrize("cuts", ["both", "specialized"], indirect=True)
@pytest.mark.parametrize("half", ["a", "bt"])
def test_another_adapters_factor_does_not_pass(device: str, cuts: EveryLaunch, half: str) -> None:
    bound, x = dense_bound(BF16), normal(NUM_ROWS, IN_DIM, dtype=BF16)
    found = dense(swapped(bound, dense_bound(BF16, seed=2), half), x, cuts, device)
    wanted = lora_maths.dense(bound, SEGMENTS, x, OUT_DIM)
    for start, num, slot in SEGMENTS:
        if num and slot in bound:
            assert largest_error(found[start : start + num], wanted[start : start + num]) > FAULT


def test_rows_and_columns_of_nobody_stay_as_they_were(device: str, cuts: EveryLaunch) -> None:
    bound, x = dense_bound(BF16), normal(NUM_ROWS, IN_DIM, dtype=BF16)
    before = normal(NUM_ROWS, OUT_DIM, seed=5)
    delta = lora_maths.dense(bound, SEGMENTS, x, OUT_DIM)
    found = dense(bound, x, cuts, device, out=before.clone())
    assert largest_error(found, lora_maths.wide(before) + delta) < TOLERANCE[BF16]
    untouched = torch.from_numpy(delta == 0)
    assert torch.equal(found.cpu()[untouched], before[untouched])


def routing() -> tuple[Tensor, Tensor]:
    """Some ids are no expert's."""
    rng = torch.Generator().manual_seed(7)
    ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:TOP_K] for _ in range(MOE_ROWS)]).to(torch.int32)
    ids[1, 0], ids[4, 1] = -1, EXPERTS
    return ids, torch.rand(MOE_ROWS, TOP_K, generator=rng)


def gate_up(bound: Bound, x: Tensor, cuts: EveryLaunch, device: str) -> Tensor:
    from infinilora.kernels import moe
    from infinilora.kernels.tiles import StepRows

    table = table_of(bound, cuts, in_dim=IN_DIM, outs=(FF, FF), device=device)
    rows = StepRows.of(segment_table(MOE_SEGMENTS), MOE_ROWS, device)
    found = poisoned(MOE_ROWS, TOP_K, 2 * FF, device=device)
    moe.moe_gate_up(table, rows, x.to(device), routing()[0].to(device), found, accumulate=False, path="grouped")
    return found


def down(bound: Bound, act: Tensor, cuts: EveryLaunch, device: str) -> Tensor:
    from infinilora.kernels import moe
    from infinilora.kernels.tiles import StepRows

    table = table_of(bound, cuts, in_dim=FF, outs=(IN_DIM,), device=device)
    rows = StepRows.of(segment_table(MOE_SEGMENTS), MOE_ROWS, device)
    found, (ids, weights) = poisoned(MOE_ROWS, IN_DIM, device=device), (t.to(device) for t in routing())
    moe.moe_down(table, rows, act.to(device), ids, weights, found, accumulate=False, path="grouped")
    return found


def gate_up_bound(dtype: torch.dtype, seed: int = 1) -> Bound:
    ranks = [(r, r + 3) for r in MOE_RANKS]
    return aligned(make_bound(ranks, (FF, FF), in_dim=IN_DIM, dtypes=[dtype], experts=EXPERTS, seed=seed))


def down_bound(dtype: torch.dtype, seed: int = 1) -> Bound:
    ranks = [(r,) for r in MOE_RANKS]
    return aligned(make_bound(ranks, (IN_DIM,), in_dim=FF, dtypes=[dtype], experts=EXPERTS, seed=seed))


@pytest.mark.parametrize("cuts", ["persistent", "both"], indirect=True)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_experts_equal_the_maths_and_the_reference(device: str, cuts: EveryLaunch, dtype: torch.dtype) -> None:
    wide, narrow, (ids, weights) = gate_up_bound(dtype), down_bound(dtype), routing()
    x, act = normal(MOE_ROWS, IN_DIM, dtype=dtype), normal(MOE_ROWS, TOP_K, FF, dtype=dtype)
    plain, plain_sum = torch.empty(MOE_ROWS, TOP_K, 2 * FF), torch.empty(MOE_ROWS, IN_DIM)
    reference.moe_gate_up(wide, segment_table(MOE_SEGMENTS), x, ids, plain, accumulate=False)
    reference.moe_down(narrow, segment_table(MOE_SEGMENTS), act, ids, weights, plain_sum, accumulate=False)
    with poisoned_scratch():
        found, summed = gate_up(wide, x, cuts, device), down(narrow, act, cuts, device)
    assert largest_error(found, plain) < TOLERANCE[dtype]
    assert largest_error(summed, plain_sum) < TOLERANCE[dtype]
    assert largest_error(found, lora_maths.moe_gate_up(wide, MOE_SEGMENTS, x, ids, 2 * FF)) < TOLERANCE[dtype]
    wanted = lora_maths.moe_down(narrow, MOE_SEGMENTS, act, ids, weights, IN_DIM)
    assert largest_error(summed, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("cuts", ["both"], indirect=True)
@pytest.mark.parametrize("half", ["a", "bt"])
def test_another_experts_factor_does_not_pass(device: str, cuts: EveryLaunch, half: str) -> None:
    bound, x = gate_up_bound(BF16), normal(MOE_ROWS, IN_DIM, dtype=BF16)
    rolled: Bound = {
        slot: tuple(replace(p, a=p.a.roll(1, 0), bt=p.bt.roll(1, 0)) for p in parts) for slot, parts in bound.items()
    }
    wanted = lora_maths.moe_gate_up(bound, MOE_SEGMENTS, x, routing()[0], 2 * FF)
    assert largest_error(gate_up(swapped(bound, rolled, half), x, cuts, device), wanted) > FAULT


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_large_tiles_of_large_ranks(device: str, cuts: EveryLaunch, dtype: torch.dtype) -> None:
    """Where half of the ranks is worth a group of warps, items are of twice as many ranks."""
    segments, outs = ((0, 1, 1), (1, 66, 0), (68, 2, 1)), (8,)
    bound = aligned(make_bound(((130,), (40,)), outs, in_dim=IN_DIM, dtypes=[dtype]))
    x = normal(71, IN_DIM, dtype=dtype)
    wanted = lora_maths.dense(bound, segments, x, 8)
    x[67], x[70] = float("nan"), float("nan")
    found = dense(bound, x, cuts, device, segments=segments, outs=outs)
    assert largest_error(found, wanted) < TOLERANCE[dtype]
    tiles, splits, blocks = 4, 2, 2 if cuts.by_op["shrink"].loads == "specialized" else 3
    assert cuts.launched[0][0] == tiles * splits * blocks


def test_a_persistent_grid_has_no_more_programs_than_the_device_can_run(device: str, cuts: EveryLaunch) -> None:
    dense(dense_bound(F32), normal(NUM_ROWS, IN_DIM), cuts, device)
    for cut, (items, programs) in zip(cuts.by_op.values(), cuts.launched, strict=True):
        assert items > 2 * NUM_SMS
        assert programs == (cut.per_sm * NUM_SMS or items)


def test_there_are_as_many_programs_as_the_table_says(device: str) -> None:
    class Nobody(EveryLaunch):
        @override
        def num_programs(self, cut: Cut, num_items: int) -> int:
            return 0

    before = normal(NUM_ROWS, OUT_DIM, seed=5)
    nobody = Nobody(PLAIN, PLAIN, num_sms=NUM_SMS)
    assert torch.equal(
        dense(dense_bound(F32), normal(NUM_ROWS, IN_DIM), nobody, device, out=before.clone()).cpu(), before
    )


def test_what_is_not_aligned_is_read_through_pointers(device: str, cuts: EveryLaunch) -> None:
    crooked = make_bound(((3,), (20,)), (9,), in_dim=71, dtypes=[F32])
    x, segments = normal(8, 75)[:, 1:72], ((0, 3, 0), (4, 4, 1))
    found = dense(crooked, x, cuts, device, segments=segments, outs=(9,))
    assert largest_error(found, lora_maths.dense(crooked, segments, x, 9)) < TOLERANCE[F32]
    straight = aligned(make_bound(((3,), (20,)), (8,), in_dim=64, dtypes=[F32]))
    for rows in (normal(8, 80)[:, 1:65], normal(8, 65)[:, :64], normal(1, 64).expand(8, 64)):
        found = dense(straight, rows, cuts, device, segments=segments, outs=(8,))
        assert largest_error(found, lora_maths.dense(straight, segments, rows, 8)) < TOLERANCE[F32]


def test_memory_for_descriptors_is_torchs_and_for_one_launch_alone() -> None:
    """Whatever thread launches: Triton's allocator is a thing of the context, which has none by default."""
    from infinilora.kernels.descriptors import launch_with_scratch

    given: list[Tensor] = []

    def launch() -> None:
        given.append(allocator_here()(384, 128, None))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(launch_with_scratch, launch, torch.device("cpu")).result()
        assert given[0].numel() * given[0].element_size() == 384
        with pytest.raises(RuntimeError, match="no allocator was set"):
            pool.submit(launch).result()


def allocator_here() -> Callable[[int, int, int | None], Tensor]:
    from triton.runtime._allocation import _allocator

    return _allocator.get()  # type: ignore[no-any-return]


def test_a_step_with_fewer_tiles_than_its_room_leaves_the_rest_alone(device: str, cuts: EveryLaunch) -> None:
    from infinilora.kernels import moe
    from infinilora.kernels.tiles import StepRows

    bound = dense_bound(BF16)
    table = table_of(bound, cuts, in_dim=IN_DIM, outs=OUTS, device=device)
    rows, x = StepRows.bounded(NUM_ROWS, 4, device), normal(NUM_ROWS, IN_DIM, dtype=BF16)
    for segments in (((0, 2, 0), (2, 20, 3)), (), ((29, 1, 2),)):
        rows.refill(segment_table(segments))
        out = poisoned(NUM_ROWS, OUT_DIM, device=device)
        moe.dense(table, rows, x.to(device), out, accumulate=False, path="grouped")
        wanted = lora_maths.dense(bound, segments, x, OUT_DIM)
        assert largest_error(out, wanted) < TOLERANCE[BF16] if segments else not out.any()
