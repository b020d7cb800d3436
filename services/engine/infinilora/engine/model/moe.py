"""A mixture-of-experts block: route, gather rows by expert, two products an expert, weighted sum.

The (token, choice) pairs are sorted by expert once; each expert sees its rows as one slice. The deltas of gate
and up arrive before the non-linearity, that of down already weighted and summed (see lora/interface.py).
"""

import torch
from torch import Tensor

from infinilora.engine.lora.interface import Routing
from infinilora.engine.model.deltas import Deltas, Turns
from infinilora.engine.model.ops import Linear, Ops
from infinilora.engine.model.weights import MoeWeights
from infinilora.protocol.adapter import Site


def moe_block(layer: int, moe: MoeWeights, x: Tensor, ops: Ops, deltas: Deltas) -> Turns[Tensor]:
    """y[t] = sum_k w[t, k] * expert[id[t, k]](x[t]) (+ sigmoid(g(x[t])) * shared(x[t])); x [T, h] -> [T, h]."""
    routing = route((yield from deltas.linear(layer, Site.ROUTER, x, moe.router)), moe)
    groups = ExpertGroups(routing.topk_ids, len(moe.experts))
    k = routing.topk_ids.shape[1]

    ticket = deltas.submit(layer, Site.MOE_GATE_UP, x, routing)
    gate_up = groups.apply([e.gate_up for e in moe.experts], x[groups.tokens]).view(x.shape[0], k, -1)
    yield from deltas.add(layer, Site.MOE_GATE_UP, ticket, gate_up)

    act = ops.silu_mul(gate_up.flatten(0, 1))
    ticket = deltas.submit(layer, Site.MOE_DOWN, act.view(x.shape[0], k, -1), routing)
    down = groups.apply([e.down for e in moe.experts], act[groups.order]).view(x.shape[0], k, -1)
    y = torch.bmm(routing.topk_weights.to(x.dtype)[:, None], down)[:, 0]
    yield from deltas.add(layer, Site.MOE_DOWN, ticket, y)

    if moe.shared is not None and moe.shared_gate is not None:
        shared = ops.silu_mul((yield from deltas.linear(layer, Site.SHARED_GATE_UP, x, moe.shared.gate_up)))
        gate = yield from deltas.linear(layer, Site.SHARED_GATE, x, moe.shared_gate)
        y += torch.sigmoid(gate) * (yield from deltas.linear(layer, Site.SHARED_DOWN, shared, moe.shared.down))
    return y


def route(logits: Tensor, moe: MoeWeights) -> Routing:
    """Softmax over all experts in fp32, then the top k, whose weights are renormalised where the model does."""
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(moe.spec.top_k, dim=-1)
    if moe.spec.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(topk_ids=ids.to(torch.int32), topk_weights=weights)


class ExpertGroups:
    """The pairs of a step sorted by expert: `order` [T * k] lists pairs, `tokens` their rows."""

    def __init__(self, topk_ids: Tensor, num_experts: int) -> None:
        flat = topk_ids.flatten()
        self.order = flat.argsort(stable=True)
        self.tokens = self.order // topk_ids.shape[1]
        self._counts: list[int] = torch.bincount(flat, minlength=num_experts).tolist()

    def apply(self, experts: list[Linear], x_sorted: Tensor) -> Tensor:
        """Run each expert on its slice of x_sorted [T * k, in]; the rows come back in pair order."""
        pieces, at = [], 0
        for expert, count in zip(experts, self._counts, strict=True):
            if count:
                pieces.append(expert(x_sorted[at : at + count]))
                at += count
        done = torch.cat(pieces)
        return torch.empty_like(done).index_copy_(0, self.order, done)
