import contextlib
import itertools
import threading
import time
from pathlib import Path

import pytest
import torch

from infinilora.link.engine_end import EngineEnd
from infinilora.link.errors import LinkClosed, LinkRefused, LinkTimeout
from infinilora.link.frame import Kind, PlanSegment, column_slices
from infinilora.link.server_end import Call, ServerEnd
from infinilora.protocol.errors import InvalidRequest
from support.links import KINDS, REFUSED_LAYER, Answering, answer, ends, linked, random_rows, rule

every_kind = pytest.mark.parametrize("kind", KINDS)
LONG_S = 10.0


@every_kind
def test_a_delta_is_added_to_the_rows_of_y(kind: str, tmp_path: Path) -> None:
    x, y = random_rows(5, 24), random_rows(5, 40, seed=1)
    wanted = y + rule(3, 2, x, 40, None, None)
    with linked(kind, tmp_path) as (engine, _):
        engine.send_plan(1, [PlanSegment(0, 5, 7, 1)])
        engine.wait(engine.submit(1, 3, 2, x, 40), y, deadline_s=LONG_S, add=True)
    torch.testing.assert_close(y, wanted)


@every_kind
def test_a_call_larger_than_the_whole_ring_passes_in_chunks(kind: str, tmp_path: Path) -> None:
    x, out = random_rows(301, 100), torch.full((301, 70), torch.nan)
    with linked(kind, tmp_path) as (engine, serving):
        engine.send_plan(1, [])
        ticket = engine.submit(1, 0, 0, x, 70, row_start=11)
        assert ticket.sent <= 4 < ticket.chunks, "no more chunks on their way than there are reply buffers"
        engine.wait(ticket, out, deadline_s=LONG_S, add=False)
        sites = [c.header for c in serving.calls if c.header.kind == Kind.SITE]
    torch.testing.assert_close(out, rule(0, 0, x, 70, None, None))
    assert [(h.row_start, h.is_last) for h in sites] == [(11 + 10 * n, n == 30) for n in range(31)]


@every_kind
def test_rows_of_a_wider_tensor_are_sent_and_added_where_they_lie(kind: str, tmp_path: Path) -> None:
    wide_x, wide_y = random_rows(9, 64), random_rows(9, 50, seed=1)
    x, y = wide_x[2:8, 8:32], wide_y[2:8, 5:45]
    wanted = wide_y.clone()
    wanted[2:8, 5:45] += rule(1, 1, x, 40, None, None)
    with linked(kind, tmp_path) as (engine, _):
        engine.send_plan(1, [])
        engine.wait(engine.submit(1, 1, 1, x, 40), y, deadline_s=LONG_S, add=True)
    torch.testing.assert_close(wide_y, wanted)


@every_kind
def test_a_call_of_ids_alone_passes_in_chunks(kind: str, tmp_path: Path) -> None:
    ids = torch.arange(90, dtype=torch.int32)[:, None]
    out = torch.zeros(90, 40)
    with ends(kind, tmp_path) as (engine, server):
        seen: list[Call] = []

        def serve() -> None:
            with contextlib.suppress(LinkClosed):
                while True:
                    call = server.recv(0.2)
                    if call is not None:
                        assert call.x is not None
                        assert call.topk_ids is not None
                        seen.append(Call(call.header))
                        assert call.x.shape == (call.header.rows, 0)
                        server.reply_buffer(call).copy_(call.topk_ids.float().expand(-1, 40))
                        server.reply(call)

        serving = threading.Thread(target=serve)
        serving.start()
        ticket = engine.submit(1, 0, 10, torch.empty(90, 0), 40, topk_ids=ids)
        engine.wait(ticket, out, deadline_s=LONG_S, add=True)
        engine.close()
        serving.join(LONG_S)
    assert torch.equal(out, ids.float().expand(-1, 40))
    assert len(seen) == 4, "25 rows of 160 bytes fit a buffer"


