"""What a step adds over a narrow link is the adapters' own, within the bound that docs/links.md states."""

from pathlib import Path

import numpy as np
import pytest
import torch

from infinilora.protocol.adapter import MOE_SITES, Site
from support.every_site import CARDS, COUNTS, Case, every_site, factors, inputs, living, make_case, outputs, wanted
from support.loopback_fabric import LoopbackTransport, loopback_fabrics
from support.lora_inside import remote

NOT_DENSE = MOE_SITES | {Site.EMBED}


@pytest.fixture(params=sorted(CARDS))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return make_case(request.param, tmp_path)


@pytest.mark.parametrize("kind", ["tcp", "rdma"])
async def test_dense_deltas_over_a_narrow_link_are_within_the_stated_bound(case: Case, kind: str) -> None:
    """Of every adapter's W, which is what its definition makes of the unit matrix."""
    fabrics = loopback_fabrics(LoopbackTransport, LoopbackTransport) if kind == "rdma" else ()
    async with living() as service, remote(case, service, kind, narrowing="always", fabrics=fabrics) as lora:
        seen = await every_site(lora, case)
    worst = 0.0
    for geometry in case.card.sites:
        layer, site = geometry.layer, geometry.site
        if site in NOT_DENSE:
            continue
        (x, routing), before, at = inputs(case, site, geometry.in_dim), outputs(site, geometry.out_dim), 0
        assert routing is None
        y = seen[layer, site].double().numpy()
        for packed, count in zip(case.adapters, COUNTS, strict=True):
            rows = slice(at, at + count)
            delta = wanted(packed, layer, site, x[rows], None)
            w = wanted(packed, layer, site, torch.eye(geometry.in_dim), None)
            error = np.abs(y[rows] - before[rows].double().numpy() * factors(packed, layer, site) - delta)
            out = np.abs(x[rows].double().numpy()).max(1, keepdims=True) / 254 * np.abs(w).sum(0)
            back = (np.abs(delta) + out).max(1, keepdims=True, initial=0.0) / 254
            assert (error <= 1.001 * (out + back) + 5e-4).all(), f"{layer} {site.label}"
            worst, at = max(worst, float(error.max(initial=0.0))), at + count
        assert torch.equal(seen[layer, site][at:], before[at:]), "base rows get nothing"
    assert worst > 1e-3, "they did travel narrow"
