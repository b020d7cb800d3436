"""Narrow rows: the error is bounded by its formula, on the way out and back, and nobody gets them who did not ask."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinilora.link.engine_end import EngineEnd
from infinilora.link.narrow import Narrowing, is_narrow, narrowed, row_bytes, widened
from infinilora.link.open import LinkSettings, Offers, Opener, attach
from infinilora.link.server_end import ServerEnd
from support.links import Answering, random_rows
from support.loopback_fabric import loopback_fabric

SLACK = 1 + 2.0**-15
"""Scale and quotient are rounded to fp32: of 127 steps up to 127 x 2^-23 of one, where half a step is the bound."""


@given(st.integers(1, 40), st.integers(1, 70), st.integers(-30, 30), st.integers(0, 2**31))
def test_an_element_comes_back_within_its_rows_largest_over_254(rows: int, cols: int, power: int, seed: int) -> None:
    x = random_rows(rows, cols, seed=seed) * 10.0**power
    packed = narrowed(x)
    assert packed.shape == (rows, row_bytes(cols))
    back, wide = widened(packed, cols, torch.float32).double().numpy(), x.double().numpy()
    assert (np.abs(back - wide) <= SLACK * np.abs(wide).max(1, keepdims=True) / 254).all()


@pytest.mark.parametrize(("dtype", "half_step"), [(torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)])
def test_half_precision_is_rounded_once_more(dtype: torch.dtype, half_step: float) -> None:
    x = random_rows(50, 64, seed=3, dtype=dtype)
    back, wide = widened(narrowed(x), 64, dtype), x.double().numpy()
    assert back.dtype == dtype
    largest = np.abs(wide).max(1, keepdims=True)
    assert (np.abs(back.double().numpy() - wide) <= SLACK * largest * (1 / 254 + 2 * half_step)).all()


def test_zeros_stay_zeros_and_the_smallest_numbers_do_no_harm() -> None:
    x = torch.tensor([[0.0] * 17, [1e-45] * 17, [-1e-38] * 17])
    back = widened(narrowed(x), 17, torch.float32)
    assert torch.equal(back[0], x[0])
    assert back.isfinite().all()
    assert (back - x).abs().max() <= 1e-40


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_nan_altogether_and_alone(bad: float) -> None:
    x = random_rows(3, 20)
    x[1, 7] = bad
    back = widened(narrowed(x), 20, torch.float32)
    assert back[1].isnan().all()
    assert back[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("narrowing", "call", "waiting", "wanted"),
    [
        ("never", 1 << 30, 1 << 30, False),
        ("always", 1, 0, True),
        ("load", 100, 0, False),
        ("load", 101, 0, True),
        ("load", 60, 40, False),
        ("load", 60, 41, True),
        ("load", 1, 100, True),
    ],
)
def test_which_calls_go_narrow(narrowing: Narrowing, call: int, waiting: int, wanted: bool) -> None:
    assert is_narrow(narrowing, call_bytes=call, waiting_bytes=waiting, limit_bytes=100) is wanted


both_kinds = pytest.mark.parametrize("kind", ["tcp", "rdma"])


def _settings(kind: str, narrowing: Narrowing, limit_bytes: int = 0) -> LinkSettings:
    return LinkSettings(
        directory=None,
        num_buffers=4,
        buffer_bytes=8192,
        narrowing=narrowing,
        narrow_limit_bytes=limit_bytes,
        rdma=loopback_fabric() if kind == "rdma" else None,
    )


def _opened(engine: LinkSettings, *, is_server_old: bool = False) -> tuple[EngineEnd, ServerEnd, Opener]:
    opener = Opener(replace(engine, narrowing="never"))
    opening = opener.choose(Offers(engine).wire)
    assert opening.chosen["backend"] == ("rdma" if engine.rdma else "tcp")
    chosen = {k: v for k, v in opening.chosen.items() if not (is_server_old and k == "narrow")}
    with ThreadPoolExecutor(1) as pool:  # over rdma the two introduce themselves to one another
        server = pool.submit(opening.wait, 5)
        return attach(chosen, opening.secret, engine), server.result(), opener


def _multiply(server: ServerEnd, w: torch.Tensor) -> list[int]:
    """Answer the plan and one call of several chunks with x W; the payload bytes of each chunk."""
    sizes = []
    while True:
        call = server.recv(5)
        assert call is not None
        if call.x is None:
            continue
        server.reply_buffer(call).copy_(call.x @ w)
        server.reply(call)
        sizes.append(call.header.payload_bytes)
        if call.header.is_last:
            return sizes


@pytest.mark.parametrize("add", [False, True])
@both_kinds
def test_a_delta_over_a_narrow_link_is_within_the_stated_bound(kind: str, add: bool) -> None:
    engine, server, opener = _opened(_settings(kind, "always"))
    x, w, y = random_rows(50, 64, seed=1), random_rows(64, 96, seed=2), random_rows(50, 96, seed=3)
    before = y.double().numpy() * add
    engine.send_plan(1, [])
    ticket = engine.submit(1, 0, 0, x, 96)
    sizes = _multiply(server, w)
    engine.wait(ticket, y, deadline_s=5, add=add)
    exact = x.double().numpy() @ w.double().numpy()
    out = np.abs(x.double().numpy()).max(1, keepdims=True) / 254 * np.abs(w.double().numpy()).sum(0)
    back = (np.abs(exact) + out).max(1, keepdims=True) / 254
    error = np.abs(y.double().numpy() - before - exact)
    assert (error <= SLACK * (out + back) + 1e-4).all(), "1e-4: the product itself is fp32"
    assert error.max() > 1e-3, "it did go narrow"
    assert sum(sizes) == 50 * (4 + 64)
    for end in (engine, server, opener):
        end.close()


@both_kinds
def test_routes_and_rows_too_narrow_to_shrink_travel_as_they_are(kind: str) -> None:
    engine, server, opener = _opened(_settings(kind, "always"))
    serving = Answering(server)
    engine.send_plan(1, [])
    thin, out = random_rows(3, 8), torch.zeros(3, 8)
    engine.wait(engine.submit(1, 0, 0, thin, 8), out, deadline_s=5, add=False)
    assert torch.equal(out, thin)
    x, ids, wide = torch.ones(5, 18), torch.arange(10, dtype=torch.int32).view(5, 2), torch.zeros(5, 18)
    weights = torch.full((5, 2), 0.5)
    engine.wait(engine.submit(1, 0, 0, x, 18, topk_ids=ids, topk_weights=weights), wide, deadline_s=5, add=False)
    torch.testing.assert_close(wide, x + ids.sum(1, keepdim=True) + 1)
    sites = [call.header for call in serving.calls[1:]]
    assert [header.is_narrow for header in sites] == [False, True]
    engine.close()
    serving.join()
    opener.close()


@both_kinds
def test_under_load_a_small_call_is_exact_and_a_large_one_narrow_ticket_by_ticket(kind: str) -> None:
    engine, server, opener = _opened(_settings(kind, "load", limit_bytes=3 * 32 * 8))
    serving = Answering(server)
    small, large = random_rows(3, 32), random_rows(4, 32)
    out, other = torch.zeros(3, 32), torch.zeros(4, 32)
    engine.send_plan(1, [])
    engine.wait(engine.submit(1, 0, 0, small, 32), out, deadline_s=5, add=False)
    assert torch.equal(out, small)
    first, second = engine.submit(1, 0, 0, small, 32), engine.submit(1, 0, 0, small, 32)
    for ticket in (first, second):
        engine.wait(ticket, out, deadline_s=5, add=False)
    engine.wait(engine.submit(1, 0, 0, large, 32), other, deadline_s=5, add=False)
    assert not torch.equal(other, large)
    sites = [call.header for call in serving.calls[1:]]
    assert [header.is_narrow for header in sites] == [False, False, True, True]
    engine.close()
    serving.join()
    opener.close()


@pytest.mark.parametrize(("asked", "is_server_old"), [("never", False), ("always", True)])
@both_kinds
def test_who_did_not_ask_or_has_an_older_server_gets_exact_numbers(
    kind: str, asked: Narrowing, is_server_old: bool
) -> None:
    engine, server, opener = _opened(_settings(kind, asked), is_server_old=is_server_old)
    serving = Answering(server)
    x, out = random_rows(20, 64), torch.zeros(20, 64)
    engine.send_plan(1, [])
    engine.wait(engine.submit(1, 0, 0, x, 64), out, deadline_s=5, add=False)
    assert torch.equal(out, x)
    assert engine.narrowing == "never"
    engine.close()
    serving.join()
    opener.close()


def test_shm_is_exact_whatever_is_asked(tmp_path: Path) -> None:
    settings = LinkSettings(directory=tmp_path, num_buffers=4, buffer_bytes=8192, narrowing="always")
    offers, opener = Offers(settings), Opener(settings)
    opening = opener.choose(offers.wire)
    assert opening.chosen["backend"] == "shm"
    engine = attach(opening.chosen, opening.secret, settings)
    assert engine.narrowing == "never"
    opening.wait(5).close()
    engine.close()
    offers.close()
    opener.close()
