"""Many sites on one device: bound, widened, cleared, and run step after step."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from infinilora.kernels.batch import EMBED, MOE_DOWN, MOE_GATE_UP, SiteWeights, segment_table
from infinilora.kernels.slot_kernels import SlotKernels
from support import lora_maths
from support.triton_sites import TOLERANCE, largest_error, make_bound, make_table, poisoned, to_device

if TYPE_CHECKING:
    from infinilora.kernels.device_sites import DeviceSites

F32 = torch.float32
IN_DIM, OUT_DIM = 24, 40
SEGMENTS = ((0, 2, 0), (2, 3, 1))
NUM_ROWS = 6


@pytest.fixture
def bound() -> dict[int, SiteWeights]:
    return make_bound(((2, 3), (5, 1)), (24, 16), in_dim=IN_DIM, dtypes=[F32])


def rows_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_sites(bound: dict[int, SiteWeights], device: str, site: int = 0, out_dim: int = OUT_DIM) -> "DeviceSites":
    from infinilora.kernels.device_sites import DeviceSites

    sites = DeviceSites(num_slots=4, num_layers=2, device=torch.device(device))
    for slot, parts in to_device(bound, device).items():
        sites.bind(slot, 1, site, parts, parts[0].a.shape[-1], out_dim)
    return sites


def test_each_site_has_weights_of_its_own(device: str, bound: dict[int, SiteWeights]) -> None:
    sites, x = make_sites(bound, device), rows_of(0, NUM_ROWS, IN_DIM)
    other = make_bound(((4, 2), (1, 1)), (24, 16), in_dim=IN_DIM, dtypes=[F32], seed=2)
    for slot, parts in to_device(other, device).items():
        sites.bind(slot, 0, 0, parts, IN_DIM, OUT_DIM)
    for layer, weights in ((1, bound), (0, other)):
        out = poisoned(NUM_ROWS, OUT_DIM, device=device)
        sites.dense(layer, 0, segment_table(SEGMENTS), x.to(device), out, accumulate=False)
        assert largest_error(out, lora_maths.dense(weights, SEGMENTS, x, OUT_DIM)) < TOLERANCE[F32]


def test_an_unbound_site_is_zeros_or_leaves_all_as_it_was(device: str, bound: dict[int, SiteWeights]) -> None:
    sites, x = make_sites(bound, device), rows_of(0, NUM_ROWS, IN_DIM).to(device)
    out = poisoned(NUM_ROWS, OUT_DIM, device=device)
    sites.dense(0, 3, segment_table(SEGMENTS), x, out, accumulate=False)
    assert not out.any()
    before = rows_of(1, NUM_ROWS, OUT_DIM).to(device)
    out = before.clone()
    sites.dense(0, 3, segment_table(SEGMENTS), x, out, accumulate=True)
    assert torch.equal(out, before)


def test_an_adapter_with_more_parts_widens_the_table(device: str, bound: dict[int, SiteWeights]) -> None:
    narrow = {0: bound[0][1:], 1: bound[1]}
    sites, x = make_sites(narrow, device), rows_of(0, NUM_ROWS, IN_DIM)
    out = poisoned(NUM_ROWS, OUT_DIM, device=device)
    sites.dense(1, 0, segment_table(SEGMENTS), x.to(device), out, accumulate=False)
    assert largest_error(out, lora_maths.dense(narrow, SEGMENTS, x, OUT_DIM)) < TOLERANCE[F32]


def test_a_segment_table_written_over_in_place_is_a_new_step(device: str, bound: dict[int, SiteWeights]) -> None:
    sites, x = make_sites(bound, device), rows_of(0, NUM_ROWS, IN_DIM)
    segments = segment_table(SEGMENTS)
    sites.dense(1, 0, segments, x.to(device), poisoned(NUM_ROWS, OUT_DIM, device=device), accumulate=False)
    segments[:, 2] = 1 - segments[:, 2]
    out = poisoned(NUM_ROWS, OUT_DIM, device=device)
    sites.dense(1, 0, segments, x.to(device), out, accumulate=False)
    swapped = tuple((start, num, 1 - slot) for start, num, slot in SEGMENTS)
    assert largest_error(out, lora_maths.dense(bound, swapped, x, OUT_DIM)) < TOLERANCE[F32]


def test_a_cleared_slot_is_gone_from_every_site(device: str, bound: dict[int, SiteWeights]) -> None:
    sites, x = make_sites(bound, device), rows_of(0, NUM_ROWS, IN_DIM)
    sites.clear(0)
    out = poisoned(NUM_ROWS, OUT_DIM, device=device)
    sites.dense(1, 0, segment_table(SEGMENTS), x.to(device), out, accumulate=False)
    assert not out[:2].any()
    assert largest_error(out, lora_maths.dense({1: bound[1]}, SEGMENTS, x, OUT_DIM)) < TOLERANCE[F32]


def test_expert_sites_are_reached_by_their_own_calls(device: str) -> None:
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2], [0, 1]], dtype=torch.int32)
    weights = rows_of(5, NUM_ROWS, 2).abs()
    gate_up = make_bound(((2, 3), (5, 1)), (16, 16), in_dim=IN_DIM, dtypes=[F32], experts=3)
    down = make_bound(((2,), (3,)), (IN_DIM,), in_dim=16, dtypes=[F32], experts=3)
    x, act = rows_of(0, NUM_ROWS, IN_DIM), rows_of(1, NUM_ROWS, 2, 16)
    out, summed = poisoned(NUM_ROWS, 2, 32, device=device), poisoned(NUM_ROWS, IN_DIM, device=device)
    table, on = segment_table(SEGMENTS), ids.to(device)
    make_sites(gate_up, device, MOE_GATE_UP, 32).moe_gate_up(1, table, x.to(device), on, out, accumulate=False)
    make_sites(down, device, MOE_DOWN, IN_DIM).moe_down(
        1, table, act.to(device), on, weights.to(device), summed, accumulate=False
    )
    assert largest_error(out, lora_maths.moe_gate_up(gate_up, SEGMENTS, x, ids, 32)) < TOLERANCE[F32]
    wanted = lora_maths.moe_down(down, SEGMENTS, act, ids, weights, IN_DIM)
    assert largest_error(summed, wanted) < TOLERANCE[F32]


def test_what_does_not_fit_a_site_is_refused_and_never_read(device: str, bound: dict[int, SiteWeights]) -> None:
    sites, segments = make_sites(bound, device), segment_table(SEGMENTS)
    x, out = rows_of(0, NUM_ROWS, IN_DIM).to(device), poisoned(NUM_ROWS, OUT_DIM, device=device)
    with pytest.raises(ValueError, match="found 23 -> 40 columns; wanted 24 -> 40"):
        sites.dense(1, 0, segments, x[:, 1:], out, accumulate=True)
    with pytest.raises(ValueError, match="found 24 -> 39 columns"):
        sites.dense(1, 0, segments, x, out[:, 1:], accumulate=True)
    with pytest.raises(ValueError, match="found 6 and 5 rows; the step has 6"):
        sites.dense(1, 0, segments, x, out[1:], accumulate=True)
    with pytest.raises(ValueError, match="slot 4 is not one of 4"):
        sites.dense(1, 0, segment_table([(0, 1, 4)]), x, out, accumulate=True)
    with pytest.raises(ValueError, match="24 -> 41 columns; the site has 24 -> 40"):
        sites.bind(0, 1, 0, bound[0], IN_DIM, OUT_DIM + 1)
    assert bool(out.isnan().all())


@pytest.mark.interp
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_bias_is_added_to_what_a_launch_has_written(bound: dict[int, SiteWeights], *, accumulate: bool) -> None:
    from infinilora.kernels.device_sites import DeviceSites

    kernels = SlotKernels(num_slots=4, num_layers=2)
    kernels._device_sites = DeviceSites(num_slots=4, num_layers=2, device=torch.device("cpu"))
    bound = bound | {1: tuple(replace(p, bias=rows_of(9, p.out_dim)) for p in bound[1])}
    for slot, parts in bound.items():
        kernels.bind(slot, 1, 0, parts, IN_DIM, OUT_DIM)
    x, ground = rows_of(0, NUM_ROWS, IN_DIM), rows_of(1, NUM_ROWS, OUT_DIM)
    out = ground.clone() if accumulate else poisoned(NUM_ROWS, OUT_DIM, device="cpu")
    kernels.dense(1, 0, segment_table(SEGMENTS), x, out, accumulate=accumulate)
    wanted = lora_maths.dense(bound, SEGMENTS, x, OUT_DIM) + accumulate * ground.double().numpy()
    assert largest_error(out, wanted) < TOLERANCE[F32]


@pytest.mark.gpu
def test_the_pools_kernels_on_a_gpu_are_these(bound: dict[int, SiteWeights]) -> None:
    kernels, x = SlotKernels(num_slots=4, num_layers=2, device="cuda"), rows_of(0, NUM_ROWS, IN_DIM)
    bound = bound | {1: tuple(replace(p, bias=rows_of(9, p.out_dim)) for p in bound[1])}
    for slot, parts in to_device(bound, "cuda").items():
        kernels.bind(slot, 1, 0, parts, IN_DIM, OUT_DIM)
    out, columns = poisoned(NUM_ROWS, OUT_DIM, device="cuda"), poisoned(NUM_ROWS, 9, device="cuda")
    kernels.dense(1, 0, segment_table(SEGMENTS), x.cuda(), out, accumulate=False)
    kernels.dense_columns(1, 0, segment_table(SEGMENTS), x.cuda(), columns, first=20)
    wanted = lora_maths.dense(bound, SEGMENTS, x, OUT_DIM)
    assert largest_error(out, wanted) < TOLERANCE[F32]
    assert largest_error(columns, wanted[:, 20:29]) < TOLERANCE[F32]


@pytest.mark.gpu
def test_token_ids_are_expanded_on_a_gpu(bound: dict[int, SiteWeights]) -> None:
    kernels = SlotKernels(num_slots=4, num_layers=1, device="cuda")
    for slot, parts in to_device(bound, "cuda").items():
        kernels.bind(slot, 0, EMBED, parts[:1], IN_DIM, 24)
    ids = torch.tensor([3, 0, 23, 7, 7, 1], dtype=torch.int32)
    out = poisoned(NUM_ROWS, 24, device="cuda")
    kernels.embed(0, segment_table(SEGMENTS), ids.cuda(), out, accumulate=False)
    x = torch.nn.functional.one_hot(ids.long(), IN_DIM).float()
    first = {slot: parts[:1] for slot, parts in bound.items()}
    assert largest_error(out, lora_maths.dense(first, SEGMENTS, x, 24)) < TOLERANCE[F32]


STEPS = (((0, 2, 0), (2, 3, 1)), ((1, 4, 1),), (), ((0, 1, 1), (1, 4, 0)))
"""Of one captured graph, one after another."""


def bounded_run(bound: dict[int, SiteWeights], device: str, path: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(x, delta) of each step of STEPS through one StepRows; on a GPU through one graph."""
    from infinilora.kernels.moe import dense
    from infinilora.kernels.tiles import StepRows

    table = make_table(bound, num_parts=2, in_dim=IN_DIM, out_dim=OUT_DIM, device=device)
    rows, x = StepRows.bounded(NUM_ROWS, 4, device), torch.zeros(NUM_ROWS, IN_DIM, device=device)
    out = poisoned(NUM_ROWS, OUT_DIM, device=device)

    def launch() -> None:
        dense(table, rows, x, out, accumulate=False, path=path)  # type: ignore[arg-type]

    launch()
    replay = launch
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        replay = graph.replay
    for seed, segments in enumerate(STEPS):
        x.copy_(rows_of(seed, NUM_ROWS, IN_DIM))
        rows.refill(segment_table(segments))
        out.fill_(float("nan"))
        replay()
        yield x.cpu(), out.cpu()


def test_one_set_of_launches_serves_step_after_step(device: str, path: str, bound: dict[int, SiteWeights]) -> None:
    for segments, (x, found) in zip(STEPS, bounded_run(bound, device, path), strict=True):
        wanted = lora_maths.dense(bound, segments, x, OUT_DIM)
        if segments:
            assert largest_error(found, wanted) < TOLERANCE[F32]
        else:
            assert not found.any()


@pytest.mark.parametrize("segments", [((0, 1, 4),), ((0, 1, 1), (1, 1, 1)), ((5, 2, 0),)])
def test_a_step_that_does_not_fit_its_room_is_refused(segments: tuple[tuple[int, int, int], ...], device: str) -> None:
    from infinilora.kernels.tiles import StepRows

    with pytest.raises(ValueError, match="wanted"):
        StepRows.bounded(NUM_ROWS, 4, device).refill(segment_table(segments))
