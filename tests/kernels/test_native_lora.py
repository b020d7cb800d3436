"""Maths = reference = native, for every dtype, instruction set and thread count; and no other adapter passes."""

import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from infinilora.kernels import native, reference
from infinilora.kernels.batch import EMBED, MOE_DOWN, MOE_GATE_UP, Part, SiteWeights, segment_table
from infinilora.kernels.settings import LEVELS
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.protocol.adapter import NUM_SITES, Site
from support import lora_maths
from support.instruction_sets import limited_to

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QKV_OUTS = (96, 40, 33)
IN_DIM, OUT_DIM = 200, 3 * 5 + sum(QKV_OUTS)
RANKS = ((1, 1, 1), (4, 4, 4), (16, 0, 16), (8, 64, 3), (256, 7, 31), (0, 0, 5))
SEGMENTS = ((0, 1, 0), (1, 2, 1), (3, 0, 2), (5, 3, 2), (8, 9, 3), (17, 90, 4), (107, 1, 5), (108, 4, 9))
NUM_ROWS = 115
FAULT = 0.05
"""Another adapter's delta differs by about 1; ours by rounding only."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(12)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every instruction set; conftest.py leaves out those that this processor has not got."""
    with limited_to(request.param):
        yield


def make_bound(dtype: torch.dtype, *, seed: int = 1) -> dict[int, SiteWeights]:
    rng = torch.Generator().manual_seed(seed)
    return {
        slot: lora_maths.random_site(rng, ranks, QKV_OUTS, in_dim=IN_DIM, dtype=dtype, gap=5)
        for slot, ranks in enumerate(RANKS)
    }


def make_kernels(
    bound: Mapping[int, SiteWeights], site: int, in_dim: int, out_dim: int, *, threads: int = 2
) -> SlotKernels:
    kernels = SlotKernels(num_slots=10, num_layers=2, device="cpu", threads=threads)
    for slot, parts in bound.items():
        kernels.bind(slot, 1, site, parts, in_dim, out_dim)
    return kernels


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"))


def largest_error(found: Tensor, wanted: np.ndarray) -> float:
    return float(np.abs(found.double().numpy() - wanted).max())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_equals_the_maths_and_the_reference(dtype: torch.dtype, threads: int, level: None) -> None:
    bound = make_bound(dtype)
    kernels = make_kernels(bound, Site.QKV, IN_DIM, OUT_DIM, threads=threads)
    x = torch.randn(NUM_ROWS, IN_DIM + 9, generator=torch.Generator().manual_seed(2))[:, :IN_DIM]
    wanted = lora_maths.dense(bound, SEGMENTS, x, OUT_DIM)
    base = torch.randn(NUM_ROWS, OUT_DIM + 3)[:, :OUT_DIM]
    for accumulate, ground in ((False, np.zeros_like(wanted)), (True, lora_maths.wide(base))):
        ours = base.clone() if accumulate else poisoned(NUM_ROWS, OUT_DIM)
        plain = ours.clone()
        kernels.dense(1, Site.QKV, segment_table(SEGMENTS), x, ours, accumulate=accumulate)
        reference.dense(bound, segment_table(SEGMENTS), x, plain, accumulate=accumulate)
        assert largest_error(ours, wanted + ground) < 2e-5
        assert largest_error(plain, wanted + ground) < 2e-5


