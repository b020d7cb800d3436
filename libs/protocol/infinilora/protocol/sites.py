"""Sets of sites as masks: what an engine computes, and whether an adapter needs more. Bit s is site s."""

from collections.abc import Iterable, Sequence

from infinilora.protocol.adapter import Site

UNNAMED_SITES = (1 << Site.LM_HEAD) - 1
"""The sites of an engine that does not say which it computes, as a mask: those that there were before it could."""


def site_mask(sites: Iterable[Site]) -> int:
    """The mask of these sites."""
    return sum(1 << site for site in set(sites))


def first_beyond(layer_sites: Sequence[int], computed: int) -> tuple[int, Site] | None:
    """The first (layer, site) of an adapter's masks that is not in the mask `computed`; None: all of it is."""
    for layer, mask in enumerate(layer_sites):
        if beyond := mask & ~computed:
            return layer, Site((beyond & -beyond).bit_length() - 1)
    return None
