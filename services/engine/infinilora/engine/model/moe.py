"""A mixture-of-experts block: route, gather rows by expert, two products an expert, weighted sum.

The (token, choice) pairs are sorted by expert once; each expert sees its rows as one slice. The deltas of gate
and up arrive before the non-linearity, that of down already weighted and summed (see lora/interface.py).

A shard of an engine runs the pairs of its own experts; what the block returns is then a part of the sum. Which experts
a row goes to the head alone decides: two shards that differ by a rounding would count one twice, or never.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from infinilora.engine.lora.interface import Routing
from infinilora.engine.model.deltas import Deltas, Turns
from infinilora.engine.model.ops import Linear, Ops
from infinilora.engine.model.shards import Shards
from infinilora.engine.model.weights import MoeWeights
from infinilora.protocol.adapter import Site

NO_EXPERT = -1
"""A choice that is another shard's: LoRA back-ends add nothing for it."""


def moe_block(layer: int, moe: MoeWeights, x: Tensor, ops: Ops, deltas: Deltas, shards: Shards) -> Turns[Tensor]:
    """y[t] = sum_k w[t, k] * expert[id[t, k]](x[t]) (+ sigmoid(g(x[t])) * shared(x[t])); x [T, h] -> [T, h].

    On a shard, the terms of its own experts, and of its columns of the shared one.
    """
    chosen = yield from _routing(layer, moe, x, deltas, shards)
    routing, places = _own(chosen, moe)
    groups = ExpertGroups(places, len(moe.experts))
    k = places.shape[1]

    ticket = deltas.submit(layer, Site.MOE_GATE_UP, x, routing)
    width = 2 * moe.spec.expert_dim
    gate_up = groups.apply([e.gate_up for e in moe.experts], x[groups.tokens], width=width).view(x.shape[0], k, width)
    yield from deltas.add(layer, Site.MOE_GATE_UP, ticket, gate_up)

    act = ops.silu_mul(gate_up.flatten(0, 1))
    ticket = deltas.submit(layer, Site.MOE_DOWN, act.view(x.shape[0], k, -1), routing)
    down = groups.apply([e.down for e in moe.experts], act[groups.order], width=x.shape[1]).view(x.shape[0], k, -1)
    y = torch.bmm(routing.topk_weights.to(x.dtype)[:, None], down)[:, 0]
    yield from deltas.add(layer, Site.MOE_DOWN, ticket, y)

    if moe.shared is not None and moe.shared_gate is not None:
        shared = ops.silu_mul((yield from deltas.linear(layer, Site.SHARED_GATE_UP, x, moe.shared.gate_up)))
        gate = yield from deltas.linear(layer, Site.SHARED_GATE, x, moe.shared_gate)
        y += torch.sigmoid(gate) * (yield from deltas.linear(layer, Site.SHARED_DOWN, shared, moe.shared.down))
    return y


def _routing(layer: int, moe: MoeWeights, x: Tensor, deltas: Deltas, shards: Shards) -> Turns[Routing]:
    """The head's choice for all shards: ids and the bits of the weights go as one tensor."""
    if moe.router is None:
        chosen = torch.empty(2, x.shape[0], moe.spec.top_k, dtype=torch.int32, device=x.device)
        shards.share(chosen)
        return Routing(topk_ids=chosen[0], topk_weights=chosen[1].view(torch.float32))
    routing = route((yield from deltas.linear(layer, Site.ROUTER, x, moe.router)), moe)
    if shards.cut.num_shards > 1:
        shards.share(torch.stack((routing.topk_ids, routing.topk_weights.view(torch.int32))))
    return routing


class _Own(NamedTuple):
    """The routing with NO_EXPERT for what is another shard's; each choice's place among our experts, or one beyond."""

    routing: Routing
    places: Tensor


def _own(routing: Routing, moe: MoeWeights) -> _Own:
    ids, held = routing.topk_ids, len(moe.experts)
    if held == moe.spec.num_experts:
        return _Own(routing, ids)
    places = ids - moe.first_expert
    is_own = (places >= 0) & (places < held)
    own_ids = torch.where(is_own, ids, NO_EXPERT)
    return _Own(Routing(own_ids, routing.topk_weights), torch.where(is_own, places, held))


def route(logits: Tensor, moe: MoeWeights) -> Routing:
    """Softmax over all experts in fp32, then the top k, whose weights are renormalised where the model does."""
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(moe.spec.top_k, dim=-1)
    if moe.spec.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(topk_ids=ids.to(torch.int32), topk_weights=weights)


class ExpertGroups:
    """The pairs of a step that have an expert here, sorted by it: `order` lists pairs, `tokens` their rows.

    places [T, k]: which of `num_experts`; that number itself for a pair that has none here, and gets zeros.
    """

    def __init__(self, places: Tensor, num_experts: int) -> None:
        flat = places.flatten()
        self._num_pairs = len(flat)
        self._counts: list[int] = torch.bincount(flat, minlength=num_experts).tolist()[:num_experts]
        self.order = flat.argsort(stable=True)[: sum(self._counts)]
        self.tokens = self.order // places.shape[1]

    def apply(self, experts: list[Linear], x_sorted: Tensor, *, width: int) -> Tensor:
        """Run each expert on its slice of x_sorted [pairs here, in] -> [T * k, width], in the order of pairs."""
        pieces, at = [], 0
        for expert, count in zip(experts, self._counts, strict=True):
            if count:
                pieces.append(expert(x_sorted[at : at + count]))
                at += count
        is_full = at == self._num_pairs
        make = x_sorted.new_empty if is_full else x_sorted.new_zeros
        out = make(self._num_pairs, width)
        return out.index_copy_(0, self.order, torch.cat(pieces)) if pieces else out