@pytest.mark.parametrize("segments", [((0, 1, 4),), ((0, 2, 4),), ((0, 7, 4),), ((0, 64, 4),), ((0, 300, 4),)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_big_adapter_is_cut_over_threads_and_stays_right(
    dtype: torch.dtype, segments: lora_maths.Rows, level: None
) -> None:
    """Of more columns than a panel of Bt has, and some that fill no tile."""
    rng = torch.Generator().manual_seed(3)
    site = lora_maths.random_site(rng, (128,), (1000,), in_dim=900, dtype=dtype)
    kernels = make_kernels({4: site}, Site.O, 900, 1000)
    x = torch.randn(segments[-1][1], 900)
    out = poisoned(len(x), 1000)
    kernels.dense(1, Site.O, segment_table(segments), x, out, accumulate=False)
    assert largest_error(out, lora_maths.dense({4: site}, segments, x, 1000)) < 2e-5


def with_bias(bound: Mapping[int, SiteWeights], slots: set[int]) -> dict[int, SiteWeights]:
    """The same parts; those of these slots have a bias."""
    rng = torch.Generator().manual_seed(8)
    return {
        slot: tuple(replace(p, bias=torch.randn(p.out_dim, generator=rng)) if slot in slots else p for p in parts)
        for slot, parts in bound.items()
    }


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_is_added_to_the_rows_of_its_own_slot(dtype: torch.dtype, level: None, *, accumulate: bool) -> None:
    bound = with_bias(make_bound(dtype), {1, 2, 5})
    kernels = make_kernels(bound, Site.QKV, IN_DIM, OUT_DIM)
    x, ground = torch.randn(NUM_ROWS, IN_DIM), torch.randn(NUM_ROWS, OUT_DIM) if accumulate else torch.zeros(1)
    wanted = lora_maths.dense(bound, SEGMENTS, x, OUT_DIM) + lora_maths.wide(ground)
    ours = ground.clone() if accumulate else poisoned(NUM_ROWS, OUT_DIM)
    plain = ours.clone()
    kernels.dense(1, Site.QKV, segment_table(SEGMENTS), x, ours, accumulate=accumulate)
    reference.dense(bound, segment_table(SEGMENTS), x, plain, accumulate=accumulate)
    assert largest_error(ours, wanted) < 2e-5
    assert largest_error(plain, wanted) < 2e-5
    kernels.clear(1)
    kernels.bind(1, 1, Site.QKV, make_bound(dtype)[1], IN_DIM, OUT_DIM)
    again = ground.clone() if accumulate else poisoned(NUM_ROWS, OUT_DIM)
    kernels.dense(1, Site.QKV, segment_table(SEGMENTS), x, again, accumulate=accumulate)
    assert (again[1:3] - ours[1:3]).abs().max() > FAULT, "the next tenancy of the slot has no bias"
    assert torch.equal(again[5:], ours[5:])


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_a_bias_of_a_part_without_ranks_is_added(rows: int, level: None) -> None:
    bias = torch.randn(70)
    part = Part(torch.empty(0, IN_DIM), torch.empty(0, 70), 1.0, 0, bias)
    kernels = make_kernels({2: (part,)}, Site.O, IN_DIM, 70)
    out = poisoned(rows, 70)
    kernels.dense(1, Site.O, segment_table(((0, rows, 2),)), torch.randn(rows, IN_DIM), out, accumulate=False)
    assert torch.equal(out, bias.expand(rows, 70))


def test_a_bias_of_experts_or_of_another_width_or_dtype_is_refused() -> None:
    rng = torch.Generator().manual_seed(3)
    kernels = SlotKernels(num_slots=1, num_layers=1)
    part = lora_maths.random_part(rng, rank=2, in_dim=8, out_dim=6)
    for bias in (torch.zeros(5), torch.zeros(6, dtype=torch.float64), torch.zeros(1, 6)):
        with pytest.raises(ValueError, match=r"a bias is fp32 \[6\] beside its bt"):
            kernels.bind(0, 0, Site.O, (replace(part, bias=bias),), 8, 6)
    experts = lora_maths.random_part(rng, rank=2, in_dim=8, out_dim=6, experts=3)
    with pytest.raises(ValueError, match="a part with experts has a bias"):
        kernels.bind(0, 0, MOE_DOWN, (replace(experts, bias=torch.zeros(6)),), 8, 6)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "reference"])
