"""Packed adapters with column scales, without a base model: an adapter, and factors of the test's own choice."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from infinilora.protocol import keys
from infinilora.protocol.adapter import BaseCard, Site, manifest_digest
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import BlobStore
from infinilora.weights.check import plan_adapter
from infinilora.weights.packed import write_packed
from infinilora.weights.peft import read_adapter
from infinilora.weights.plan import AdapterPlan, Dora, PartPlan, SitePlan
from infinilora.weights.synth import write_peft_adapter
from support.pools import Packed

Factors = dict[tuple[int, Site], NDArray[np.float32]]
"""Of a site: one for each column, 1 where no part scales it."""


class Scaled(Packed):
    """A packed adapter that scales the base's output; its deltas have the factors in them already."""

    def __init__(self, digest: Digest, path: Path, card: BaseCard, factors: Factors) -> None:
        super().__init__(digest, path, card)
        self.factors = factors


def pack_scaled(
    work: Path, blobs: BlobStore, card: BaseCard, *, seed: int, rank: int = 4, targets: Sequence[str] | None = None
) -> Scaled:
    """Make a random adapter whose dense parts, but for the embedding, have random factors; put it into the store."""
    source = write_peft_adapter(work / f"peft-{seed}", card, rank=rank, targets=targets, seed=seed)
    plan = plan_adapter(read_adapter(source), card)
    factors, scaled = Factors(), []
    for site in plan.sites:
        dice = np.random.default_rng([seed, site.geometry.layer, site.geometry.site])
        parts = tuple(_scaled(part, dice) if _may_scale(site) else part for part in site.parts)
        scaled.append(SitePlan(site.geometry, parts))
        factors[site.geometry.layer, site.geometry.site] = _columns(site, parts)
    path = work / f"packed-{seed}"
    with path.open("wb") as file:
        manifest = write_packed(_with_sites(plan, tuple(scaled)), file)
    digest = manifest_digest(manifest)
    blobs.put_file(keys.packed(digest), path)
    return Scaled(digest, path, card, factors)


def _may_scale(site: SitePlan) -> bool:
    return not site.geometry.num_experts and site.geometry.site is not Site.EMBED


def _scaled(part: PartPlan, dice: np.random.Generator) -> PartPlan:
    factors = dice.uniform(-2, 2, part.entry.out_dim).astype(np.float32)
    return replace(
        part, entry=msgspec.structs.replace(part.entry, has_colscale=True), dora=Dora(factors=factors, bias=None)
    )


def _columns(site: SitePlan, parts: Sequence[PartPlan]) -> NDArray[np.float32]:
    columns = np.ones(site.geometry.out_dim, np.float32)
    for part in parts:
        if part.dora is not None:
            columns[part.entry.out_offset : part.entry.out_offset + part.entry.out_dim] = part.dora.factors
    return columns


def _with_sites(plan: AdapterPlan, sites: tuple[SitePlan, ...]) -> AdapterPlan:
    return replace(plan, sites=sites)
