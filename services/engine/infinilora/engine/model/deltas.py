"""The LoRA interface bound to one step, as the layers use it: submit, base product, add."""

from typing import Protocol

import torch
from torch import Tensor

from infinilora.engine.lora.interface import LoraBackend, Routing, StepPlan, Ticket
from infinilora.engine.model.ops import Linear
from infinilora.protocol.adapter import Site


class Deltas(Protocol):
    """What a layer may ask of LoRA."""

    def linear(self, layer: int, site: Site, x: Tensor, weight: Linear) -> Tensor:
        """Weight(x) with the site's delta added; the delta is on its way while the product runs."""
        ...

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Rows table[token_ids] [T, h], with the embedding's delta added."""
        ...

    def submit(self, layer: int, site: Site, x: Tensor, routing: Routing) -> Ticket | None: ...

    def add(self, ticket: Ticket | None, y: Tensor) -> None: ...


class NoDeltas:
    """A step of base rows only: the products and nothing else."""

    def linear(self, layer: int, site: Site, x: Tensor, weight: Linear) -> Tensor:  # noqa: ARG002
        return weight(x)

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return table[token_ids]

    def submit(self, layer: int, site: Site, x: Tensor, routing: Routing) -> Ticket | None:  # noqa: ARG002
        return None

    def add(self, ticket: Ticket | None, y: Tensor) -> None:
        pass


class LoraDeltas:
    """A step with a plan."""

    def __init__(self, lora: LoraBackend, plan: StepPlan) -> None:
        self._lora = lora
        self._plan = plan

    def linear(self, layer: int, site: Site, x: Tensor, weight: Linear) -> Tensor:
        ticket = self._lora.submit(self._plan, layer, site, x)
        y = weight(x)
        self._lora.add(ticket, y)
        return y

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        y = table[token_ids]
        if self._plan.adapts(0, Site.EMBED):
            ids = token_ids.to(torch.int32)[:, None]
            self._lora.add(self._lora.submit(self._plan, 0, Site.EMBED, ids), y)
        return y

    def submit(self, layer: int, site: Site, x: Tensor, routing: Routing) -> Ticket | None:
        return self._lora.submit(self._plan, layer, site, x, routing)

    def add(self, ticket: Ticket | None, y: Tensor) -> None:
        self._lora.add(ticket, y)