@pytest.mark.parametrize(("first", "width"), [(0, OUT_DIM), (0, 1), (7, 60), (90, 40), (OUT_DIM - 30, 30)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_slice_of_columns_is_that_slice_of_the_site(
    dtype: torch.dtype, first: int, width: int, *, is_native: bool
) -> None:
    bound = with_bias(make_bound(dtype), {2})
    kernels = make_kernels(bound, Site.LM_HEAD, IN_DIM, OUT_DIM)
    kernels._library = kernels._library if is_native else None
    x, out = torch.randn(NUM_ROWS, IN_DIM), poisoned(NUM_ROWS, width)
    kernels.dense_columns(1, Site.LM_HEAD, segment_table(SEGMENTS), x, out, first=first)
    wanted = lora_maths.dense(bound, SEGMENTS, x, OUT_DIM)
    assert largest_error(out, wanted[:, first : first + width]) < 2e-5


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "reference"])
def test_an_embedding_adds_the_expanded_column_of_each_token(*, is_native: bool) -> None:
    rng, vocab, hidden = torch.Generator().manual_seed(5), 50, 24
    bound = {
        slot: lora_maths.random_site(rng, (rank,), (hidden,), in_dim=vocab, dtype=dtype)
        for slot, (rank, dtype) in enumerate([(3, torch.float32), (8, torch.bfloat16), (2, torch.float16)])
    }
    kernels = SlotKernels(num_slots=4, num_layers=1)
    kernels._library = kernels._library if is_native else None
    for slot, parts in bound.items():
        kernels.bind(slot, 0, Site.EMBED, parts, vocab, hidden)
    ids = torch.randint(0, vocab, (9,), generator=rng, dtype=torch.int32)
    segments = ((0, 2, 0), (3, 4, 1), (7, 1, 3), (8, 1, 2))
    wanted = lora_maths.dense(bound, segments, torch.nn.functional.one_hot(ids.long(), vocab).float(), hidden)
    for accumulate in (False, True):
        out = torch.ones(9, hidden) if accumulate else poisoned(9, hidden)
        kernels.embed(0, segment_table(segments), ids, out, accumulate=accumulate)
        assert largest_error(out, wanted + accumulate) < 1e-5
    assert np.abs(wanted[:2] - wanted[3:5]).max() > FAULT


@pytest.mark.parametrize("edges", [(0, IN_DIM), (0, 1, IN_DIM), (0, 37, 90, IN_DIM)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_of_the_inputs_sum_to_the_site(dtype: torch.dtype, edges: tuple[int, ...], level: None) -> None:
    bound = with_bias(make_bound(dtype), {2})
    kernels = make_kernels(bound, Site.O, IN_DIM, OUT_DIM)
    x, parts = torch.randn(NUM_ROWS, IN_DIM), []
    for begin, end in itertools.pairwise(edges):
        parts.append(poisoned(NUM_ROWS, OUT_DIM))
        kernels.dense_columns(1, Site.O, segment_table(SEGMENTS), x[:, begin:end], parts[-1], first=0, first_in=begin)
    assert largest_error(torch.stack(parts).sum(0), lora_maths.dense(bound, SEGMENTS, x, OUT_DIM)) < 2e-5


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "reference"])
@pytest.mark.parametrize("first_in", [0, 3])
def test_parts_of_the_input_sum_to_the_whole_delta_with_its_bias_once(first_in: int, *, is_native: bool) -> None:
    rng = torch.Generator().manual_seed(9)
    (part,) = lora_maths.random_site(rng, (3,), (6,), in_dim=8)
    bias = torch.arange(6.0)
    biased = Part(part.a, part.bt, part.scale, 0, bias)
    kernels, segments = SlotKernels(num_slots=1, num_layers=1), segment_table([(1, 2, 0)])
    kernels._library = kernels._library if is_native else None
    kernels.bind(0, 0, Site.O, (biased,), 8, 6)
    x = torch.randn(4, 8, generator=rng)
    out, whole = torch.ones(4, 5), torch.ones(4, 6)
    edges = sorted({0, first_in, 8})
    for begin, end in itertools.pairwise(edges):
        kernels.dense_columns(0, Site.O, segments, x[:, begin:end], out, first=1, first_in=begin, accumulate=True)
    kernels.dense(0, Site.O, segments, x, whole, accumulate=True)
    wanted = 1 + biased.scale * (x.double() @ biased.a.double().T) @ biased.bt.double() + bias.double()
    assert largest_error(out[1:3], wanted[1:3, 1:].numpy()) < 1e-5
    assert torch.equal(out[[0, 3]], torch.ones(2, 5))
    assert largest_error(whole[1:3], wanted[1:3].numpy()) < 1e-5
    with pytest.raises(ValueError, match=r"found columns 3..10 -> columns 0..6; the site is 8 -> 6"):
        kernels.dense_columns(0, Site.O, segments, torch.zeros(4, 7), whole, first=0, first_in=3)
    with pytest.raises(ValueError, match="from -1 on"):
        kernels.dense_columns(0, Site.O, segments, torch.zeros(4, 7), whole, first=0, first_in=-1)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "reference"])
