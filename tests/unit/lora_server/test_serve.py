"""The serving thread over a real link in this process, with kernels by definition."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from infinilora.kernels.batch import Part
from infinilora.link.ends import EngineEnd
from infinilora.link.errors import LinkClosed, LinkRefused
from infinilora.link.frame import PlanSegment
from infinilora.link.open import LinkSettings, Offers, Opener, attach
from infinilora.lora_server.serve import LinkThread
from infinilora.pool.execute import Grants
from infinilora.protocol.adapter import Site
from infinilora.runtime.telemetry import Telemetry
from support.pools import DefinedKernels

ROWS, COLS, WAIT_S = 4, 8, 5.0
TRACE = bytes(range(1, 25))


class Link:
    """An engine's end and the thread that serves it; slot 1 in tenancy 7 adds 2 x the sum of a row."""

    def __init__(self, directory: Path) -> None:
        self.spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        settings = LinkSettings(directory=directory)
        with closing(Offers(settings)) as offers:
            opening = Opener(settings).choose(offers.wire)
            self.engine: EngineEnd = attach(opening.chosen, opening.secret, settings)
        self.kernels = DefinedKernels()
        part = Part(a=torch.ones(1, COLS), bt=torch.ones(1, COLS), scale=2.0, out_offset=0)
        self.kernels.bind(1, 0, Site.O, (part,), COLS, COLS)
        self.grants = Grants()
        self.grants.grant(1, 7, 1)
        self.ended = threading.Event()
        self.deaths: list[BaseException] = []
        self.thread = LinkThread(
            opening.wait(WAIT_S),
            self.kernels,
            self.grants,
            name="link",
            traces=Telemetry(provider),
            metrics=None,
            on_end=self.ended.set,
            on_death=self.deaths.append,
        )
        self.thread.start()

    def call(self, step_id: int = 1, *, site: int = Site.O, out_slice: tuple[int, int] = (0, 0)) -> torch.Tensor:
        out = torch.full((ROWS, COLS), torch.nan)
        ticket = self.engine.submit(step_id, 0, site, torch.ones(ROWS, COLS), COLS, out_slice=out_slice)
        self.engine.wait(ticket, out, deadline_s=WAIT_S, add=False)
        return out


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    link = Link(tmp_path)
    yield link
    link.thread.stop()
    link.engine.close()
    assert not link.deaths


def test_planned_rows_get_their_delta_and_the_others_zeros(link: Link) -> None:
    link.engine.send_plan(1, [PlanSegment(1, 2, 1, 7)])
    assert link.call()[:, 0].tolist() == [0.0, 16.0, 16.0, 0.0]


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


def test_a_slice_of_a_site_is_refused_not_guessed(link: Link) -> None:
    link.engine.send_plan(1, [PlanSegment(0, 4, 1, 7)])
    with pytest.raises(LinkRefused, match="whole sites"):
        link.call(out_slice=(0, 4))


def test_a_slice_of_lm_head_is_those_columns_of_it(link: Link) -> None:
    part = Part(a=torch.ones(1, COLS), bt=torch.arange(20.0)[None], scale=1.0, out_offset=0)
    link.kernels.bind(1, 0, Site.LM_HEAD, (part,), COLS, 20)
    link.engine.send_plan(1, [PlanSegment(1, 3, 1, 7)])
    out = link.call(site=Site.LM_HEAD, out_slice=(5, 5 + COLS))
    assert torch.equal(out[1:], COLS * torch.arange(5.0, 5 + COLS).expand(3, -1))
    assert not out[0].any()
    with pytest.raises(LinkRefused, match=f"columns 5..9 came with room for {COLS}"):
        link.call(site=Site.LM_HEAD, out_slice=(5, 9))


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
