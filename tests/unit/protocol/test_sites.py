"""Masks of sites: what an adapter needs beyond what an engine computes."""

import pytest

from infinilora.protocol.adapter import Site
from infinilora.protocol.sites import UNNAMED_SITES, first_beyond, site_mask


def test_an_engine_that_names_no_sites_computes_the_first_nine() -> None:
    first = [Site.QKV, Site.O, Site.GATE_UP, Site.DOWN, Site.MOE_GATE_UP, Site.MOE_DOWN]
    assert site_mask([*first, Site.SHARED_GATE_UP, Site.SHARED_DOWN, Site.ROUTER]) == UNNAMED_SITES


@pytest.mark.parametrize(
    ("masks", "beyond"),
    [
        ((), None),
        ((0, UNNAMED_SITES, 0), None),
        ((1, 1 << Site.SHARED_GATE | 1 << Site.EMBED), (1, Site.EMBED)),
        ((0, 0, 1 << Site.LM_HEAD), (2, Site.LM_HEAD)),
        ((1 << Site.SHARED_GATE, 1 << Site.LM_HEAD), (0, Site.SHARED_GATE)),
    ],
)
def test_the_first_site_beyond_is_named(masks: tuple[int, ...], beyond: tuple[int, Site] | None) -> None:
    assert first_beyond(masks, UNNAMED_SITES) == beyond
    assert first_beyond(masks, site_mask(Site)) is None