def test_a_slice_or_a_token_beyond_the_site_is_refused(*, is_native: bool) -> None:
    rng = torch.Generator().manual_seed(5)
    kernels, segments = SlotKernels(num_slots=1, num_layers=1), segment_table([(0, 2, 0)])
    kernels._library = kernels._library if is_native else None
    for site in (Site.EMBED, Site.LM_HEAD):
        kernels.bind(0, 0, site, lora_maths.random_site(rng, (2,), (6,), in_dim=8), 8, 6)
    for x, first, columns in ((8, 3, 4), (7, 0, 3), (8, 6, 0)):
        with pytest.raises(ValueError, match=f"found {x} -> columns {first}..{first + columns}; the site is 8 -> 6"):
            kernels.dense_columns(0, Site.LM_HEAD, segments, torch.zeros(2, x), torch.zeros(2, columns), first=first)
    with pytest.raises(ValueError, match="from -1 on"):
        kernels.dense_columns(0, Site.LM_HEAD, segments, torch.zeros(2, 8), torch.zeros(2, 6), first=-1)
    for ids, width in (([0, 8], 6), ([-1, 0], 6), ([0, 1], 5)):
        token_ids = torch.tensor(ids, dtype=torch.int32)
        with pytest.raises(ValueError, match="found token ids"):
            kernels.embed(0, segments, token_ids, torch.zeros(2, width), accumulate=True)


