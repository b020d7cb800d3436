"""What a step adds at every site of a base, asked of any back-end, and the definition in float64 to hold it against."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from infinilora.engine.lora.interface import AdapterRows, LeaseStatus, LoraBackend, Routing
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.pool.pool import AdapterPool, PoolConfig
from infinilora.pool.share import Share
from infinilora.protocol.adapter import MOE_SITES, BaseCard, Site
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import BlobStore, DirectoryBlobs
from infinilora.runtime.service import Service
from support.biased import pack_biased
from support.cards import make_card, tiny_cards
from support.pools import Packed, pack, pack_some_experts
from support.scaled import Scaled, pack_scaled
from support.waiting import eventually

COUNTS = (3, 40, 1, 5)
BASE_ROWS = 2
TOPK = 2


@dataclass
class Case:
    """A family, adapters of several ranks and targets, and where their packed files are."""

    card: BaseCard
    blobs: BlobStore
    adapters: list[Packed]
    work: Path

    def placed(self, *groups: str) -> dict[Digest, tuple[str, ...]]:
        """The adapters, dealt round these groups."""
        return {packed.digest: (groups[i % len(groups)],) for i, packed in enumerate(self.adapters)}

    def pool(self, name: str, share: Share | None = None, *, host_bytes: int = 0) -> AdapterPool:
        config = PoolConfig(
            base=self.card.fingerprint,
            num_layers=self.card.num_layers,
            capacity_bytes=8 << 20,
            num_slots=8,
            cache_dir=self.work / name,
            cache_bytes=8 << 20,
            host_bytes=host_bytes,
            share=share,
        )
        kernels = SlotKernels(num_slots=8, num_layers=self.card.num_layers + 1)
        return AdapterPool(config, self.blobs, kernels, on_death=_die)


def _die(error: BaseException) -> None:
    raise error


_EVERYTHING = make_card(
    "qwen2_moe", num_layers=4, num_experts=5, intermediate=24, shared_intermediate=40, vocab_size=5000, outer=True
)
CARDS = (
    tiny_cards()
    | {"everything": _EVERYTHING, "deep": make_card("llama", num_layers=5)}
    | {"outer": make_card("llama", num_layers=1, vocab_size=5000, outer=True)}
)
"""A row of a vocabulary of 5,000 takes 20,000 bytes, more than a buffer of these links."""
OUTER = ["q_proj", "embed_tokens", "lm_head"]


def make_case(name: str, work: Path, blobs: BlobStore | None = None) -> Case:
    """Adapters of that family, packed into a store below `work` or into another one."""
    card, blobs, tmp_path = CARDS[name], blobs or DirectoryBlobs(work / "store"), work
    attention = ["q_proj", "v_proj"]
    if name == "everything":
        whole = sorted({part.module.rpartition(".")[2] for site in card.sites for part in site.parts})
        adapters = [
            pack(tmp_path, blobs, card, seed=11, rank=3, targets=whole),
            pack_some_experts(tmp_path, blobs, card, seed=12, rank=8, without=(1, 4)),
            pack_biased(tmp_path, blobs, card, seed=13, rank=4, targets=["q_proj", "v_proj", "o_proj"]),
            pack_scaled(tmp_path, blobs, card, seed=14, rank=5, targets=[w for w in whole if w != "embed_tokens"]),
        ]
        return Case(card, blobs, adapters, tmp_path)
    if name == "outer":
        targets = [OUTER, attention, OUTER]
        adapters = [pack(tmp_path, blobs, card, seed=i, rank=3 + i, targets=t) for i, t in enumerate(targets)]
        adapters.append(pack_scaled(tmp_path, blobs, card, seed=9, rank=2, targets=["k_proj", "lm_head"]))
        return Case(card, blobs, adapters, tmp_path)
    adapters = [
        pack(tmp_path, blobs, card, seed=1, rank=4),
        pack(tmp_path, blobs, card, seed=2, rank=16, targets=attention),
        pack(tmp_path, blobs, card, seed=3, rank=8, dtype="BF16"),
        pack_scaled(tmp_path, blobs, card, seed=4, rank=5),
    ]
    return Case(card, blobs, adapters, tmp_path)


def is_idle(pool: AdapterPool) -> bool:
    """A load that has told its last layer takes a moment more to end."""
    try:
        pool.check_idle()
    except AssertionError:
        return False
    return True


def is_resident(lora: LoraBackend, digest: Digest) -> bool:
    return lora.view(digest).status is LeaseStatus.RESIDENT


async def rows_of(lora: LoraBackend, case: Case) -> list[AdapterRows]:
    rows, at = [], 0
    for packed, count in zip(case.adapters, COUNTS, strict=True):
        lora.want(packed.digest)
        digest = packed.digest
        await eventually(partial(is_resident, lora, digest), "the adapter is resident")
        lease = lora.view(digest).lease
        assert lease is not None
        rows.append(AdapterRows(at, count, lease))
        at += count
    # As the runner orders them: by slot. Here slots follow the order of arrival.
    return rows


def inputs(case: Case, site: Site, in_dim: int) -> tuple[Tensor, Routing | None]:
    rows = sum(COUNTS) + BASE_ROWS
    dice = torch.Generator().manual_seed(int(site))
    if site is Site.EMBED:
        return torch.randint(0, in_dim, (rows, 1), generator=dice, dtype=torch.int32), None
    if site not in MOE_SITES:
        return torch.randn(rows, in_dim, generator=dice), None
    experts = next(s.num_experts for s in case.card.sites if s.site == site)
    ids = torch.rand(rows, experts, generator=dice).argsort(1)[:, :TOPK].to(torch.int32)
    routing = Routing(ids, torch.rand(rows, TOPK, generator=dice))
    shape = (rows, TOPK, in_dim) if site is Site.MOE_DOWN else (rows, in_dim)
    return torch.randn(*shape, generator=dice), routing


def outputs(site: Site, out_dim: int) -> Tensor:
    """What the base has computed of a site when deltas are added."""
    shape = (sum(COUNTS) + BASE_ROWS, *((TOPK,) if site is Site.MOE_GATE_UP else ()), out_dim)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(out_dim))


def factors(packed: Packed, layer: int, site: Site) -> np.ndarray | float:
    return packed.factors.get((layer, site), 1.0) if isinstance(packed, Scaled) else 1.0


def wanted(packed: Packed, layer: int, site: Site, x: Tensor, routing: Routing | None) -> np.ndarray:
    """The definition, in float64."""
    if site is Site.EMBED:
        x = torch.nn.functional.one_hot(x[:, 0].long(), packed.card.vocab_size).float()
    if routing is None:
        return packed.delta(layer, site, x.numpy())
    parts = packed.card.geometry()[layer, site].parts
    rows = []
    for t in range(x.shape[0]):
        outs = []
        for j, expert in enumerate(routing.topk_ids[t].tolist()):
            row = (x[t, j] if site is Site.MOE_DOWN else x[t]).double().numpy()
            none = [np.zeros((p.out_dim, row.shape[0])) for p in parts]
            named = [
                packed.deltas.get(p.module.replace("{expert}", str(expert)), z)
                for p, z in zip(parts, none, strict=True)
            ]
            outs.append(np.concatenate(named) @ row)
        weights = routing.topk_weights[t].double().numpy()
        rows.append(weights @ np.stack(outs) if site is Site.MOE_DOWN else np.stack(outs))
    return np.stack(rows)


async def every_site(
    lora: LoraBackend,
    case: Case,
    *,
    groups: list[str] | None = None,
    cut: int = 0,
) -> dict[tuple[int, Site], Tensor]:
    """Run each site of each layer once as one step: what became of `outputs`. `groups`: who computes what.

    With `cut`, the rows before and from there on are two calls that are under way at one time.
    """
    rows = await rows_of(lora, case)
    assert groups in (None, [segment.lease.group for segment in rows])
    plan = lora.begin(rows)
    assert plan is not None
    seen: dict[tuple[int, Site], Tensor] = {}
    total = sum(COUNTS) + BASE_ROWS
    windows = {(0, cut): plan.window(0, cut), (cut, total): plan.window(cut, total)} if cut else {(0, total): plan}
    for geometry in case.card.sites:
        layer, site = geometry.layer, geometry.site
        x, routing = inputs(case, site, geometry.in_dim)
        y = outputs(site, geometry.out_dim)
        tickets = []
        for (start, stop), window in windows.items():
            at = slice(start, stop)
            part = None if routing is None else Routing(routing.topk_ids[at], routing.topk_weights[at])
            tickets.append((None if window is None else lora.submit(window, layer, site, x[at], part), y[at]))
        for ticket, out in tickets:
            await asyncio.to_thread(lora.add, ticket, out)
        seen[layer, site] = y
    lora.end(plan)
    for packed in case.adapters:
        lora.drop(packed.digest)
    if groups is None:
        lora.check()
    return seen


def is_right(
    case: Case, layer: int, site: Site, y: Tensor, *, given: tuple[Tensor, Routing | None] | None = None
) -> None:
    """Whether y is `outputs` with the adapters' deltas of `inputs`, or of what was `given`, and nothing else."""
    x, routing = given or inputs(case, site, case.card.geometry()[layer, site].in_dim)
    before, at = outputs(site, case.card.geometry()[layer, site].out_dim), 0
    for packed, count in zip(case.adapters, COUNTS, strict=True):
        rows = slice(at, at + count)
        part = None if routing is None else Routing(routing.topk_ids[rows], routing.topk_weights[rows])
        scaled = before[rows].double().numpy() * factors(packed, layer, site)
        found = y[rows].double().numpy() - scaled
        delta = wanted(packed, layer, site, x[rows], part)
        np.testing.assert_allclose(found, delta, rtol=5e-4, atol=5e-5, err_msg=f"{layer} {site.label}")
        at += count
    assert torch.equal(y[at:], before[at:]), "base rows get nothing"


@asynccontextmanager
async def living() -> AsyncIterator[Service]:
    """A service without its process: `live` would end this one by its watchdog."""
    service = Service("test")
    async with service._group:
        yield service
        for task in service._tasks:
            task.cancel()
