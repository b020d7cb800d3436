"""A LoRA backend in a few lines of plain torch, with its failures at the test's command.

Reads PEFT files by name and walks rows, experts and parts one by one: slow, obvious, and no kernel of ours.
"""

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from infinilora.engine.lora.interface import (
    AdapterRows,
    Lease,
    LeaseStatus,
    LeaseView,
    Routing,
    StepLost,
)
from infinilora.protocol.adapter import BaseCard, Site, SiteGeometry
from infinilora.protocol.errors import AdapterFailed
from infinilora.protocol.ids import Digest, digest_of

Pair = tuple[Tensor, Tensor, float]
"""A [r, in], B [out, r], scale."""


@dataclass
class PlainPlan:
    rows: list[AdapterRows]
    num_rows: int

    def adapts(self, layer: int, site: Site) -> bool:
        return any(lease.layer_sites[layer] >> site & 1 for _, _, lease in self.rows)

    def window(self, start: int, stop: int) -> "PlainPlan | None":
        of_row = {row: lease for at, count, lease in self.rows for row in range(at, at + count)}
        mine = [AdapterRows(row - start, 1, of_row[row]) for row in range(start, stop) if row in of_row]
        return PlainPlan(mine, mine[-1].row_start + 1) if mine else None


@dataclass
class PlainTicket:
    site: Site
    delta: Tensor
    digests: frozenset[Digest]