@pytest.mark.parametrize("half", ["a", "bt"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_adapters_half_fails_the_comparison(dtype: torch.dtype, half: str, level: None) -> None:
    bound, other = make_bound(dtype), make_bound(dtype, seed=7)
    mixed = tuple(
        Part(theirs.a if half == "a" else ours.a, theirs.bt if half == "bt" else ours.bt, ours.scale, ours.out_offset)
        for ours, theirs in zip(bound[3], other[3], strict=True)
    )
    kernels = make_kernels({**bound, 3: mixed}, Site.QKV, IN_DIM, OUT_DIM)
    x, out = torch.randn(NUM_ROWS, IN_DIM), poisoned(NUM_ROWS, OUT_DIM)
    kernels.dense(1, Site.QKV, segment_table(SEGMENTS), x, out, accumulate=False)
    wanted = lora_maths.dense(bound, SEGMENTS, x, OUT_DIM)
    wrong = np.abs(out.double().numpy() - wanted)
    assert wrong[8:17].max(axis=1).min() > FAULT
    assert max(wrong[:8].max(), wrong[17:].max()) < 2e-5


@pytest.mark.parametrize("accumulate", [False, True])
def test_rows_without_an_adapter_and_unbound_sites_add_nothing(*, accumulate: bool) -> None:
    kernels = make_kernels(make_bound(torch.float32), Site.QKV, IN_DIM, OUT_DIM)
    x = torch.randn(NUM_ROWS, IN_DIM)
    before = torch.randn(NUM_ROWS, OUT_DIM) if accumulate else poisoned(NUM_ROWS, OUT_DIM)
    nothing = before if accumulate else torch.zeros_like(before)
    out = before.clone()
    kernels.dense(1, Site.QKV, segment_table(SEGMENTS), x, out, accumulate=accumulate)
    untouched = [3, 4, *range(108, 115)]
    assert torch.equal(out[untouched], nothing[untouched])
    out = before.clone()
    kernels.dense(0, Site.QKV, segment_table(SEGMENTS), x, out, accumulate=accumulate)
    assert torch.equal(out, nothing)
    kernels.clear(4)
    out = before.clone()
    kernels.dense(1, Site.QKV, segment_table(SEGMENTS), x, out, accumulate=accumulate)
    assert torch.equal(out[17:107], nothing[17:107])
    out = before.clone()
    kernels.dense(1, Site.QKV, segment_table(()), x, out, accumulate=accumulate)
    assert torch.equal(out, nothing)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_activations_of_16_bit_come_back_as_16_bit(dtype: torch.dtype) -> None:
    bound = make_bound(dtype)
    kernels = make_kernels(bound, Site.QKV, IN_DIM, OUT_DIM)
    x = torch.randn(NUM_ROWS, IN_DIM).to(dtype)
    out = torch.zeros(NUM_ROWS, OUT_DIM, dtype=dtype)
    kernels.dense(1, Site.QKV, segment_table(SEGMENTS), x, out, accumulate=True)
    wanted = lora_maths.dense(bound, SEGMENTS, x, OUT_DIM)
    assert largest_error(out, wanted) < torch.finfo(dtype).eps * np.abs(wanted).max()


MOE_RANKS = ((2, 2), (16, 5), (0, 64), (100, 9))
MOE_SEGMENTS = ((0, 1, 0), (1, 2, 1), (3, 17, 2), (22, 60, 3), (82, 1, 5))
MOE_ROWS, EXPERTS, TOPK, HIDDEN, FFN = 85, 6, 3, 96, 50


def moe_case(
    outs: tuple[int, ...], in_dim: int, dtype: torch.dtype, seed: int
) -> tuple[dict[int, SiteWeights], Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    bound = {
        slot: lora_maths.random_site(rng, ranks[: len(outs)], outs, in_dim=in_dim, experts=EXPERTS, dtype=dtype)
        for slot, ranks in enumerate(MOE_RANKS)
        if any(ranks[: len(outs)])
    }
    ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:TOPK] for _ in range(MOE_ROWS)]).to(torch.int32)
    ids[1, 0], ids[4] = -1, EXPERTS  # experts of another shard
    ids[30, 1] = ids[30, 0]  # named twice
    return bound, ids, torch.rand(MOE_ROWS, TOPK, generator=rng)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moe_gate_up_equals_the_maths_and_the_reference(dtype: torch.dtype, threads: int, level: None) -> None:
    bound, ids, _ = moe_case((FFN, FFN), HIDDEN, dtype, 4)
    kernels = make_kernels(bound, MOE_GATE_UP, HIDDEN, 2 * FFN, threads=threads)
    x = torch.randn(MOE_ROWS, HIDDEN)
    wanted = lora_maths.moe_gate_up(bound, MOE_SEGMENTS, x, ids, 2 * FFN)
    base = torch.randn(MOE_ROWS, TOPK, 2 * FFN)
    for accumulate, ground in ((False, np.zeros_like(wanted)), (True, lora_maths.wide(base))):
        ours = base.clone() if accumulate else torch.full_like(base, float("nan"))
        plain = ours.clone()
        kernels.moe_gate_up(1, segment_table(MOE_SEGMENTS), x, ids, ours, accumulate=accumulate)
        reference.moe_gate_up(bound, segment_table(MOE_SEGMENTS), x, ids, plain, accumulate=accumulate)
        assert largest_error(ours, wanted + ground) < 2e-5
        assert largest_error(plain, wanted + ground) < 2e-5


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moe_down_equals_the_maths_and_the_reference(dtype: torch.dtype, threads: int, level: None) -> None:
    bound, ids, weights = moe_case((HIDDEN,), FFN, dtype, 5)
    kernels = make_kernels(bound, MOE_DOWN, FFN, HIDDEN, threads=threads)
    act = torch.randn(MOE_ROWS, TOPK, FFN)
    wanted = lora_maths.moe_down(bound, MOE_SEGMENTS, act, ids, weights, HIDDEN)
    base = torch.randn(MOE_ROWS, HIDDEN)
    for accumulate, ground in ((False, np.zeros_like(wanted)), (True, lora_maths.wide(base))):
        ours = base.clone() if accumulate else torch.full_like(base, float("nan"))
        plain = ours.clone()
        kernels.moe_down(1, segment_table(MOE_SEGMENTS), act, ids, weights, ours, accumulate=accumulate)
        reference.moe_down(bound, segment_table(MOE_SEGMENTS), act, ids, weights, plain, accumulate=accumulate)
        assert largest_error(ours, wanted + ground) < 3e-5
        assert largest_error(plain, wanted + ground) < 3e-5


