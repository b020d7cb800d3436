"""What a buffer of a link must hold at the least: one row of the widest site of a base, and a step's plan. Pure."""

from collections.abc import Iterable

from infinilora.link.frame import ALIGN
from infinilora.protocol.adapter import MOE_SITES, Site, SiteGeometry

SEGMENT_BYTES = 16
"""Of each adapter in a plan: four int32."""
CHOICE_BYTES = 8
"""Of each expert of a row: its id and its weight."""


def least_buffer_bytes(sites: Iterable[SiteGeometry], *, width: int, choices: int = 1, segments: int = 1) -> int:
    """`width`: bytes of a number of the activations. `choices`: experts of a row. `segments`: adapters of a step."""
    rows = [max(row_bytes(site, width=width, choices=choices)) for site in sites]
    return max([segments * SEGMENT_BYTES, *rows])


def row_bytes(site: SiteGeometry, *, width: int, choices: int) -> tuple[int, int]:
    """Of one row of a site: what is sent, and what comes back. What is cut into columns to fit counts as nothing."""
    sent, back = width * site.in_dim, width * site.out_dim
    if site.site == Site.EMBED:
        return CHOICE_BYTES + ALIGN, back
    if site.site == Site.LM_HEAD:
        return sent, 0
    if site.site not in MOE_SITES:
        return sent, back
    # Where experts are cut into columns, a row says beside its choices which of the step's it is.
    chosen = CHOICE_BYTES * (choices + 1) + ALIGN
    if site.site == Site.MOE_DOWN:
        return sent * choices + chosen, back
    return sent + chosen, back * choices