@every_kind
def test_a_row_wider_than_a_buffer_comes_in_slices_of_its_columns(kind: str, tmp_path: Path) -> None:
    x, y = random_rows(3, 24), torch.zeros(3, 2500)
    with linked(kind, tmp_path) as (engine, serving):
        engine.send_plan(1, [])
        slices = column_slices(2500, 4, engine.buffer_bytes)
        tickets = [engine.submit(1, 0, 9, x, stop - at, out_slice=(at, stop)) for at, stop in slices]
        for ticket, (at, stop) in zip(tickets, slices, strict=True):
            engine.wait(ticket, y[:, at:stop], deadline_s=LONG_S, add=True)
        sliced = [(c.header.out_begin, c.header.out_end) for c in serving.calls if c.header.kind == Kind.SITE]
    for at, stop in slices:
        torch.testing.assert_close(y[:, at:stop], rule(0, 9, x, stop - at, None, None))
    assert set(sliced) == set(slices)


@every_kind
@pytest.mark.parametrize("with_weights", [False, True])
def test_a_routed_call_carries_its_experts(kind: str, with_weights: bool, tmp_path: Path) -> None:
    x = random_rows(150, 2 * 12).view(150, 2, 12)
    ids = torch.randint(0, 8, (150, 2), generator=torch.Generator().manual_seed(3))
    weights = random_rows(150, 2, seed=4) if with_weights else None
    out = torch.zeros(150, 2, 5)
    with linked(kind, tmp_path) as (engine, _):
        engine.send_plan(1, [])
        ticket = engine.submit(1, 0, 4, x, 10, topk_ids=ids, topk_weights=weights)
        engine.wait(ticket, out, deadline_s=LONG_S, add=True)
    torch.testing.assert_close(out.flatten(1), rule(0, 4, x.flatten(1), 10, ids, weights))


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_activations_of_every_dtype_are_added_and_copied(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    x, start = random_rows(7, 33, dtype=dtype), random_rows(7, 40, seed=1, dtype=dtype)
    added, copied = start.clone(), start.clone()
    delta = rule(0, 0, x, 40, None, None).to(dtype)
    with linked(kind, tmp_path) as (engine, _):
        engine.send_plan(1, [])
        engine.wait(engine.submit(1, 0, 0, x, 40), added, deadline_s=LONG_S, add=True)
        engine.wait(engine.submit(1, 0, 0, x, 40), copied, deadline_s=LONG_S, add=False)
    assert torch.equal(copied, delta)
    assert torch.equal(added, (start.float() + delta.float()).to(dtype))


def test_a_delta_of_one_dtype_is_added_to_rows_of_another(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    with linked("native-native", tmp_path) as (engine, _):
        engine.send_plan(1, [])
        for sent, held in itertools.product(dtypes, dtypes):
            x, y = random_rows(3, 20, dtype=sent), random_rows(3, 20, seed=1, dtype=held)
            wanted = (y.float() + rule(0, 0, x, 20, None, None).to(sent).float()).to(held)
            engine.wait(engine.submit(1, 0, 0, x, 20), y, deadline_s=LONG_S, add=True)
            assert torch.equal(y, wanted), (sent, held)


def test_the_native_half_precision_is_the_ieee_one_for_every_value(tmp_path: Path) -> None:
    """Every fp16 value and its float32 neighbours round as torch rounds them, subnormals and infinities included."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    finite = values[values.isfinite()].float()
    middle = torch.cat(
        [finite, finite * 1.0003, finite + 2.0**-25, torch.tensor([65519.9, 65520.0, 1e9, -1e9, torch.inf])]
    )
    x = middle[: middle.numel() // 64 * 64].view(-1, 64) + 0  # the rule adds 0, which turns -0 into 0
    for dtype in (torch.float16, torch.bfloat16):
        out = torch.empty(x.shape, dtype=dtype)
        with linked("native-native", tmp_path, num_buffers=8, buffer_bytes=1 << 16) as (engine, _):
            engine.send_plan(1, [])
            engine.wait(engine.submit(1, 0, 0, x, 64), out, deadline_s=LONG_S, add=False)
        assert torch.equal(out.view(torch.int16), x.to(dtype).view(torch.int16))


@every_kind
def test_calls_may_be_waited_for_in_any_order(kind: str, tmp_path: Path) -> None:
    xs = [random_rows(rows, 50, seed=rows) for rows in (40, 3, 90, 1)]
    with linked(kind, tmp_path) as (engine, _):
        for order in itertools.permutations(range(4)):
            engine.send_plan(1, [])
            tickets = [engine.submit(1, n, 0, x, 60) for n, x in enumerate(xs)]
            for n in order:
                out = torch.ones(xs[n].shape[0], 60)
                engine.wait(tickets[n], out, deadline_s=LONG_S, add=True)
                torch.testing.assert_close(out, 1 + rule(n, 0, xs[n], 60, None, None))
        assert engine.num_outstanding == engine.in_flight == engine.stale == 0


@every_kind
def test_answers_to_an_abandoned_step_never_reach_the_next(kind: str, tmp_path: Path) -> None:
    old, new = random_rows(100, 50), random_rows(100, 50, seed=1)
    with linked(kind, tmp_path) as (engine, serving):
        serving.gate.clear()
        engine.send_plan(1, [])
        ticket = engine.submit(1, 5, 0, old, 50)
        sent = ticket.sent
        engine.abandon()
        serving.gate.set()
        engine.send_plan(2, [])
        out = torch.zeros(100, 50)
        engine.wait(engine.submit(2, 6, 0, new, 50), out, deadline_s=LONG_S, add=True)
        torch.testing.assert_close(out, rule(6, 0, new, 50, None, None))
        assert 0 < sent == engine.stale
        with pytest.raises(LinkClosed, match="abandoned"):
            engine.wait(ticket, out, deadline_s=LONG_S, add=True)


@every_kind
def test_a_refusal_carries_the_servers_words_and_spares_the_link(kind: str, tmp_path: Path) -> None:
    x, out = random_rows(90, 50), torch.zeros(90, 50)
    with linked(kind, tmp_path) as (engine, _):
        engine.send_plan(1, [])
        with pytest.raises(LinkRefused) as caught:
            engine.wait(engine.submit(1, REFUSED_LAYER, 0, x, 50), out, deadline_s=LONG_S, add=True)
        assert caught.value.refusal.code == "adapter_failed"
        assert "as the test wants it" in caught.value.refusal.message
        assert caught.value.refusal.retryable
        engine.send_plan(2, [])
        engine.wait(engine.submit(2, 0, 0, x, 50), out, deadline_s=LONG_S, add=True)
        assert engine.is_alive


@every_kind
def test_the_plan_arrives_whole_and_before_its_calls(kind: str, tmp_path: Path) -> None:
    segments = [PlanSegment(0, 3, 5, 2**31 - 1), PlanSegment(3, 1, 0, 4)]
    trace = bytes(range(24))
    with linked(kind, tmp_path) as (engine, serving):
        engine.send_plan(9, segments, trace=trace)
        engine.wait(engine.submit(9, 0, 0, random_rows(4, 4), 4), torch.zeros(4, 4), deadline_s=LONG_S, add=True)
        plan, site = serving.calls
    assert plan.segments is not None
    assert plan.segments.tolist() == [list(s) for s in segments]
    assert (plan.header.step_id, plan.header.trace, site.header.step_id, site.header.trace) == (9, trace, 9, trace)


@every_kind
def test_many_steps_that_send_nothing_do_not_fill_the_ring(kind: str, tmp_path: Path) -> None:
    with linked(kind, tmp_path) as (engine, serving):
        for step in range(200):
            engine.send_plan(step, [PlanSegment(0, 1, 0, 1)])
        engine.wait(engine.submit(199, 0, 0, random_rows(1, 4), 4), torch.zeros(1, 4), deadline_s=LONG_S, add=True)
        assert [c.header.step_id for c in serving.calls if c.segments is not None] == list(range(200))


@every_kind
def test_a_server_that_hangs_costs_the_deadline_and_not_more(kind: str, tmp_path: Path) -> None:
    with ends(kind, tmp_path) as (engine, server):
        engine.send_plan(1, [])
        ticket = engine.submit(1, 0, 0, random_rows(4, 4), 4)
        started = time.monotonic()
        with pytest.raises(LinkTimeout):
            engine.wait(ticket, torch.zeros(4, 4), deadline_s=0.15, add=True)
        assert 0.15 <= time.monotonic() - started < 1.5
        engine.quarantine()
        assert not engine.is_alive
        with pytest.raises(LinkClosed):
            _serve_until_closed(server)
        engine.close()
        assert server.is_quarantined or kind in ("tcp", "rdma"), "a quarantine stays one when the end is then closed"


def _serve_until_closed(server: ServerEnd) -> None:
    while True:
        call = server.recv(LONG_S)
        if call is not None:
            answer(server, call)


@every_kind
def test_a_close_of_either_end_wakes_the_other(kind: str, tmp_path: Path) -> None:
    with ends(kind, tmp_path) as (engine, server):
        serving = Answering(server)
        serving.gate.clear()
        engine.send_plan(1, [])
        ticket = engine.submit(1, 0, 0, random_rows(4, 4), 4)
        closing = threading.Timer(0.05, server.close)
        closing.start()
        with pytest.raises(LinkClosed):
            engine.wait(ticket, torch.zeros(4, 4), deadline_s=LONG_S, add=True)
        closing.join()
        serving.join()
        assert not engine.is_alive


@every_kind
def test_the_engines_own_close_wakes_its_waiter(kind: str, tmp_path: Path) -> None:
    with ends(kind, tmp_path) as (engine, server):
        engine.send_plan(1, [])
        ticket = engine.submit(1, 0, 0, random_rows(4, 4), 4)
        closing = threading.Timer(0.05, engine.close)
        closing.start()
        with pytest.raises(LinkClosed):
            engine.wait(ticket, torch.zeros(4, 4), deadline_s=LONG_S, add=True)
        closing.join()
        assert not server.is_alive or kind in ("tcp", "rdma")


@every_kind
def test_an_idle_recv_returns_none_in_time(kind: str, tmp_path: Path) -> None:
    with ends(kind, tmp_path) as (_, server):
        started = time.monotonic()
        assert server.recv(0.1) is None
        assert 0.09 <= time.monotonic() - started < 1.5


def test_words_that_do_not_fit_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with linked("native-native", tmp_path) as (engine, serving):
        engine.send_plan(1, [])
        with pytest.raises(InvalidRequest, match="buffer"):
            engine.submit(1, 0, 0, random_rows(2, 2000), 4)
        with pytest.raises(InvalidRequest, match="float64"):
            engine.submit(1, 0, 0, random_rows(2, 4, dtype=torch.float64), 4)
        _wait_into_a_wrong_shape(engine)
        assert len([c for c in serving.calls if c.header.kind == Kind.SITE]) <= 1


def _wait_into_a_wrong_shape(engine: EngineEnd) -> None:
    ticket = engine.submit(1, 0, 0, random_rows(2, 4), 4)
    with pytest.raises(InvalidRequest, match="out is"):
        engine.wait(ticket, torch.zeros(2, 5), deadline_s=LONG_S, add=True)
    with pytest.raises(InvalidRequest, match="adjacent"):
        engine.wait(ticket, torch.zeros(4, 2).T, deadline_s=LONG_S, add=True)
    engine.wait(ticket, torch.zeros(2, 4), deadline_s=LONG_S, add=True)


def test_ends_in_other_dtypes_do_not_read_past_the_rows(tmp_path: Path) -> None:
    """Zero rows make a call of no chunks, which is answered at once."""
    with linked("native-native", tmp_path) as (engine, _):
        engine.send_plan(1, [])
        ticket = engine.submit(1, 0, 0, torch.zeros(0, 8), 8)
        engine.wait(ticket, torch.zeros(0, 8), deadline_s=0.01, add=True)
        assert engine.num_outstanding == 0
