"""Launches can be captured: what is launched depends on shapes alone, and the host waits for nothing.

Without a device that is shown by recording what torch is asked for; with one, a graph is captured and replayed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from infinilora.kernels.batch import segment_table
from infinilora.kernels.tile_table import Cut, Sums
from support import lora_maths
from support.recorder import WAITS, Recorder
from support.triton_sites import TOLERANCE, EveryLaunch, largest_error, make_bound, make_table, poisoned

if TYPE_CHECKING:
    from infinilora.kernels.moe import Path

F32 = torch.float32
HIDDEN, FF, EXPERTS, TOP_K, NUM_ROWS, NUM_SLOTS = 40, 24, 5, 2, 9, 4
GATE_UP = make_bound([(4, 7), (20, 2), (1, 3)], (FF, FF), in_dim=HIDDEN, dtypes=[F32], experts=EXPERTS)
DOWN = make_bound([(4,), (20,), (1,)], (HIDDEN,), in_dim=FF, dtypes=[F32], experts=EXPERTS)

STEPS = (((0, 3, 2), (3, 5, 0)), ((1, 8, 1),), (), ((0, 1, 1), (1, 1, 0), (4, 5, 2)))


class ExpertSites:
    """gate_up and down of one layer over the same buffers, step after step."""

    def __init__(self, device: str, path: "Path", sums: Sums) -> None:
        from infinilora.kernels.tiles import StepRows

        self.rows = StepRows.bounded(NUM_ROWS, NUM_SLOTS, device)
        self.x = torch.zeros(NUM_ROWS, HIDDEN, device=device)
        self.act = torch.zeros(NUM_ROWS, TOP_K, FF, device=device)
        self.ids = torch.zeros(NUM_ROWS, TOP_K, dtype=torch.int32, device=device)
        self.weights = torch.zeros(NUM_ROWS, TOP_K, device=device)
        self.wide = poisoned(NUM_ROWS, TOP_K, 2 * FF, device=device)
        self.summed = poisoned(NUM_ROWS, HIDDEN, device=device)
        self._gate_up = make_table(GATE_UP, num_parts=2, in_dim=HIDDEN, out_dim=2 * FF, device=device)
        self._down = make_table(DOWN, num_parts=1, in_dim=FF, out_dim=HIDDEN, device=device)
        if sums == "inside":
            self._down.tiles = EveryLaunch(Cut(32, 0, 4, 2), Cut(16, 0, 4, 2, sums=sums), num_sms=3)
        self._path: Path = path

    def begin(self, seed: int, segments: tuple[tuple[int, int, int], ...]) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.rows.refill(segment_table(segments))
        for rows in (self.x, self.act):
            rows.copy_(torch.randn(rows.shape, generator=rng))
        self.ids.copy_(torch.randint(-1, EXPERTS + 1, self.ids.shape, generator=rng))
        self.weights.copy_(torch.rand(self.weights.shape, generator=rng))
        self.wide.fill_(float("nan"))
        self.summed.fill_(float("nan"))

    def launch(self) -> None:
        from infinilora.kernels.moe import moe_down, moe_gate_up

        moe_gate_up(self._gate_up, self.rows, self.x, self.ids, self.wide, accumulate=False, path=self._path)
        moe_down(
            self._down, self.rows, self.act, self.ids, self.weights, self.summed, accumulate=False, path=self._path
        )


@contextmanager
def replayable(launch: Callable[[], None], device: str) -> Iterator[Callable[[], None]]:
    """What a step runs again: the launches themselves, or on a GPU the graph that was captured of them."""
    launch()
    if device == "cpu":
        yield launch
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    yield graph.replay


WAYS = pytest.mark.parametrize(("path", "sums"), [("grouped", "apart"), ("grouped", "inside"), ("indexed", "apart")])


@pytest.mark.interp
@WAYS
def test_what_experts_are_asked_of_torch_does_not_depend_on_the_routing(path: "Path", sums: Sums) -> None:
    """Every tensor, with its shape, in the same order: a captured graph holds the memory of any step."""
    sites, asked = ExpertSites("cpu", path, sums), []
    for seed, segments in enumerate(STEPS):
        sites.begin(seed, segments)
        with Recorder() as recorder:
            sites.launch()
        asked.append(recorder.asked)
    assert len(asked[0]) > 3
    assert all(other == asked[0] for other in asked[1:])
    assert not {name for name, _ in asked[0]} & WAITS


@pytest.mark.interp
def test_a_host_that_waits_is_seen() -> None:
    with Recorder() as recorder:
        torch.arange(3).nonzero()
        torch.arange(3).sum().item()
    assert {"nonzero", "_local_scalar_dense"} == {name for name, _ in recorder.asked} & WAITS


@WAYS
def test_one_set_of_expert_launches_serves_step_after_step(device: str, path: "Path", sums: Sums) -> None:
    sites = ExpertSites(device, path, sums)
    sites.begin(9, STEPS[0])
    with replayable(sites.launch, device) as replay:
        for seed, segments in enumerate(STEPS):
            sites.begin(seed, segments)
            replay()
            x, act, ids, weights = (t.cpu() for t in (sites.x, sites.act, sites.ids, sites.weights))
            wide = lora_maths.moe_gate_up(GATE_UP, segments, x, ids, 2 * FF)
            summed = lora_maths.moe_down(DOWN, segments, act, ids, weights, HIDDEN)
            for found, wanted in ((sites.wide, wide), (sites.summed, summed)):
                assert largest_error(found, wanted) < TOLERANCE[F32] if segments else not found.any()
