"""A ticket that is prepared once and sent again and again: every time as right as one made for the occasion."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infinilora.link.engine_end import EngineEnd
from infinilora.link.errors import LinkClosed, LinkRefused, LinkTimeout
from infinilora.link.frame import DTYPE_CODES, Flag, Header, Kind
from infinilora.protocol.errors import Internal, InvalidRequest
from support.links import KINDS, REFUSED_LAYER, Answering, ends, linked, random_rows, rule

every_kind = pytest.mark.parametrize("kind", KINDS)
LONG_S = 10.0
SITE = 2


def shape(rows: int, in_cols: int, out_cols: int, dtype: torch.dtype = torch.float32, **more: Any) -> Header:
    return Header(
        kind=Kind.SITE, site=SITE, rows=rows, in_cols=in_cols, out_cols=out_cols, dtype=DTYPE_CODES[dtype], **more
    )


def wanted_of(y: Tensor, delta: Tensor) -> Tensor:
    """Y with a delta of its own dtype added, each rounded once."""
    return (y.float() + delta.to(y.dtype).float()).to(y.dtype)


@every_kind
def test_each_sending_carries_its_own_step_layer_trace_and_rows(kind: str, tmp_path: Path) -> None:
    with linked(kind, tmp_path) as (engine, serving):
        ticket = engine.prepare(shape(5, 24, 40, row_start=3))
        for step in range(1, 30):
            trace = bytes([step]) * 24
            engine.send_plan(step, [], trace=trace)
            for layer in range(3):
                x, y = random_rows(5, 24, seed=step), random_rows(5, 40, seed=layer)
                wanted = y + rule(layer, SITE, x, 40, None, None)
                engine.send(ticket, step, layer, x)
                engine.wait(ticket, y, deadline_s=LONG_S, add=True)
                torch.testing.assert_close(y, wanted)
        sites = [c.header for c in serving.calls if c.header.kind == Kind.SITE]
        assert (engine.num_outstanding, engine.in_flight, engine.stale) == (0, 0, 0)
    assert [(h.step_id, h.layer, h.trace) for h in sites] == [
        (step, layer, bytes([step]) * 24) for step in range(1, 30) for layer in range(3)
    ]
    assert {(h.site, h.row_start, h.rows, h.is_last) for h in sites} == {(SITE, 3, 5, True)}


def laid_out(rows: int, cols: int, seed: int, how: str, dtype: torch.dtype) -> Tensor:
    """Random rows as a part of a wider tensor, transposed, or by themselves."""
    if how == "wide":
        return random_rows(rows + 2, cols + 9, seed=seed, dtype=dtype)[1:-1, 4 : 4 + cols]
    if how == "transposed":
        return random_rows(cols, rows, seed=seed, dtype=dtype).T
    return random_rows(rows, cols, seed=seed, dtype=dtype)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_x_and_y_may_be_laid_out_otherwise_every_time(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Rows 30 to 69 of a step whose other rows come and go, in chunks, from and into tensors of any layout."""
    layouts = [(80, "own", "own"), (80, "wide", "own"), (71, "transposed", "wide"), (71, "transposed", "wide")]
    layouts += [(70, "wide", "wide"), (99, "own", "own"), (99, "own", "own"), (70, "own", "wide"), (70, "own", "own")]
    mine, rest = slice(30, 70), torch.cat([torch.arange(30), torch.arange(70, 99)])
    with linked(kind, tmp_path) as (engine, _):
        ticket = engine.prepare(shape(40, 100, 70, dtype, row_start=30), at=30)
        assert ticket.chunks > 1
        for step, (rows, x_is, y_is) in enumerate(layouts):
            x, y = laid_out(rows, 100, step, x_is, dtype), laid_out(rows, 70, -step - 1, y_is, dtype)
            before = y.clone()
            engine.send_plan(step, [])
            engine.send(ticket, step, step, x)
            engine.wait(ticket, y, deadline_s=LONG_S, add=True)
            assert torch.equal(y[mine], wanted_of(before[mine], rule(step, SITE, x[mine], 70, None, None)))
            others = rest[rest < rows]
            assert torch.equal(y[others], before[others])