@pytest.mark.parametrize("half", ["a", "bt"])
@pytest.mark.parametrize("site", [MOE_GATE_UP, MOE_DOWN])
def test_another_adapters_half_of_experts_fails_the_comparison(site: int, half: str, level: None) -> None:
    outs, in_dim = ((FFN, FFN), HIDDEN) if site == MOE_GATE_UP else ((HIDDEN,), FFN)
    bound, ids, weights = moe_case(outs, in_dim, torch.bfloat16, 6)
    other, *_ = moe_case(outs, in_dim, torch.bfloat16, 7)
    mixed = tuple(
        replace(ours, **{half: getattr(theirs, half)}) for ours, theirs in zip(bound[1], other[1], strict=True)
    )
    kernels, table = make_kernels({**bound, 1: mixed}, site, in_dim, sum(outs)), segment_table(MOE_SEGMENTS)
    if site == MOE_GATE_UP:
        x, out = torch.randn(MOE_ROWS, HIDDEN), poisoned(MOE_ROWS, TOPK, 2 * FFN)
        kernels.moe_gate_up(1, table, x, ids, out, accumulate=False)
        wanted = lora_maths.moe_gate_up(bound, MOE_SEGMENTS, x, ids, 2 * FFN)
    else:
        x, out = torch.randn(MOE_ROWS, TOPK, FFN), poisoned(MOE_ROWS, HIDDEN)
        kernels.moe_down(1, table, x, ids, weights, out, accumulate=False)
        wanted = lora_maths.moe_down(bound, MOE_SEGMENTS, x, ids, weights, HIDDEN)
    wrong = np.abs(out.double().numpy() - wanted).reshape(MOE_ROWS, -1).max(axis=1)
    assert wrong[1:3].min() > FAULT
    assert max(wrong[0], wrong[3:].max()) < 3e-5


@pytest.fixture
def sleepy() -> Iterator[None]:
    """Workers go to sleep as soon as they have nothing to do."""
    library = native.load()
    assert library is not None
    library.il_set_spin(0)
    yield
    library.il_set_spin(100_000)


