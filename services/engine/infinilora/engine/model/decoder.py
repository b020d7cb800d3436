"""The forward pass: one mixed batch of prefill and decode rows through every layer, deltas added on the way.

Each site sends its activations out before the base product and adds what comes back after it. A batch without
adapters has no plan and never reaches the LoRA interface. Where deltas are the longer side, the rows go in two halves
that take turns: attention needs no more than that a sequence's rows stay together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from infinilora.engine.lora.interface import LoraBackend, StepPlan
from infinilora.engine.model.batch import Batch
from infinilora.engine.model.deltas import Deltas, Turns, alone, in_turns
from infinilora.engine.model.kv import KvCache
from infinilora.engine.model.moe import moe_block
from infinilora.engine.model.ops import Ops
from infinilora.engine.model.shards import Alone, Shards
from infinilora.engine.model.spec import ModelSpec
from infinilora.engine.model.weights import LayerWeights, MlpWeights, ModelWeights
from infinilora.protocol.adapter import Site


@dataclass(slots=True, eq=False, weakref_slot=True)
class Flow:
    """A batch part way through the model: before layer `layer`; `out` of the layer before is not added yet.

    It may be left and taken up again; what it wrote into the cache is only its own rows'.
    """

    batch: Batch
    layer: int = 0
    residual: Tensor | None = None
    out: Tensor | None = None


def halves_of(batch: Batch, cut: int) -> list[Flow]:
    """The rows of the first `cut` sequences, and the others."""
    return [Flow(half) for half in batch.halves(cut)]


def windows_of(plan: StepPlan | None, halves: Sequence[Flow]) -> list[StepPlan | None]:
    """What each has of the plan of all rows."""
    edges = accumulate((half.batch.num_rows for half in halves), initial=0)
    return [None if plan is None else plan.window(*edge) for edge in pairwise(edges)]


class Decoder:
    """A model on one device, or one shard of it: `spec` is of what is here.

    `forward` writes the batch's keys and values into `kv` and keeps nothing else.
    """

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, ops: Ops, kv: KvCache, shards: Shards | None = None
    ) -> None:
        self.spec = spec
        self.shards = shards or Alone()
        self.weights = weights
        self.ops = ops
        self.kv = kv
        self._scale = 1.0 / math.sqrt(spec.head_dim)
        self.num_layers_run = 0
        """How far it has come in all: layers begun, lm_head's among them."""

    def forward(self, batch: Batch, lora: LoraBackend, plan: StepPlan | None, *, cut: int = 0) -> Tensor:
        """Hidden states [T, h] before the final norm. Raises StepLost when a delta will not come.

        With `cut`, the rows of the first `cut` sequences and the others take turns: the same numbers.
        """
        if cut and plan is not None:
            return self._in_halves(batch, lora, plan, cut)
        flow = Flow(batch)
        self.proceed(flow, lora, plan, until=self.spec.num_layers)
        return self.finish(flow)

    def proceed(self, flow: Flow, lora: LoraBackend, plan: StepPlan | None, *, until: int) -> None:
        """Run the layers before layer `until`. Raises StepLost: the flow is void then."""
        self.run(flow, Deltas(lora, plan), until=until)

    def run(self, flow: Flow, deltas: Deltas, *, until: int) -> None:
        """Run the layers before layer `until`, with what `deltas` adds."""
        alone(self._layers(flow, deltas, until))

    def run_in_turns(self, halves: Sequence[Flow], deltas: Sequence[Deltas]) -> None:
        """Run all layers of two flows: while a delta of the one is on its way, the other computes."""
        in_turns([self._layers(flow, of, self.spec.num_layers) for flow, of in zip(halves, deltas, strict=True)])

    def _in_halves(self, batch: Batch, lora: LoraBackend, plan: StepPlan, cut: int) -> Tensor:
        halves = halves_of(batch, cut)
        self.run_in_turns(halves, [Deltas(lora, window, plan.adapts) for window in windows_of(plan, halves)])
        return torch.cat([self.finish(half) for half in halves])

    def _layers(self, flow: Flow, deltas: Deltas, until: int) -> Turns[None]:
        ops, eps = self.ops, self.spec.norm_eps
        residual, out = flow.residual, flow.out
        if residual is None:
            residual = flow.residual = deltas.embed(flow.batch.token_ids, self.weights.embed)
        for index in range(flow.layer, until):
            self.num_layers_run += 1
            layer = self.weights.layers[index]
            if out is None:
                x = ops.rms_norm(residual, layer.input_norm, eps)
            else:
                x = ops.add_rms_norm(out, residual, layer.input_norm, eps)
            out = yield from self._attention(index, layer, x, flow.batch, deltas)
            self.shards.sum(out)
            x = ops.add_rms_norm(out, residual, layer.post_norm, eps)
            out = yield from self._mlp(index, layer, x, deltas)
            self.shards.sum(out)
        flow.layer, flow.out = until, out

    def finish(self, flow: Flow) -> Tensor:
        """Hidden states [T, h] of a flow that is through all layers. Once."""
        assert flow.residual is not None
        return flow.residual if flow.out is None else flow.residual.add_(flow.out)

    def logits(self, hidden: Tensor, lora: LoraBackend, plan: StepPlan | None) -> Tensor:
        """fp32 [rows, vocab] of some rows of what `forward` returned. `plan` counts these rows; raises StepLost."""
        assert self.weights.lm_head is not None  # the head shard alone samples
        self.num_layers_run += 1
        x = self.ops.rms_norm(hidden, self.weights.final_norm, self.spec.norm_eps)
        return alone(Deltas(lora, plan).linear(self.spec.num_layers, Site.LM_HEAD, x, self.weights.lm_head)).float()

    def _attention(self, index: int, layer: LayerWeights, x: Tensor, batch: Batch, deltas: Deltas) -> Turns[Tensor]:
        spec, ops = self.spec, self.ops
        q, k, v = self._split((yield from deltas.linear(index, Site.QKV, x, layer.qkv)), layer)
        ops.rope(q, k, batch.positions, self.weights.cos, self.weights.sin)
        self.kv.write(index, k, v, batch.paging.slots)
        keys, values = self.kv.keys[index], self.kv.values[index]
        attended = ops.attention(q, keys, values, batch.paging, self._scale)
        return (yield from deltas.linear(index, Site.O, attended.reshape(-1, spec.q_dim), layer.o))

    def _split(self, qkv: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Q [T, Hq, D], k and v [T, Hkv, D]; q and k normed, then all three clipped, where the model does."""
        spec, ops = self.spec, self.ops
        q, k, v = torch.split_with_sizes(qkv, (spec.q_dim, spec.kv_dim, spec.kv_dim), dim=-1)
        if layer.q_norm is not None and layer.k_norm is not None:
            if spec.qk_norm == "full" and self.shards.cut.num_shards > 1:
                q, k = self._norm_whole(q, layer.q_norm), self._norm_whole(k, layer.k_norm)
            else:
                width = -1 if spec.qk_norm == "full" else spec.head_dim
                q = ops.rms_norm(q.reshape(-1, q.shape[-1] if width < 0 else width), layer.q_norm, spec.norm_eps)
                k = ops.rms_norm(k.reshape(-1, k.shape[-1] if width < 0 else width), layer.k_norm, spec.norm_eps)
        if spec.clip_qkv is not None:
            q, k, v = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
        heads = (-1, spec.num_heads, spec.head_dim), (-1, spec.num_kv_heads, spec.head_dim)
        return q.reshape(heads[0]), k.reshape(heads[1]), v.reshape(heads[1])

    def _norm_whole(self, x: Tensor, weight: Tensor) -> Tensor:
        """The RMS norm of rows that are spread over the shards. Copies of KV heads are as many on every shard."""
        wide = x.float()
        mean = wide.square().mean(-1, keepdim=True)
        self.shards.sum(mean)
        scale = torch.rsqrt(mean / self.shards.cut.num_shards + self.spec.norm_eps)
        return (wide * scale).to(x.dtype) * weight

    def _mlp(self, index: int, layer: LayerWeights, x: Tensor, deltas: Deltas) -> Turns[Tensor]:
        if not isinstance(layer.mlp, MlpWeights):
            return (yield from moe_block(index, layer.mlp, x, self.ops, deltas, self.shards))
        act = self.ops.silu_mul((yield from deltas.linear(index, Site.GATE_UP, x, layer.mlp.gate_up)))
        return (yield from deltas.linear(index, Site.DOWN, act, layer.mlp.down))
