"""The pairs of a row of `down`, summed by the last program of expand: the same bits as by a launch of its own."""

import pytest
import torch
from torch import Tensor

from infinilora.kernels import reference
from infinilora.kernels.batch import SiteWeights, segment_table
from infinilora.kernels.tile_table import Cut, Sums
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
HIDDEN, FF, EXPERTS, TOP_K, NUM_ROWS = 40, 24, 5, 3, 14
SEGMENTS = ((0, 3, 2), (3, 5, 0), (9, 2, 1), (11, 1, 9))
WITHOUT_A_PAIR = 4
"""A row with an adapter, none of whose choices is an expert."""
Bound = dict[int, SiteWeights]


def down_bound(*dtypes: torch.dtype, seed: int = 1) -> Bound:
    ranks = ((4,), (20,), (1,))
    return aligned(make_bound(ranks, (HIDDEN,), in_dim=FF, dtypes=list(dtypes), experts=EXPERTS, seed=seed))


def routing() -> tuple[Tensor, Tensor]:
    """Experts may come twice in a row; some ids are no expert's."""
    rng = torch.Generator().manual_seed(7)
    ids = torch.randint(0, EXPERTS, (NUM_ROWS, TOP_K), generator=rng, dtype=torch.int32)
    ids[1, 0], ids[2, 2], ids[5] = -1, EXPERTS, 3
    ids[WITHOUT_A_PAIR] = -1
    return ids, torch.rand(NUM_ROWS, TOP_K, generator=rng)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def down(
    bound: Bound, act: Tensor, device: str, sums: Sums, *, per_sm: int = 0, out: Tensor | None = None, columns: int = 16
) -> Tensor:
    from infinilora.kernels.moe import moe_down
    from infinilora.kernels.tiles import StepRows

    table = make_table(bound, num_parts=1, in_dim=FF, out_dim=HIDDEN, device=device)
    table.tiles = EveryLaunch(Cut(32, 1, 4, 2), Cut(columns, 0, 4, 2, per_sm, sums=sums), num_sms=3)
    rows, (ids, weights) = StepRows.of(segment_table(SEGMENTS), len(act), device), routing()
    found = poisoned(len(act), HIDDEN, device=device) if out is None else out.to(device)
    is_added = out is not None
    moe_down(
        table, rows, act.to(device), ids.to(device), weights.to(device), found, accumulate=is_added, path="grouped"
    )
    return found.cpu()


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_down_equals_the_maths_and_the_reference(device: str, dtype: torch.dtype) -> None:
    bound, act, (ids, weights) = down_bound(dtype), normal(NUM_ROWS, TOP_K, FF, dtype=dtype), routing()
    plain = torch.empty(NUM_ROWS, HIDDEN)
    reference.moe_down(bound, segment_table(SEGMENTS), act, ids, weights, plain, accumulate=False)
    with poisoned_scratch():
        found = down(bound, act, device, "inside", per_sm=1)
    assert largest_error(found, plain) < TOLERANCE[dtype]
    assert largest_error(found, lora_maths.moe_down(bound, SEGMENTS, act, ids, weights, HIDDEN)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_both_ways_give_the_same_bits(device: str, dtype: torch.dtype) -> None:
    """With adapters of several dtypes side by side, whose launches follow one another."""
    bound, act = down_bound(F32, BF16, F16), normal(NUM_ROWS, TOP_K, FF)
    assert torch.equal(down(bound, act, device, "inside"), down(bound, act, device, "apart"))
    before = normal(NUM_ROWS, HIDDEN, seed=4, dtype=dtype)
    inside, apart = (down(bound, act, device, sums, out=before.clone()) for sums in ("inside", "apart"))
    assert torch.equal(inside, apart)
    for row in (WITHOUT_A_PAIR, 8, 11, 12, 13):
        assert torch.equal(inside[row], before[row])


@pytest.mark.parametrize("half", ["a", "bt"])
def test_another_adapters_factor_does_not_pass(device: str, half: str) -> None:
    bound, act, (ids, weights) = down_bound(F32), normal(NUM_ROWS, TOP_K, FF), routing()
    other = down_bound(F32, seed=2)
    mixed: Bound = {
        slot: tuple(
            type(p)(q.a, p.bt, p.scale, p.out_offset) if half == "a" else type(p)(p.a, q.bt, p.scale, p.out_offset)
            for p, q in zip(parts, other[slot], strict=True)
        )
        for slot, parts in bound.items()
    }
    wanted = lora_maths.moe_down(bound, SEGMENTS, act, ids, weights, HIDDEN)
    found = down(mixed, act, device, "inside")
    for start, num, _ in SEGMENTS[:3]:
        assert largest_error(found[start : start + num], wanted[start : start + num]) > FAULT


def test_a_row_is_summed_once_whoever_comes_last(device: str) -> None:
    """Blocks of columns count by themselves, and a persistent program may write several pairs of a row."""
    bound, act = down_bound(F32), normal(NUM_ROWS, TOP_K, FF)
    for columns, per_sm in ((16, 1), (32, 1), (64, 0)):
        inside = down(bound, act, device, "inside", per_sm=per_sm, columns=columns)
        assert torch.equal(inside, down(bound, act, device, "apart", columns=columns))
