"""The serving thread over a real link in this process, with kernels by definition."""

import itertools
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from infinilora.kernels.batch import Part
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.link.errors import LinkClosed, LinkRefused
from infinilora.link.frame import DTYPES, Header, Kind, PlanSegment
from infinilora.protocol.adapter import Site
from infinilora.runtime.metrics import render
from support.pools import DefinedKernels
from support.procs import wait_until
from support.served_link import COLS, ROWS, WAIT_S, Link, living

TRACE = bytes(range(1, 25))


@pytest.fixture(params=["by definition", "native"])
def link(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Link]:
    native = SlotKernels(num_slots=4, num_layers=2)
    with living(tmp_path, DefinedKernels() if request.param == "by definition" else native) as link:
        yield link


def test_planned_rows_get_their_delta_and_the_others_zeros(link: Link) -> None:
    link.engine.send_plan(1, [PlanSegment(1, 2, 1, 7)])
    assert link.call()[:, 0].tolist() == [0.0, 16.0, 16.0, 0.0]
    assert link.steps == [[1]], "the pool knows whom it serves, whether Python or native code computes"


def test_progress_moves_with_every_call_and_is_none_while_none_is_computed(link: Link) -> None:
    link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)])
    for _ in range(3):
        before = told_while_computing(link)
        link.call()
        wait_until(partial(has_moved, link, before), "a call to be counted")
        assert link.thread.progress is None


def has_moved(link: Link, before: int | None) -> bool:
    return told_while_computing(link) != before


def told_while_computing(link: Link) -> int | None:
    """What the watchdog would read if a call were computed now."""
    native = link.thread._native
    if native is None:
        link.thread._is_computing = True
        told, link.thread._is_computing = link.thread.progress, False
    else:
        native._record.busy = 1
        told, native._record.busy = link.thread.progress, 0
    assert told is not None
    return told


def test_a_site_call_that_does_not_come_back_can_be_seen(tmp_path: Path) -> None:
    kernels = HangingKernels()
    with living(tmp_path, kernels) as link:
        link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)])
        out, x = torch.zeros(ROWS, COLS), torch.ones(ROWS, COLS)
        ticket = link.engine.submit(1, 0, Site.O, x, COLS)
        assert kernels.hangs.wait(WAIT_S)
        assert link.thread.progress is not None
        kernels.goes_on.set()
        link.engine.wait(ticket, out, deadline_s=WAIT_S, add=False)
        assert link.thread.progress is None


def test_a_site_call_without_memory_is_refused_and_the_next_is_answered(tmp_path: Path) -> None:
    kernels = HungryKernels()
    with living(tmp_path, kernels) as link:
        link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)])
        with pytest.raises(LinkRefused, match="no memory") as refused:
            link.call()
        assert refused.value.refusal.code == "overloaded"
        kernels.is_hungry = False
        assert link.call()[0, 0] == 16.0


class HungryKernels(DefinedKernels):
    """Find no memory."""

    is_hungry = True

    @override
    def dense(self, *arguments: Any, **named: Any) -> None:
        if self.is_hungry:
            torch.empty(1 << 62, dtype=torch.uint8)
        super().dense(*arguments, **named)