class PlainLora:
    """Adapters by digest. `status` moves a digest's lease; `lose` makes the next steps with rows of a digest fail."""

    def __init__(self, card: BaseCard, *, group: str = "plain") -> None:
        self._group = group
        self._sites = card.geometry()
        self.num_layers = card.num_layers
        self._pairs: dict[Digest, dict[str, Pair]] = {}
        self._slots: dict[Digest, int] = {}
        self._generations: Counter[Digest] = Counter()
        self._lock = threading.Lock()
        self.holders: Counter[Digest] = Counter()
        self.status: dict[Digest, LeaseStatus] = {}
        self.layers_ready: Counter[Digest] = Counter()
        """Of an ADMISSIBLE digest. What is submitted for a later layer fails the test."""
        self.lose: Counter[Digest] = Counter()
        self.lose_heads: Counter[Digest] = Counter()
        """How often the delta of lm_head of a digest will still be lost."""
        self.lose_late: Counter[Digest] = Counter()
        """How many of a digest's next calls bring no delta, which `verify` tells and `add` does not."""
        self._late: set[Digest] = set()
        self.narrows = False
        """What its leases say of its links."""
        self.begun = 0
        self.open_plans = 0
        self.submits = 0
        self.ever_wanted: list[Digest] = []

    def register(self, directory: Path) -> Digest:
        digest = digest_of(str(directory).encode())
        config = json.loads((directory / "adapter_config.json").read_text())
        tensors = load_file(directory / "adapter_model.safetensors")
        scale = config["lora_alpha"] / config["r"]
        self._pairs[digest] = {
            key.partition(".lora_")[0].removeprefix("base_model.model."): (
                tensors[key].float(),
                tensors[key.replace("_A", "_B")].float(),
                scale,
            )
            for key in tensors
            if key.endswith((".lora_A.weight", ".lora_embedding_A"))
        }
        self._slots[digest] = len(self._slots)
        self._generations[digest] = 1
        self.status[digest] = LeaseStatus.RESIDENT
        return digest

    def restage(self, digest: Digest, layers_ready: int) -> None:
        """Its slot was another's since: a new tenancy begins, which has so many layers."""
        self._generations[digest] += 1
        self.status[digest], self.layers_ready[digest] = LeaseStatus.ADMISSIBLE, layers_ready

    def want(self, digest: Digest) -> None:
        with self._lock:
            self.holders[digest] += 1
            self.ever_wanted.append(digest)

    def drop(self, digest: Digest) -> None:
        with self._lock:
            assert self.holders[digest] > 0
            self.holders[digest] -= 1

    def view(self, digest: Digest) -> LeaseView:
        status = self.status.get(digest, LeaseStatus.WAITING)
        if status is LeaseStatus.FAILED:
            return LeaseView(status, error=AdapterFailed(f"{digest} is broken, says the test"))
        ready = status in (LeaseStatus.RESIDENT, LeaseStatus.ADMISSIBLE)
        lease = self._lease(digest) if ready else None
        return LeaseView(status, lease=lease, layers_ready=self.layers_ready[digest])

    def begin(self, rows: Sequence[AdapterRows], trace: bytes = b"") -> PlainPlan | None:
        if not rows:
            return None
        self.open_plans += 1
        self.begun += 1
        for _, _, lease in rows:
            assert self.holders[lease.digest] > 0, "a step runs an adapter without a lease"
        return PlainPlan(list(rows), rows[-1].row_start + rows[-1].rows)

    def submit(
        self, plan: PlainPlan, layer: int, site: Site, x: Tensor, routing: Routing | None = None
    ) -> PlainTicket | None:
        if not plan.adapts(layer, site):
            return None
        self.submits += 1
        for _, _, lease in plan.rows:
            assert self.view(lease.digest).has_layers(layer + 1), f"layer {layer} of {lease.digest} is not there"
        geometry = self._sites[layer, site]
        delta = torch.zeros(self._out_shape(geometry, plan.num_rows, routing))
        late = {lease.digest for _, _, lease in plan.rows if self.lose_late[lease.digest] > 0}
        self.lose_late.subtract(late)
        self._late |= late
        for start, count, lease in (row for row in plan.rows if row.lease.digest not in late):
            for row in range(start, start + count):
                if site is Site.EMBED:
                    x_row = torch.nn.functional.one_hot(x[row, 0].long(), geometry.in_dim).float()
                else:
                    x_row = x[row].float()
                delta[row] = self._row(self._pairs[lease.digest], geometry, x_row, routing, row)
        return PlainTicket(site, delta, frozenset(lease.digest for _, _, lease in plan.rows))

    def add(self, ticket: PlainTicket | None, y: Tensor) -> None:
        if ticket is None:
            return
        losing = self.lose_heads if ticket.site is Site.LM_HEAD else self.lose
        for digest in ticket.digests:
            if losing[digest] > 0:
                losing[digest] -= 1
                raise StepLost(frozenset({digest}), "the test says so")
        y[: ticket.delta.shape[0]] += ticket.delta

    def verify(self) -> None:
        """Raise what was late, once: the deltas of `lose_late` were not in y when `add` returned."""
        late, self._late = self._late, set()
        if late:
            raise StepLost(frozenset(late), "the test says so, late")

    def end(self, plan: PlainPlan) -> None:
        self.open_plans -= 1

    def take_waits(self) -> dict[Site, float]:
        return {}

    def close(self) -> None:
        pass

    def check(self) -> None:
        assert self.open_plans == 0
        assert not any(self.holders.values()), f"leases leaked: {self.holders}"

    def _lease(self, digest: Digest) -> Lease:
        masks = [0] * (self.num_layers + 1)
        for (layer, site), geometry in self._sites.items():
            if any(name in self._pairs[digest] for _, name in _modules(geometry)):
                masks[layer] |= 1 << site
        slot, generation = self._slots[digest], self._generations[digest]
        return Lease(digest, self._group, slot, generation, tuple(masks), may_narrow=self.narrows)

    def _out_shape(self, geometry: SiteGeometry, rows: int, routing: Routing | None) -> tuple[int, ...]:
        if geometry.site is Site.MOE_GATE_UP:
            assert routing is not None
            return rows, routing.topk_ids.shape[1], geometry.out_dim
        return rows, geometry.out_dim

    def _row(
        self, pairs: dict[str, Pair], geometry: SiteGeometry, x: Tensor, routing: Routing | None, row: int
    ) -> Tensor:
        if not geometry.num_experts:
            return _delta(pairs, geometry, x, None)
        assert routing is not None
        ids = routing.topk_ids[row].tolist()
        if geometry.site is Site.MOE_GATE_UP:
            return torch.stack([_delta(pairs, geometry, x, e) for e in ids])
        weights = routing.topk_weights[row]
        parts = [weights[k] * _delta(pairs, geometry, x[k], e) for k, e in enumerate(ids)]
        return torch.stack(parts).sum(0)


def _delta(pairs: dict[str, Pair], geometry: SiteGeometry, x: Tensor, expert: int | None) -> Tensor:
    out = torch.zeros(geometry.out_dim)
    for part in geometry.parts:
        pair = pairs.get(part.module if expert is None else part.module.format(expert=expert))
        if pair is not None:
            a, b, scale = pair
            out[part.out_offset : part.out_offset + part.out_dim] += scale * (b @ (a @ x))
    return out


def _modules(geometry: SiteGeometry) -> Iterator[tuple[int, str]]:
    for expert in range(geometry.num_experts or 1):
        for part in geometry.parts:
            yield expert, part.module.format(expert=expert) if geometry.num_experts else part.module