@every_kind
def test_runs_of_columns_travel_in_one_call_in_every_step(kind: str, tmp_path: Path) -> None:
    runs = [(0, 40), (60, 65), (75, 100)]
    with linked(kind, tmp_path) as (engine, serving):
        ticket = engine.prepare(shape(30, 24, 100).asking(runs))
        for step in range(3):
            x, y = random_rows(30, 24, seed=step), torch.full((30, 70), torch.nan)
            engine.send_plan(step, [], trace=bytes([7]) * 24)
            engine.send(ticket, step, 2, x)
            engine.wait(ticket, y, deadline_s=LONG_S, add=False)
            assert torch.equal(y, rule(2, SITE, x, 70, None, None))
    sites = [call.header for call in serving.calls if call.header.kind == Kind.SITE]
    assert len(sites) > 3, "cut into chunks, each of which says its runs"
    assert {site.runs for site in sites} == {tuple(runs)}


@every_kind
def test_slices_of_columns_go_to_their_place_in_every_step(kind: str, tmp_path: Path) -> None:
    cuts = [(0, 40), (40, 75), (75, 100)]
    with linked(kind, tmp_path) as (engine, _):
        tickets = [
            engine.prepare(shape(3, 24, stop - at, out_begin=at, out_end=stop), at=1, out_at=at) for at, stop in cuts
        ]
        for step in range(3):
            x, y = random_rows(5 + step, 24, seed=step), random_rows(5 + step, 100, seed=9)
            wanted = y.clone()
            engine.send_plan(step, [])
            for ticket, (at, stop) in zip(tickets, cuts, strict=True):
                wanted[1:4, at:stop] += rule(step, SITE, x[1:4], stop - at, None, None)
                engine.send(ticket, step, step, x)
            for ticket in tickets:
                engine.wait(ticket, y, deadline_s=LONG_S, add=True)
            torch.testing.assert_close(y, wanted)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_routed_ticket_carries_the_experts_of_its_own_rows(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    flags = Flag.HAS_IDS | Flag.HAS_WEIGHTS
    with linked(kind, tmp_path) as (engine, _):
        ticket = engine.prepare(shape(50, 24, 10, dtype, topk=2, flags=flags, row_start=7), at=7)
        for step in range(4):
            x = random_rows(60 + step, 24, seed=step, dtype=dtype).view(-1, 2, 12)
            ids = torch.randint(0, 8, (60 + step, 2), generator=torch.Generator().manual_seed(step))
            weights, out = random_rows(60 + step, 2, seed=4 + step), torch.zeros(60 + step, 2, 5, dtype=dtype)
            engine.send_plan(step, [])
            engine.send(ticket, step, 0, x, ids.int() if step % 2 else ids, weights)
            engine.wait(ticket, out, deadline_s=LONG_S, add=True)
            wanted = torch.zeros_like(out).flatten(1)
            wanted[7:57] = rule(0, SITE, x.flatten(1)[7:57], 10, ids[7:57], weights[7:57]).to(dtype)
            assert torch.equal(out.flatten(1), wanted)


@every_kind
def test_weights_without_their_experts_are_refused_before_they_are_sent(kind: str, tmp_path: Path) -> None:
    with linked(kind, tmp_path) as (engine, _):
        ticket = engine.prepare(shape(4, 24, 10, topk=2, flags=Flag.HAS_WEIGHTS))
        with pytest.raises(InvalidRequest, match="without the experts"):
            engine.send(ticket, 1, 0, random_rows(4, 24), None, torch.ones(4, 2))
        assert engine.is_alive


@every_kind
def test_an_abandoned_ticket_is_sent_again_and_its_old_answers_reach_nobody(kind: str, tmp_path: Path) -> None:
    old, new = random_rows(100, 50), random_rows(100, 50, seed=1)
    with linked(kind, tmp_path) as (engine, serving):
        ticket = engine.prepare(shape(100, 50, 50))
        serving.gate.clear()
        engine.send_plan(1, [])
        engine.send(ticket, 1, 5, old)
        sent = ticket.sent
        engine.abandon()
        assert ticket.x is None, "its rows are the caller's again"
        with pytest.raises(LinkClosed, match="abandoned"):
            engine.wait(ticket, torch.zeros(100, 50), deadline_s=LONG_S, add=True)
        serving.gate.set()
        engine.send_plan(2, [])
        out = torch.zeros(100, 50)
        engine.send(ticket, 2, 6, new)
        engine.wait(ticket, out, deadline_s=LONG_S, add=True)
        torch.testing.assert_close(out, rule(6, SITE, new, 50, None, None))
        assert 0 < sent == engine.stale


@every_kind
def test_a_refused_ticket_is_sent_again(kind: str, tmp_path: Path) -> None:
    x, out = random_rows(90, 50), torch.zeros(90, 50)
    with linked(kind, tmp_path) as (engine, _):
        ticket = engine.prepare(shape(90, 50, 50))
        engine.send_plan(1, [])
        engine.send(ticket, 1, REFUSED_LAYER, x)
        with pytest.raises(LinkRefused):
            engine.wait(ticket, out, deadline_s=LONG_S, add=True)
        engine.send_plan(2, [])
        engine.send(ticket, 2, 1, x)
        engine.wait(ticket, out.zero_(), deadline_s=LONG_S, add=True)
        torch.testing.assert_close(out, rule(1, SITE, x, 50, None, None))


@every_kind
def test_tickets_waited_for_in_the_wrong_order_are_right_and_right_again(kind: str, tmp_path: Path) -> None:
    """More chunks than there are buffers: what is waited for last is taken out of the link before."""
    with linked(kind, tmp_path) as (engine, _):
        first, second = (engine.prepare(shape(60, 50, 50, row_start=at), at=at) for at in (0, 60))
        for step in range(5):
            x, y = random_rows(120, 50, seed=step), random_rows(120, 50, seed=99)
            wanted = y + rule(step, SITE, x, 50, None, None)
            engine.send_plan(step, [])
            engine.send(first, step, step, x)
            engine.send(second, step, step, x)
            early, late = (second, first) if step % 2 else (first, second)
            engine.wait(early, y, deadline_s=LONG_S, add=True)
            with pytest.raises(InvalidRequest, match="out is"):
                engine.wait(late, torch.zeros(60, 50), deadline_s=LONG_S, add=True)
            engine.wait(late, y, deadline_s=LONG_S, add=True)
            torch.testing.assert_close(y, wanted)


@every_kind
def test_a_link_that_closes_before_the_wait_adds_nothing(kind: str, tmp_path: Path) -> None:
    with ends(kind, tmp_path) as (engine, server):
        serving = Answering(server)
        ticket, x, y = engine.prepare(shape(4, 8, 8)), random_rows(4, 8), torch.zeros(4, 8)
        engine.send_plan(1, [])
        engine.send(ticket, 1, 0, x)
        engine.wait(ticket, y, deadline_s=LONG_S, add=False)
        serving.gate.clear()
        engine.send(ticket, 1, 1, x)
        server.close()
        with pytest.raises(LinkClosed):
            engine.wait(ticket, y, deadline_s=LONG_S, add=True)
        torch.testing.assert_close(y, rule(0, SITE, x, 8, None, None))
        serving.join()


@every_kind
def test_a_wait_says_how_long_the_call_took(kind: str, tmp_path: Path) -> None:
    with linked(kind, tmp_path) as (engine, serving):
        ticket, x, y = engine.prepare(shape(4, 8, 8)), random_rows(4, 8), torch.zeros(4, 8)
        engine.send_plan(1, [])
        for held_s in (0.0, 0.2, 0.0):
            serving.gate.clear()
            opening = threading.Timer(held_s, serving.gate.set)
            started = time.monotonic()
            engine.send(ticket, 1, 0, x)
            opening.start()
            took_s = engine.wait(ticket, y, deadline_s=LONG_S, add=True)
            assert held_s <= took_s <= time.monotonic() - started
            opening.join()


@every_kind
def test_a_wait_says_how_much_of_it_was_waiting(kind: str, tmp_path: Path) -> None:
    """All of the time until the answer is made; not what passed before anybody waited."""
    with linked(kind, tmp_path) as (engine, serving):
        first, second = (engine.prepare(shape(4, 8, 8)) for _ in range(2))
        x, y = random_rows(4, 8), torch.zeros(4, 8)
        engine.send_plan(1, [])

        def waits() -> bool:
            """Whether all of 0.2 s was waiting: something else may have had the core before the wait began."""
            serving.gate.clear()
            engine.send(first, 1, 0, x)
            opening = threading.Timer(0.2, serving.gate.set)
            opening.start()
            started = time.monotonic()
            engine.wait(first, y, deadline_s=LONG_S, add=True)
            assert first.waited_s <= min(first.took_s, time.monotonic() - started)
            opening.join()
            return first.waited_s >= 0.15

        assert any(waits() for _ in range(20))
        if not engine._port.takes_in_order:
            serving.gate.clear()
            engine.send(first, 1, 1, x)
            engine.send(second, 1, 2, x)
            opening = threading.Timer(0.2, serving.gate.set)
            opening.start()
            engine.wait(second, y, deadline_s=LONG_S, add=True)
            opening.join()
            started = time.monotonic()
            engine.wait(first, y, deadline_s=LONG_S, add=True)
            assert first.waited_s <= time.monotonic() - started, "its answer lay there when it was waited for"
            assert first.took_s >= 0.2


@every_kind
def test_a_wait_in_vain_was_waiting_too(kind: str, tmp_path: Path) -> None:
    with linked(kind, tmp_path) as (engine, serving):
        ticket = engine.prepare(shape(4, 8, 8))
        serving.gate.clear()
        engine.send_plan(1, [])
        engine.send(ticket, 1, 0, random_rows(4, 8))
        with pytest.raises(LinkTimeout):
            engine.wait(ticket, torch.zeros(4, 8), deadline_s=0.2, add=True)
        assert 0.15 <= ticket.waited_s < LONG_S


def test_a_native_answer_says_when_it_was_computed(tmp_path: Path) -> None:
    """More chunks than one: from the first one's beginning to the last one's end."""
    with linked("native-native", tmp_path) as (engine, serving):
        ticket, x = engine.prepare(shape(60, 50, 50)), random_rows(60, 50)
        assert ticket.chunks > 1
        assert ticket.computed_s is None, "nothing was computed yet"
        engine.send_plan(1, [])
        engine.send(ticket, 1, 0, x)
        engine.wait(ticket, torch.zeros(60, 50), deadline_s=LONG_S, add=True)
        serving.gate.clear()
        opened_after = time.monotonic() + 0.1
        opening = threading.Timer(0.1, serving.gate.set)
        opening.start()
        sent = time.monotonic()
        engine.send(ticket, 1, 0, x)
        engine.wait(ticket, torch.zeros(60, 50), deadline_s=LONG_S, add=True)
        assert ticket.computed_s is not None
        began, ended = ticket.computed_s
        assert sent <= began < opened_after - 0.05, "the first chunk was taken up before the gate opened"
        assert opened_after - 0.01 <= ended <= time.monotonic()
        opening.join()


@every_kind
def test_what_does_not_fit_the_ticket_is_refused_and_nothing_is_sent(kind: str, tmp_path: Path) -> None:
    with linked(kind, tmp_path) as (engine, serving):
        ticket = engine.prepare(shape(4, 8, 6, row_start=2), at=2)
        engine.send_plan(1, [])
        for wrong in (random_rows(5, 8), random_rows(6, 9), random_rows(6, 8, dtype=torch.bfloat16)):
            with pytest.raises(InvalidRequest, match="rows 2 to 6 and 8 columns"):
                engine.send(ticket, 1, 0, wrong)
        with pytest.raises(InvalidRequest, match="experts"):
            engine.send(ticket, 1, 0, random_rows(6, 8), torch.zeros(6, 2, dtype=torch.int32))
        routed = engine.prepare(shape(4, 8, 6, topk=2, flags=Flag.HAS_IDS))
        for ids in (None, torch.zeros(4, 3), torch.zeros(3, 2)):
            with pytest.raises(InvalidRequest, match="experts"):
                engine.send(routed, 1, 0, random_rows(4, 8), ids)
        assert engine.num_outstanding == 0
        _wait_into_wrong_tensors(engine)
        assert len([c for c in serving.calls if c.header.kind == Kind.SITE]) == 2


def _wait_into_wrong_tensors(engine: EngineEnd) -> None:
    ticket = engine.prepare(shape(4, 8, 6), at=2)
    for rows in (7, 9):  # the second time, out has the rows of the first
        engine.send(ticket, 1, 0, random_rows(rows, 8))
        with pytest.raises(Internal, match="sent again"):
            engine.send(ticket, 1, 0, random_rows(rows, 8))
        wrong = (torch.zeros(rows - 2, 6), torch.zeros(rows, 7), torch.zeros(6, rows).T, torch.zeros(rows, 6).double())
        for out in wrong:
            with pytest.raises(InvalidRequest, match=r"out|link carries"):
                engine.wait(ticket, out, deadline_s=LONG_S, add=True)
        engine.wait(ticket, torch.zeros(rows, 6), deadline_s=LONG_S, add=True)


def test_a_call_whose_row_fits_no_buffer_is_refused_as_it_is_prepared(tmp_path: Path) -> None:
    with linked("native-native", tmp_path) as (engine, _), pytest.raises(InvalidRequest, match="buffer"):
        engine.prepare(shape(2, 2000, 4))
