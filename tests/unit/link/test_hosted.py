"""An engine's end for activations on a device over links of host memory. The device here is this machine's own memory:
what is shown is that rows are taken as they are sent, and that a delta joins the rows and columns that are its own.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infinilora.link.engine_end import EngineEnd
from infinilora.link.frame import Header, Kind
from infinilora.link.hosted import HostedEnd
from infinilora.link.open import LinkSettings, Offers, Opener, attach
from support.links import Answering, random_rows, rule

LONG_S = 10.0


@pytest.fixture(params=["shm", "tcp"])
def end(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineEnd]:
    directory = tmp_path if request.param == "shm" else None
    settings = LinkSettings(directory=directory, num_buffers=4, buffer_bytes=4096, is_on_device=True)
    offers, opener = Offers(settings), Opener(settings)
    opening = opener.choose(offers.wire)
    assert opening.chosen["backend"] == request.param
    end = attach(opening.chosen, opening.secret, settings)
    serving = Answering(opening.wait(5))
    end.send_plan(1, [])
    yield end
    end.close()
    serving.join()
    offers.close()
    opener.close()


def test_what_is_sent_is_what_x_was_and_the_delta_joins_where_out_lies(end: EngineEnd) -> None:
    assert isinstance(end, HostedEnd)
    x, wide = random_rows(60, 100), random_rows(60, 90, seed=1)
    wanted = wide.clone()
    wanted[:, 5:75] += rule(0, 0, x, 70, None, None)
    ticket = end.submit(1, 0, 0, x, 70)
    assert ticket.sent < ticket.chunks, "the rest is sent while it is waited for"
    x.fill_(torch.nan)
    end.wait(ticket, wide[:, 5:75], deadline_s=LONG_S, add=True)
    torch.testing.assert_close(wide, wanted)


def test_rows_and_columns_of_other_calls_are_left_alone(end: EngineEnd) -> None:
    """Three calls of one step: some rows, then two runs of columns of the same rows."""
    x, y = random_rows(9, 24), torch.zeros(9, 40)
    some = end.prepare(Header(Kind.SITE, site=2, rows=4, in_cols=24, out_cols=40), at=1)
    runs = [
        end.prepare(Header(Kind.SITE, site=3, rows=3, in_cols=24).asking([(first, first + 20)]), at=6, out_at=first)
        for first in (0, 20)
    ]
    for ticket in (some, *runs):
        end.send(ticket, 1, 0, x)
    for ticket in (some, *runs):
        end.wait(ticket, y, deadline_s=LONG_S, add=True)
    assert not y[0].any()
    assert not y[5].any()
    torch.testing.assert_close(y[1:5], rule(0, 2, x[1:5], 40, None, None))
    torch.testing.assert_close(y[6:], rule(0, 3, x[6:], 20, None, None).repeat(1, 2))


def test_experts_and_their_weights_go_with_their_rows(end: EngineEnd) -> None:
    ids = torch.randint(0, 8, (9, 3), generator=torch.Generator().manual_seed(3))
    weights, x, out = random_rows(9, 3, seed=4), random_rows(9, 24), torch.full((9, 3, 5), torch.nan)
    ticket = end.submit(1, 4, 5, x, 15, topk_ids=ids, topk_weights=weights)
    wanted = rule(4, 5, x, 15, ids, weights)
    for sent in (ids, weights):
        sent.zero_()
    end.wait(ticket, out, deadline_s=LONG_S, add=False)
    torch.testing.assert_close(out.flatten(1), wanted)