def test_a_job_for_those_awake_ends_while_all_sleep(sleepy: None) -> None:
    """Such a job lies between kAloneNs and kWakeNs of lora_groups.h, and wakes nobody."""
    rng = torch.Generator().manual_seed(3)
    site = lora_maths.random_site(rng, (48,), (576,), in_dim=576, dtype=torch.bfloat16)
    kernels, table = make_kernels({4: site}, Site.O, 576, 576, threads=3), segment_table(((0, 8, 4),))
    x = torch.randn(8, 576)
    wanted = lora_maths.dense({4: site}, ((0, 8, 4),), x, 576)
    for _ in range(300):
        out = poisoned(8, 576)
        kernels.dense(1, Site.O, table, x, out, accumulate=False)
        assert largest_error(out, wanted) < 2e-5


@pytest.fixture
def worker() -> Iterator[Path]:
    """What /proc says of the second thread of a pool of two, asleep. It sleeps as soon as it has nothing to do."""
    library = native.load()
    assert library is not None
    library.il_set_threads(1)
    library.il_set_spin(0)
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    library.il_set_threads(2)
    (started,) = set(tasks.iterdir()) - before
    while is_awake(started) or times_asleep(started) == 0:
        os.sched_yield()
    yield started
    library.il_set_spin(100_000)
    library.il_set_threads(1)


