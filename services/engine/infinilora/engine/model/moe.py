"""A mixture-of-experts block: route, the experts' products (experts.py), weighted sum.

The deltas of gate and up arrive before the non-linearity, that of down already weighted and summed (see
lora/interface.py).

A shard of an engine runs the pairs of its own experts; what the block returns is then a part of the sum. Which experts
a row goes to the head alone decides: two shards that differ by a rounding would count one twice, or never.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from infinilora.engine.lora.interface import Routing
from infinilora.engine.model.deltas import Deltas, Turns
from infinilora.engine.model.ops import Ops
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
    pairs = moe.experts.sort(places)

    ticket = deltas.submit(layer, Site.MOE_GATE_UP, x, routing)
    gate_up = pairs.gate_up(x).view(*places.shape, -1)
    yield from deltas.add(layer, Site.MOE_GATE_UP, ticket, gate_up)

    act = ops.silu_mul(gate_up.flatten(0, 1))
    ticket = deltas.submit(layer, Site.MOE_DOWN, act.view(*places.shape, -1), routing)
    down = pairs.down(act).view(*places.shape, -1)
    y = torch.bmm(routing.topk_weights[:, None], down.float())[:, 0].to(x.dtype)
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
