"""What protects the memory that native code computes with: a version that moves, and a wait for who still reads."""

import threading

import pytest
import torch

from infinilora.kernels.batch import Part, segment_table
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.kernels.step import NativeStep

ROWS, COLS, SITE = 3, 8, 1
COMPUTED, DECLINED = 0, 1


class Step:
    """A native step over one layer, its slot 2 bound at `SITE` to add the sum of a row; called as the ring calls it."""

    def __init__(self) -> None:
        self.kernels = SlotKernels(num_slots=4, num_layers=1)
        self.bind(SITE)
        native = self.kernels.native_step()
        assert native is not None
        self.native: NativeStep = native
        self.native.shut(1)
        self.compute = self.kernels._library.il_step_compute  # type: ignore[union-attr]

    def bind(self, site: int, *, bias: torch.Tensor | None = None) -> None:
        part = Part(a=torch.ones(1, COLS), bt=torch.ones(1, COLS), scale=1.0, out_offset=0, bias=bias)
        self.kernels.bind(2, 0, site, (part,), COLS, COLS)

    def load(self, *segments: tuple[int, int, int], version: int = 1, ready_layers: int = 1) -> None:
        self.native.load(9, segment_table(segments), ready_layers=ready_layers, version=version)

    def call(
        self, *, step_id: int = 9, layer: int = 0, site: int = SITE, row_start: int = 0, in_cols: int = COLS
    ) -> tuple[int, list[float]]:
        """Status, and the first column."""
        x, out = torch.ones(ROWS, COLS), torch.full((ROWS, COLS), -1.0)
        call = step_id, layer, site, row_start, ROWS, in_cols, COLS, 0
        status = self.compute(self.native.address, *call, x.data_ptr(), None, None, out.data_ptr())
        return status, out[:, 0].tolist()


@pytest.fixture
def step() -> Step:
    return Step()


def test_rows_of_the_plan_get_their_delta_and_the_others_zeros(step: Step) -> None:
    step.load((1, 1, 2))
    assert step.call() == (COMPUTED, [0.0, 8.0, 0.0])


def test_a_call_of_later_rows_sees_its_own_window_of_the_plan(step: Step) -> None:
    step.load((0, 6, 2), (6, 1, 3), (7, 2, 2))
    assert step.call(row_start=5) == (COMPUTED, [8.0, 0.0, 8.0])


@pytest.mark.parametrize(
    "call", [{"step_id": 8}, {"layer": 1}, {"site": 10}, {"site": 16}, {"in_cols": COLS - 1}, {"site": 4}], ids=str
)
def test_what_does_not_fit_the_plan_is_left_to_python(step: Step, call: dict[str, int]) -> None:
    step.load((0, 3, 2), ready_layers=9)
    assert step.call(**call)[0] == DECLINED


def test_a_layer_that_is_not_there_yet_is_left_to_python(step: Step) -> None:
    step.load((0, 3, 2), ready_layers=0)
    assert step.call()[0] == DECLINED


def test_a_site_with_a_bias_is_left_to_python(step: Step) -> None:
    step.bind(3, bias=torch.ones(COLS))
    step.load((0, 3, 2))
    assert step.call(site=3)[0] == DECLINED
    assert step.call()[0] == COMPUTED


def test_nothing_is_computed_before_the_first_plan_or_after_unload(step: Step) -> None:
    assert step.call(step_id=0)[0] == DECLINED
    step.load((0, 3, 2))
    step.native.unload()
    assert step.call()[0] == DECLINED


def test_grants_that_moved_are_looked_at_by_python_first(step: Step) -> None:
    step.load((0, 3, 2))
    step.native.moved(2)
    assert step.call()[0] == DECLINED
    step.load((0, 3, 2), version=2)
    assert step.call()[0] == COMPUTED
    step.native.shut(3)
    assert step.call()[0] == DECLINED


def test_shut_waits_for_a_kernel_that_runs(step: Step) -> None:
    record = step.native._record
    record.busy = 1
    shut = threading.Thread(target=step.native.shut, args=(5,))
    shut.start()
    while record.version != 5:
        pass
    assert shut.is_alive()
    record.busy = 0
    shut.join(10)
    assert not shut.is_alive()
