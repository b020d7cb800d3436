"""How a site call of an engine's shard becomes tickets: one for all its runs of columns, where the server takes it."""

from pathlib import Path

import pytest

from infinilora.engine.lora.calls import _tickets
from infinilora.link.frame import Header, Kind, Run
from infinilora.pool.slices import WHOLE, SiteSlice
from infinilora.protocol.adapter import Site
from support.links import linked

QKV: list[Run] = [(0, 40), (60, 65), (75, 100)]


def runs_of_tickets(tmp_path: Path, cut: SiteSlice, *, takes_runs: bool, site: Site = Site.QKV) -> list[list[Run]]:
    with linked("tcp", tmp_path, buffer_bytes=512) as (engine, _):
        engine.takes_runs = takes_runs
        shape = Header(Kind.SITE, site=site, rows=3, in_cols=24, out_cols=200 if site is Site.LM_HEAD else 100)
        tickets = _tickets(engine, shape, 0, cut)
    at = 0
    for ticket in tickets:
        assert ticket.out_at == at
        at += ticket.header.out_cols
    return [list(ticket.header.runs) for ticket in tickets]


def test_all_runs_of_a_site_are_one_call(tmp_path: Path) -> None:
    assert runs_of_tickets(tmp_path, SiteSlice(outputs=tuple(QKV)), takes_runs=True) == [QKV]
    assert runs_of_tickets(tmp_path, WHOLE, takes_runs=True) == [[]]


@pytest.mark.parametrize(
    ("runs", "takes_runs"),
    [
        (QKV, False),
        ([(0, 10), (20, 30), (40, 50), (60, 70)], True),
        ([(0, 70), (80, 140)], True),
    ],
    ids=["an older server", "more than a header holds", "more than a buffer holds"],
)
def test_runs_that_cannot_come_together_are_a_call_each(tmp_path: Path, runs: list[Run], *, takes_runs: bool) -> None:
    found = runs_of_tickets(tmp_path, SiteSlice(outputs=tuple(runs)), takes_runs=takes_runs)
    assert found == [[run] for run in runs]


def test_a_row_of_lm_head_comes_in_calls_that_fit_a_buffer(tmp_path: Path) -> None:
    assert runs_of_tickets(tmp_path, WHOLE, takes_runs=True, site=Site.LM_HEAD) == [[(0, 100)], [(100, 200)]]