def is_awake(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"


def times_asleep(task: Path) -> int:
    status = (task / "status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def stay_awake() -> None:
    """Whoever is awake from now on stays so for longer than a test takes."""
    library = native.load()
    assert library is not None
    library.il_set_spin(10**10)


def test_brief_calls_wake_a_sleeping_thread_where_they_follow_one_another(worker: Path) -> None:
    rng = torch.Generator().manual_seed(4)
    bound = {
        slot: lora_maths.random_site(rng, (16,), (576,), in_dim=576, dtype=torch.bfloat16) for slot in (1, 2, 3, 4)
    }
    kernels = make_kernels(bound, Site.O, 576, 576)
    table, x = segment_table([(2 * i, 2, slot) for i, slot in enumerate(bound)]), torch.randn(8, 576)

    def call(times: int) -> None:
        for _ in range(times):
            kernels.dense(1, Site.O, table, x, poisoned(8, 576), accumulate=False)

    before = times_asleep(worker)
    call(50)  # it would be asleep again before the next
    assert times_asleep(worker) == before
    stay_awake()
    call(2)
    assert is_awake(worker)


def test_few_rows_of_one_adapter_are_work_for_two_threads(worker: Path) -> None:
    """They are cut along its ranks, then along its columns: two jobs, of which the second follows the first."""
    site = lora_maths.random_site(torch.Generator().manual_seed(5), (32,), (576,), in_dim=576, dtype=torch.bfloat16)
    kernels = make_kernels({1: site}, Site.O, 576, 576)
    stay_awake()
    kernels.dense(1, Site.O, segment_table([(0, 8, 1)]), torch.randn(8, 576), poisoned(8, 576), accumulate=False)
    assert is_awake(worker)


def test_two_threads_may_call_at_once() -> None:
    bound = make_bound(torch.bfloat16)
    kernels = make_kernels(bound, Site.QKV, IN_DIM, OUT_DIM)
    table = segment_table(SEGMENTS)
    failures: list[float] = []

    def serve(seed: int) -> None:
        x = torch.randn(NUM_ROWS, IN_DIM, generator=torch.Generator().manual_seed(seed))
        wanted = lora_maths.dense(bound, SEGMENTS, x, OUT_DIM)
        for _ in range(200):
            out = poisoned(NUM_ROWS, OUT_DIM)
            kernels.dense(1, Site.QKV, table, x, out, accumulate=False)
            error = largest_error(out, wanted)
            if not error < 2e-5:
                failures.append(error)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_without_the_library_the_same_calls_give_the_same() -> None:
    bound = make_bound(torch.float32)
    kernels = make_kernels(bound, Site.QKV, IN_DIM, OUT_DIM)
    kernels._library = None
    x, out = torch.randn(NUM_ROWS, IN_DIM), poisoned(NUM_ROWS, OUT_DIM)
    kernels.dense(1, Site.QKV, segment_table(SEGMENTS), x, out, accumulate=False)
    assert largest_error(out, lora_maths.dense(bound, SEGMENTS, x, OUT_DIM)) < 2e-5


@pytest.mark.parametrize(
    "segments",
    [((0, 2, 0), (1, 1, 0)), ((2, 1, 0), (0, 1, 0)), ((0, 1, 10),), ((0, 1, -1),), ((-1, 1, 0),), ((4, 8, 0),)],
    ids=str,
)
def test_segments_that_overlap_or_lie_outside_are_refused(segments: lora_maths.Rows) -> None:
    kernels = make_kernels(make_bound(torch.float32), Site.QKV, IN_DIM, OUT_DIM)
    out = torch.zeros(10, OUT_DIM)
    with pytest.raises(ValueError, match="segment"):
        kernels.dense(1, Site.QKV, segment_table(segments), torch.ones(10, IN_DIM), out, accumulate=True)
    assert not out.any()


def test_tensors_of_another_width_are_refused() -> None:
    kernels = make_kernels(make_bound(torch.float32), Site.QKV, IN_DIM, OUT_DIM)
    table = segment_table(((0, 10, 0),))
    for in_dim, out_dim in ((IN_DIM + 1, OUT_DIM), (IN_DIM, OUT_DIM - 1)):
        with pytest.raises(ValueError, match="columns"):
            kernels.dense(1, Site.QKV, table, torch.ones(10, in_dim), torch.zeros(10, out_dim), accumulate=True)
    with pytest.raises(ValueError, match="rows"):
        kernels.dense(1, Site.QKV, table, torch.ones(9, IN_DIM), torch.zeros(10, OUT_DIM), accumulate=True)


def test_parts_that_do_not_fit_are_refused_at_bind() -> None:
    kernels = SlotKernels(num_slots=2, num_layers=1)
    part = lora_maths.random_part(torch.Generator(), rank=4, in_dim=8, out_dim=6)
    shifted = Part(part.a, part.bt, 1.0, 5)
    strided = Part(torch.zeros(4, 16)[:, :8], part.bt, 1.0, 0)
    without_inputs, without_outputs = (
        Part(torch.zeros(1, 0), part.bt[:1], 1.0, 0),
        Part(part.a[:1], torch.zeros(1, 0), 1.0, 0),
    )
    for parts, in_dim, out_dim, slot, site in (
        ((), 8, 6, 0, 0),
        ((part,), 9, 6, 0, 0),
        ((part,), 8, 5, 0, 0),
        ((part, shifted), 8, 11, 0, 0),
        ((strided,), 8, 6, 0, 0),
        ((without_inputs,), 0, 6, 0, 0),
        ((without_outputs,), 8, 0, 0, 0),
        ((Part(part.a, part.bt.half(), 1.0, 0),), 8, 6, 0, 0),
        ((part,), 8, 6, 2, 0),
        ((part,), 8, 6, 0, MOE_DOWN),
    ):
        with pytest.raises(ValueError, match=r"\d|part"):
            kernels.bind(slot, 0, site, parts, in_dim, out_dim)
    kernels.bind(0, 0, 0, (part,), 8, 6)


def test_clear_lets_the_tensors_go() -> None:
    kernels = SlotKernels(num_slots=2, num_layers=1)
    part = lora_maths.random_part(torch.Generator(), rank=4, in_dim=8, out_dim=6)
    kernels.bind(1, 0, 0, (part,), 8, 6)
    assert kernels._bound[0] == {1: (part,)}
    kernels.clear(1)
    assert not kernels._bound[0]
    assert not kernels._descriptors
    assert not any(kernels._table)


def test_site_numbers_are_those_of_the_protocol() -> None:
    from infinilora.kernels import batch

    assert (MOE_GATE_UP, MOE_DOWN, EMBED) == (Site.MOE_GATE_UP, Site.MOE_DOWN, Site.EMBED)
    assert batch.NUM_SITES >= NUM_SITES
