"""What protects the memory that native code computes with: a version that moves, and a wait for who still reads."""

import threading
from typing import Any

import pytest
import torch

from infinilora.kernels.batch import EMBED, MOE_DOWN, MOE_GATE_UP, Part, segment_table
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
        self,
        *,
        step_id: int = 9,
        layer: int = 0,
        site: int = SITE,
        row_start: int = 0,
        rows: int = ROWS,
        in_cols: int = COLS,
        out_cols: int = COLS,
        inputs: tuple[int, int] = (0, 0),
        runs: tuple[int, ...] = (),
        ids: torch.Tensor | None = None,
    ) -> tuple[int, list[float]]:
        """Status, and the first column."""
        x, self.out = torch.ones(ROWS, COLS), torch.full((ROWS, out_cols), -1.0)
        call = step_id, layer, site, row_start, rows, in_cols, out_cols, *inputs, 0 if ids is None else 1, 0
        asked = torch.tensor(runs, dtype=torch.int32)
        chosen = None if ids is None else ids.data_ptr()
        tensors = asked.data_ptr(), len(runs) // 2, x.data_ptr(), chosen, None, self.out.data_ptr()
        return self.compute(self.native.address, *call, *tensors), self.out[:, 0].tolist()


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
def test_what_does_not_fit_the_plan_is_left_to_python(step: Step, call: dict[str, Any]) -> None:
    step.load((0, 3, 2), ready_layers=9)
    assert step.call(**call)[0] == DECLINED


@pytest.mark.parametrize(("row_start", "rows"), [(0, 1 << 31), (0, (1 << 32) - 1), (1, (1 << 31) - 1)])
def test_rows_beyond_all_numbers_of_rows_are_left_to_python(step: Step, row_start: int, rows: int) -> None:
    """A call that carries nothing for a row may say any number of them."""
    step.load((0, 3, 2))
    assert step.call(row_start=row_start, rows=rows, in_cols=0)[0] == DECLINED


def test_a_layer_that_is_not_there_yet_is_left_to_python(step: Step) -> None:
    step.load((0, 3, 2), ready_layers=0)
    assert step.call()[0] == DECLINED


def test_a_bias_is_added_to_the_rows_that_have_one(step: Step) -> None:
    step.bind(3, bias=torch.full((COLS,), 0.5))
    step.load((0, 1, 3), (1, 2, 2))
    assert step.call(site=3) == (COMPUTED, [0.0, 8.5, 8.5])


def test_runs_of_columns_lie_side_by_side_in_the_answer(step: Step) -> None:
    a, bt = torch.ones(1, COLS), torch.arange(20.0)[None]
    step.kernels.bind(2, 0, 3, tuple(Part(a=a, bt=bt, scale=0.5, out_offset=at) for at in (0, 30)), COLS, 60)
    step.load((1, 2, 2))
    status, _ = step.call(site=3, out_cols=15, runs=(2, 7, 18, 24, 29, 33))
    columns = [2, 3, 4, 5, 6, 18, 19, None, None, None, None, None, 0, 1, 2]
    wanted = [0.0 if column is None else 4.0 * column for column in columns]
    assert status == COMPUTED
    assert step.out.tolist() == [[0.0] * 15, wanted, wanted]


@pytest.mark.parametrize(
    ("runs", "out_cols", "site"),
    [
        ((0, 4, 4, 9), 9, SITE),
        ((0, 3), 4, SITE),
        ((0, 5), 4, SITE),
        ((5, 5), 1, SITE),
        ((6, 4), 2, SITE),
        ((-2, 2), 4, SITE),
        ((0, 4), 4, EMBED),
        ((0, 4), 4, MOE_DOWN),
    ],
    ids=str,
)
def test_runs_that_a_site_or_an_answer_has_no_room_for_are_left_to_python(
    step: Step, runs: tuple[int, ...], out_cols: int, site: int
) -> None:
    step.load((0, 3, 2))
    assert step.call(site=site, runs=runs, out_cols=out_cols)[0] == DECLINED


@pytest.mark.parametrize("runs", [(), (3, 5, 6, 9)], ids=["all columns", "runs"])
@pytest.mark.parametrize(("first", "bias"), [(0, 0.5), (3, 0.0), (12, 0.0)])
def test_inputs_that_a_shard_has_give_their_part_and_the_first_of_them_the_bias(
    step: Step, first: int, bias: float, runs: tuple[int, ...]
) -> None:
    a, bt = torch.arange(20.0)[None], torch.arange(10.0)[None]
    parts = (Part(a=a, bt=bt, scale=0.5, out_offset=0, bias=torch.full((10,), 0.5)),)
    step.kernels.bind(2, 0, 3, parts, 20, 10)
    step.load((1, 2, 2))
    columns = [3, 4, 6, 7, 8] if runs else list(range(10))
    status, _ = step.call(site=3, out_cols=len(columns), inputs=(first, first + COLS), runs=runs)
    wanted = [0.5 * sum(range(first, first + COLS)) * column + bias for column in columns]
    assert status == COMPUTED
    assert step.out.tolist() == [[0.0] * len(columns), wanted, wanted]


