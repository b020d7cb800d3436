"""Which adapters an engine computes itself when it has a little memory for some. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from infinilora.protocol.ids import Digest

ADVANTAGE = 1.5
"""Whoever is in stays until another is so many times as hot: a load costs more than a site call over the link."""


@dataclass(frozen=True, slots=True)
class Warmth:
    """What the choice may know of an adapter: `heat`, its decayed requests per second; `num_bytes` None: not known."""

    digest: Digest
    heat: float
    num_bytes: int | None = None


def choose_hottest(
    adapters: Collection[Warmth], current: Collection[Digest], *, capacity_bytes: int, least_heat: float
) -> frozenset[Digest]:
    """Greedily by heat, those of `current` with their advantage, as long as they fit; a newcomer has `least_heat`.

    Whose size is unknown counts as the average of the known, or an eighth of the capacity where none is: it is learned
    soon, and the choice made again.
    """
    known = [a.num_bytes for a in adapters if a.num_bytes is not None]
    usual_bytes = sum(known) // len(known) if known else capacity_bytes // 8
    stays = frozenset(current)
    ranked = sorted(adapters, key=lambda a: (-a.heat * (ADVANTAGE if a.digest in stays else 1.0), a.digest))
    chosen: list[Digest] = []
    left_bytes = capacity_bytes
    for adapter in ranked:
        wanted = usual_bytes if adapter.num_bytes is None else adapter.num_bytes
        if wanted <= left_bytes and (adapter.heat >= least_heat or adapter.digest in stays):
            chosen.append(adapter.digest)
            left_bytes -= wanted
    return frozenset(chosen)


def heats_of(scores: Mapping[Digest, float], sizes: Mapping[Digest, int]) -> list[Warmth]:
    """The adapters of `scores` with what is known of their sizes."""
    return [Warmth(digest, heat, sizes.get(digest)) for digest, heat in scores.items()]