class HangingKernels(DefinedKernels):
    """Until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    @override
    def dense(self, *arguments: Any, **named: Any) -> None:
        self.hangs.set()
        self.goes_on.wait(WAIT_S)
        super().dense(*arguments, **named)


def test_a_site_that_nobody_adapts_is_zeros(link: Link) -> None:
    link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)])
    assert link.call(site=Site.DOWN).abs().sum() == 0.0


def test_a_call_of_a_step_without_a_plan_is_refused(link: Link) -> None:
    link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)])
    with pytest.raises(LinkRefused, match="step 2 has no plan"):
        link.call(2)
    assert link.call(1)[0, 0] == 16.0


def test_a_plan_that_makes_no_sense_refuses_its_calls_and_the_next_plan_heals(link: Link) -> None:
    link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7), PlanSegment(2, 2, 1, 7)])
    with pytest.raises(LinkRefused, match="begins before"):
        link.call(1)
    link.engine.send_plan(2, [PlanSegment(0, 4, 1, 7)])
    assert link.call(2)[0, 0] == 16.0


def test_a_grant_revoked_between_two_calls_of_a_step_refuses_the_second(link: Link) -> None:
    link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)])
    link.call()
    link.grants.revoke(1)
    with pytest.raises(LinkRefused, match="no lease"):
        link.call()


@pytest.mark.parametrize(
    ("site", "in_slice", "out_slice", "why"),
    [
        (Site.O, (0, 0), (0, 4), f"columns 0..4 came with room for {COLS}"),
        (Site.O, (1, 4), (0, 0), f"inputs 1..4 came with {COLS}"),
        (Site.MOE_DOWN, (0, COLS), (0, 0), "slice of site moe_down"),
        (Site.EMBED, (0, 0), (0, COLS), "slice of site embed"),
    ],
)
def test_a_slice_that_does_not_fit_its_call_or_site_is_refused_not_guessed(
    link: Link, site: Site, in_slice: tuple[int, int], out_slice: tuple[int, int], why: str
) -> None:
    link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)])
    with pytest.raises(LinkRefused, match=why):
        link.call(site=site, in_slice=in_slice, out_slice=out_slice)


def test_the_inputs_that_an_engine_shard_has_give_their_part_of_the_delta_and_the_first_has_the_bias(
    link: Link,
) -> None:
    a, bias = torch.arange(2.0 * COLS)[None], torch.full((COLS,), 0.5)
    link.kernels.bind(1, 0, Site.DOWN, (Part(a, torch.ones(1, COLS), 1.0, 0, bias),), 2 * COLS, COLS)
    for first, wanted in ((0, 28.5), (COLS, 92.0)):
        link.engine.send_plan(1, [PlanSegment(1, 2, 1, 7)])
        out = link.call(site=Site.DOWN, in_slice=(first, first + COLS))
        assert out[:, 3].tolist() == [0.0, wanted, wanted, 0.0]


def test_a_slice_of_lm_head_is_those_columns_of_it(link: Link) -> None:
    part = Part(a=torch.ones(1, COLS), bt=torch.arange(20.0)[None], scale=1.0, out_offset=0)
    link.kernels.bind(1, 0, Site.LM_HEAD, (part,), COLS, 20)
    link.engine.send_plan(1, [PlanSegment(1, 3, 1, 7)])
    out = link.call(site=Site.LM_HEAD, out_slice=(5, 5 + COLS))
    assert torch.equal(out[1:], COLS * torch.arange(5.0, 5 + COLS).expand(3, -1))
    assert not out[0].any()
    with pytest.raises(LinkRefused, match=f"columns 5..9 came with room for {COLS}"):
        link.call(site=Site.LM_HEAD, out_slice=(5, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_runs_of_columns_come_side_by_side_in_the_dtype_of_their_rows(link: Link, dtype: torch.dtype) -> None:
    a, bt = torch.arange(1.0, COLS + 1)[None] / 8, torch.arange(20.0)[None]
    link.kernels.bind(1, 0, Site.QKV, (Part(a=a, bt=bt, scale=1.0, out_offset=0),), COLS, 20)
    shape = Header(Kind.SITE, site=Site.QKV, rows=ROWS, in_cols=COLS, dtype=DTYPES.index(dtype))
    ticket = link.engine.prepare(shape.asking([(3, 5), (7, 8), (15, 19)]))
    x, out = torch.randn(ROWS, COLS).to(dtype), torch.full((ROWS, 7), torch.nan, dtype=dtype)
    link.engine.send_plan(1, [PlanSegment(1, 3, 1, 7)], trace=TRACE)
    link.engine.send(ticket, 1, 0, x)
    link.engine.wait(ticket, out, deadline_s=WAIT_S, add=False)
    wanted = (x.double() @ a.double().T) @ bt.double()[:, [3, 4, 7, 15, 16, 17, 18]]
    wanted[0] = 0.0
    torch.testing.assert_close(out.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize(
    ("site", "runs", "why"),
    [
        (Site.O, [(0, 4), (4, 9)], r"columns 0\.\.4, 4\.\.9 came with room for 8"),
        (Site.O, [(0, 4), (12, 16)], "columns 12"),
        (Site.O, [(0, 10), (10, 8)], "came with room for 8"),
        (Site.O, [(0, 0), (0, 0)], "columns of no run came with room for 8"),
        (Site.EMBED, [(0, 4), (4, 8)], "slice of site embed"),
    ],
    ids=str,
)
def test_runs_that_fit_no_site_or_answer_are_refused_not_guessed(
    tmp_path: Path, site: Site, runs: list[tuple[int, int]], why: str
) -> None:
    with living(tmp_path, SlotKernels(num_slots=4, num_layers=2)) as link:
        link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)])
        shape = Header(Kind.SITE, site=site, rows=ROWS, in_cols=COLS).asking(runs)._replace(out_cols=COLS)
        ticket = link.engine.prepare(shape)
        link.engine.send(ticket, 1, 0, torch.ones(ROWS, COLS))
        with pytest.raises(LinkRefused, match=why):
            link.engine.wait(ticket, torch.zeros(ROWS, COLS), deadline_s=WAIT_S, add=False)


def test_native_kernels_answer_slices_without_python(tmp_path: Path) -> None:
    with living(tmp_path, SlotKernels(num_slots=4, num_layers=2)) as link:
        a = torch.arange(2.0 * COLS)[None]
        link.kernels.bind(1, 0, Site.DOWN, (Part(a, torch.ones(1, COLS), 1.0, 0),), 2 * COLS, COLS)
        link.engine.send_plan(1, [PlanSegment(1, 2, 1, 7)])
        link.call()
        link.thread._site_call = None  # type: ignore[assignment, method-assign]  # Python cannot answer any more
        assert link.call(out_slice=(0, COLS))[:, 5].tolist() == [0.0, 16.0, 16.0, 0.0]
        assert link.call(site=Site.DOWN, in_slice=(COLS, 2 * COLS))[:, 5].tolist() == [0.0, 92.0, 92.0, 0.0]


def test_an_embedding_is_computed_from_token_ids_alone(link: Link) -> None:
    part = Part(a=torch.arange(30.0)[None], bt=torch.ones(1, COLS), scale=2.0, out_offset=0)
    link.kernels.bind(1, 0, Site.EMBED, (part,), 30, COLS)
    link.engine.send_plan(1, [PlanSegment(0, 3, 1, 7)])
    out, ids = torch.full((ROWS, COLS), torch.nan), torch.tensor([[4], [29], [0], [7]])
    ticket = link.engine.submit(1, 0, Site.EMBED, torch.empty(ROWS, 0), COLS, topk_ids=ids)
    link.engine.wait(ticket, out, deadline_s=WAIT_S, add=False)
    assert out[:, 0].tolist() == [8.0, 58.0, 0.0, 0.0]
    for wrong in (None, torch.zeros(ROWS, 2)):
        link.engine.send_plan(1, [PlanSegment(0, 3, 1, 7)])
        ticket = link.engine.submit(1, 0, Site.EMBED, torch.empty(ROWS, 0), COLS, topk_ids=wrong)
        with pytest.raises(LinkRefused, match=r"needs topk_ids|one token id a row"):
            link.engine.wait(ticket, out, deadline_s=WAIT_S, add=False)


def test_a_routed_site_without_routing_is_refused(link: Link) -> None:
    link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)])
    with pytest.raises(LinkRefused, match="topk 0"):
        link.call(site=Site.MOE_DOWN)


def test_experts_are_computed_as_they_are_defined(link: Link) -> None:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    up = Part(a=random(3, 2, COLS), bt=random(3, 2, 6), scale=0.5, out_offset=0)
    down = Part(a=random(3, 2, 6), bt=random(3, 2, COLS), scale=2.0, out_offset=0)
    link.kernels.bind(1, 0, Site.MOE_GATE_UP, (up,), COLS, 6)
    link.kernels.bind(1, 0, Site.MOE_DOWN, (down,), 6, COLS)
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]], dtype=torch.int32)
    weights, x, act = random(ROWS, 2), random(ROWS, COLS), random(ROWS, 2, 6)
    link.engine.send_plan(1, [PlanSegment(0, 3, 1, 7)])
    raised, lowered = torch.full((ROWS, 2, 6), torch.nan), torch.full((ROWS, COLS), torch.nan)
    ticket = link.engine.submit(1, 0, Site.MOE_GATE_UP, x, 12, topk_ids=ids)
    link.engine.wait(ticket, raised, deadline_s=WAIT_S, add=False)
    ticket = link.engine.submit(1, 0, Site.MOE_DOWN, act, COLS, topk_ids=ids, topk_weights=weights)
    link.engine.wait(ticket, lowered, deadline_s=WAIT_S, add=False)
    for t, j in itertools.product(range(3), range(2)):
        e = int(ids[t, j])
        torch.testing.assert_close(raised[t, j], 0.5 * (x[t] @ up.a[e].T) @ up.bt[e])
    for t in range(3):
        terms = [weights[t, j] * 2.0 * (act[t, j] @ down.a[e].T) @ down.bt[e] for j, e in enumerate(ids[t].tolist())]
        torch.testing.assert_close(lowered[t], terms[0] + terms[1])
    assert not raised[3].any()
    assert not lowered[3].any()


def test_a_bias_comes_with_its_delta(link: Link) -> None:
    bias = torch.arange(float(COLS))
    part = Part(a=torch.ones(1, COLS), bt=torch.ones(1, COLS), scale=1.0, out_offset=0, bias=bias)
    link.kernels.bind(1, 0, Site.DOWN, (part,), COLS, COLS)
    link.engine.send_plan(1, [PlanSegment(0, 2, 1, 7)])
    assert torch.equal(link.call(site=Site.DOWN)[:2], (COLS + bias).expand(2, -1))


def test_what_is_granted_in_the_middle_of_a_step_is_computed_and_what_is_not_is_refused(link: Link) -> None:
    part = Part(a=torch.ones(1, COLS), bt=torch.ones(1, COLS), scale=1.0, out_offset=0)
    link.kernels.bind(1, 1, Site.O, (part,), COLS, COLS)
    link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)])
    assert link.call()[0, 0] == 16.0
    with pytest.raises(LinkRefused, match="layer 1"):
        link.call(layer=1)
    link.grants.grant(1, 7, 2)
    link.engine.send_plan(2, [PlanSegment(0, 4, 1, 7)])
    assert link.call(2, layer=1)[0, 0] == 8.0
    link.grants.grant(2, 3, 2)
    assert [link.call(2, layer=1)[0, 0] for _ in range(3)] == [8.0] * 3


def test_planned_calls_of_native_kernels_never_come_to_python(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*_: object, **__: object) -> None:
        raise ValueError("came to Python")

    monkeypatch.setattr(link.kernels, "dense", unwanted)
    link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)])
    if isinstance(link.kernels, SlotKernels):
        assert link.call()[0, 0] == 16.0
    else:
        with pytest.raises(LinkRefused, match="came to Python"):
            link.call()


def test_what_is_granted_beside_a_plan_brings_no_call_of_it_to_python_and_what_is_taken_back_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with living(tmp_path, SlotKernels(num_slots=4, num_layers=2)) as link:
        link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)])
        link.call()
        calls, dense = list[int](), link.kernels.dense

        def seen(layer: int, *args: Any, **kwargs: Any) -> None:
            calls.append(layer)
            dense(layer, *args, **kwargs)

        monkeypatch.setattr(link.kernels, "dense", seen)
        link.grants.grant(1, 7, 2)
        link.grants.grant(2, 3, 1)
        assert link.call()[0, 0] == 16.0
        assert calls == []
        link.grants.revoke(2)
        assert link.call()[0, 0] == 16.0
        assert calls == [0], "Python looks again, and finds that it was another's"
        assert link.call()[0, 0] == 16.0
        assert calls == [0]


def test_every_call_computed_is_counted_and_no_refused_one(link: Link) -> None:
    link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)])
    for _ in range(5):
        link.call()
    with pytest.raises(LinkRefused):
        link.call(2)
    link.thread.stop()
    page = render(link.registry).decode()
    assert "infinilora_lora_site_seconds_count 5.0" in page
    (total,) = re.findall("infinilora_lora_site_seconds_sum (.*)", page)
    assert 0 < float(total) < WAIT_S


def test_a_traced_step_is_one_span_of_its_parent_whatever_its_calls(link: Link) -> None:
    link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)], trace=TRACE)
    for _ in range(3):
        link.call()
    link.engine.send_plan(2, [PlanSegment(0, 4, 1, 7)])
    link.call(2)
    (span,) = link.spans.get_finished_spans()
    assert span.name == "lora.step"
    assert span.parent is not None
    assert span.parent.span_id == int.from_bytes(TRACE[16:])
    assert span.attributes is not None
    assert (span.attributes["rows"], span.attributes["site_calls"]) == (4, 3)


def test_an_engine_that_closes_its_end_ends_the_thread(link: Link) -> None:
    link.engine.close()
    assert link.ended.wait(WAIT_S)


def test_a_quarantined_link_ends_the_thread(link: Link) -> None:
    link.engine.quarantine()
    assert link.ended.wait(WAIT_S)


def test_a_stopped_thread_closes_the_link_to_its_engine(link: Link) -> None:
    link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)])
    link.thread.stop()
    with pytest.raises(LinkClosed):
        link.call()