@pytest.mark.parametrize(
    ("site", "inputs"),
    [
        (SITE, (1, 1 + COLS)),
        (SITE, (0, COLS - 1)),
        (SITE, (9, 1)),
        (SITE, (1 << 31, (1 << 31) + COLS)),
        (EMBED, (0, COLS)),
        (MOE_DOWN, (0, COLS)),
    ],
    ids=str,
)
def test_inputs_that_a_site_has_not_are_left_to_python(step: Step, site: int, inputs: tuple[int, int]) -> None:
    step.load((0, 3, 2))
    assert step.call(site=site, inputs=inputs)[0] == DECLINED


def test_token_ids_are_expanded_as_the_rows_of_the_plan(step: Step) -> None:
    step.bind(EMBED)
    step.load((1, 2, 2))
    ids = torch.tensor([7, 0, 5], dtype=torch.int32)
    assert step.call(site=EMBED, ids=ids) == (COMPUTED, [0.0, 1.0, 1.0])


@pytest.mark.parametrize("tokens", [[0, COLS, 0], [0, 0, -1]], ids=str)
def test_a_token_that_is_none_is_left_to_python_to_refuse(step: Step, tokens: list[int]) -> None:
    step.bind(EMBED)
    step.load((1, 2, 2))
    assert step.call(site=EMBED, ids=torch.tensor(tokens, dtype=torch.int32)) == (DECLINED, [-1.0] * ROWS)


def test_nothing_is_computed_before_the_first_plan_or_after_unload(step: Step) -> None:
    assert step.call(step_id=0)[0] == DECLINED
    step.load((0, 3, 2))
    step.native.unload()
    assert step.call()[0] == DECLINED


def test_grants_of_which_one_was_taken_back_are_looked_at_by_python_first(step: Step) -> None:
    step.load((0, 3, 2))
    assert step.call()[0] == COMPUTED
    step.native.shut(2)
    assert step.call()[0] == DECLINED
    step.load((0, 3, 2), version=2)
    assert step.call()[0] == COMPUTED


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


EXPERTS, PICKS = 5, 2


def named_call(step: Step, site: int, rows: list[int]) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Status, what came, and what the same kernels give for these rows one by one, in fp64 by the definition."""
    dice = torch.Generator().manual_seed(site)
    a, bt = torch.randn(EXPERTS, 3, COLS, generator=dice), torch.randn(EXPERTS, 3, COLS, generator=dice)
    part = Part(a=a, bt=bt, scale=0.5, out_offset=0)
    step.kernels.bind(2, 0, site, (part,), COLS, COLS)
    ids = torch.randint(-1, EXPERTS, (len(rows), PICKS), generator=dice, dtype=torch.int32)
    weights = torch.rand(len(rows), PICKS, generator=dice)
    is_down = site == MOE_DOWN
    x = torch.randn(len(rows), PICKS * COLS if is_down else COLS, generator=dice)
    heads = torch.tensor(rows, dtype=torch.int32)[:, None]
    table, routed = torch.cat([heads, ids], 1), torch.cat([torch.full_like(heads, 9).float(), weights], 1)
    out = torch.full((len(rows), COLS if is_down else PICKS * COLS), torch.nan)
    call = 9, 0, site, 77, len(rows), x.shape[1], out.shape[1], 0, 0, PICKS + 1, 8
    status = step.compute(
        step.native.address,
        *call,
        None,
        0,
        x.data_ptr(),
        table.data_ptr(),
        routed.data_ptr() if is_down else None,
        out.data_ptr(),
    )
    wanted = torch.zeros(len(rows), PICKS, COLS, dtype=torch.float64)
    for r, row in enumerate(rows):
        for pick in range(PICKS):
            expert = int(ids[r, pick])
            if ADAPTED.start <= row < ADAPTED.stop and expert >= 0:
                taken = x[r].view(PICKS, COLS)[pick] if is_down else x[r]
                delta = 0.5 * (taken.double() @ a[expert].double().T) @ bt[expert].double()
                wanted[r, pick] = float(weights[r, pick]) * delta if is_down else delta
    return status, out, wanted.sum(1) if is_down else wanted.flatten(1)


ADAPTED = range(2, 700)
NAMED = {
    "few": [0, 2, 3, 5, 9],
    "one": [4],
    "twice": [2, 2, 3],
    "none of them": [0, 1],
    "many": list(range(0, 3000, 2)),
}


@pytest.mark.parametrize("site", [MOE_GATE_UP, MOE_DOWN])
@pytest.mark.parametrize("rows", NAMED.values(), ids=NAMED)
def test_rows_that_a_call_names_get_the_delta_of_their_own_segment(step: Step, site: int, rows: list[int]) -> None:
    step.load((0, 2, 3), (2, 698, 2), (700, 5000, 3))
    status, found, wanted = named_call(step, site, rows)
    assert status == COMPUTED
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)


def test_named_rows_out_of_order_are_left_to_python(step: Step) -> None:
    step.load((0, 9, 2))
    assert named_call(step, MOE_DOWN, [3, 2])[0] == DECLINED


def test_a_site_that_is_left_to_python_is_declined(step: Step) -> None:
    step.kernels.leave_to_python(0, SITE)
    step.load((0, 3, 2))
    assert step.call()[0] == DECLINED
