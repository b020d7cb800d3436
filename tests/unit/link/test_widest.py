"""The least that a link's buffers must hold is what its ends find when they lay a call out."""

import pytest

from infinilora.link.frame import rows_that_fit
from infinilora.link.widest import least_buffer_bytes, row_bytes
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import InvalidRequest
from support.cards import make_card

DENSE = make_card("llama", num_layers=2, outer=True)
EXPERTS = make_card("qwen3_moe", num_layers=2, num_experts=4, intermediate=24)
CHOICES = 3


def test_a_row_of_any_site_fits_the_least_buffer_and_the_widest_nothing_less() -> None:
    for card in (DENSE, EXPERTS):
        least = least_buffer_bytes(card.sites, width=4, choices=CHOICES)
        rows = [row_bytes(site, width=4, choices=CHOICES) for site in card.sites]
        for sent, back in rows:
            assert rows_that_fit(sent, back, least, has_gap=False) >= 1
        sent, back = max(rows, key=max)
        with pytest.raises(InvalidRequest, match="a link buffer holds"):
            rows_that_fit(sent, back, least - 1, has_gap=False)


@pytest.mark.parametrize("topk", [CHOICES, CHOICES + 1], ids=["whole", "columns"])
def test_the_choices_of_a_row_are_counted_with_what_says_whose_row_it_is(topk: int) -> None:
    """As `EngineEnd.prepare` counts: x, an id and a weight for each choice, and the gap before them."""
    site = next(s for s in EXPERTS.sites if s.site == Site.MOE_DOWN)
    least = least_buffer_bytes([site], width=4, choices=CHOICES)
    asked = 4 * site.in_dim * CHOICES + 8 * topk
    assert rows_that_fit(asked, 4 * site.out_dim, least, has_gap=True) == 1


def test_a_head_that_is_wider_than_a_buffer_is_cut_and_counts_as_what_is_sent() -> None:
    head = next(s for s in DENSE.sites if s.site == Site.LM_HEAD)
    assert head.out_dim > head.in_dim
    assert least_buffer_bytes([head], width=2) == 2 * head.in_dim


def test_a_plan_of_as_many_adapters_as_a_step_may_have_fits() -> None:
    assert least_buffer_bytes(DENSE.sites, width=4, segments=100_000) == 1_600_000
