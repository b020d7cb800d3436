"""A model's weights, fused and packed for one device: q, k, v in one matrix, gate and up in one.

Of a model that is cut, one shard's (cut.py). Knows which tensor is for what; knows nothing of files (checkpoint.py) or
of how a product is computed (ops.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from infinilora.engine.model import names
from infinilora.engine.model.checkpoint import TensorSource
from infinilora.engine.model.cut import Cut, CutTensors, local_spec
from infinilora.engine.model.experts import EachExpert, Experts, StackedExperts
from infinilora.engine.model.ops import Linear, Ops, Ungrouped
from infinilora.engine.model.spec import ModelSpec, MoeSpec


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated MLP: gate_up [h -> 2f], down [f -> h]."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """A router, experts, and the shared expert where there is one (`shared_gate` [h -> 1]).

    A shard has the experts from `first_expert` on; the router is the head's (None elsewhere).
    """

    spec: MoeSpec
    router: Linear | None
    first_expert: int
    experts: Experts
    shared: MlpWeights | None
    shared_gate: Linear | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor
    post_norm: Tensor
    qkv: Linear
    o: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All of it. cos and sin are fp32 [max_len, head_dim / 2]. `lm_head` is the head shard's (None elsewhere)."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear | None
    cos: Tensor
    sin: Tensor

    @property
    def experts_how(self) -> str | None:
        """How the products of experts are computed; None where there are no experts."""
        return next((layer.mlp.experts.how for layer in self.layers if isinstance(layer.mlp, MoeWeights)), None)


def load_weights(
    spec: ModelSpec, source: TensorSource, ops: Ops, *, max_len: int, cut: Cut | None = None
) -> ModelWeights:
    """Read, fuse and pack every tensor, or a shard's part of it; one layer's plain copies live at a time.

    `spec` and `source` are of the whole model.
    """
    cut = cut or Cut()
    reader = _Reader(local_spec(spec, cut), CutTensors(source, spec, cut), ops, cut)
    embed = reader.plain(names.EMBED)
    head = source.get(names.EMBED if spec.tied_embeddings else names.LM_HEAD) if cut.is_head else None
    cos, sin = rope_table(spec, max_len=max_len)
    return ModelWeights(
        embed=embed,
        layers=tuple(reader.layer(layer) for layer in range(spec.num_layers)),
        final_norm=reader.plain(names.FINAL_NORM),
        lm_head=None if head is None else ops.linear(head),
        cos=cos.to(ops.device),
        sin=sin.to(ops.device),
    )


def rope_table(spec: ModelSpec, *, max_len: int) -> tuple[Tensor, Tensor]:
    """Cos and sin of position * frequency, fp32 [max_len, head_dim / 2]."""
    frequencies = torch.tensor(spec.rope.inv_freq, dtype=torch.float32)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * spec.rope.magnitude, angles.sin() * spec.rope.magnitude


class _Reader:
    """Turns named tensors into fused, packed weights."""

    def __init__(self, spec: ModelSpec, source: TensorSource, ops: Ops, cut: Cut) -> None:
        self._spec = spec
        self._source = source
        self._ops = ops
        self._cut = cut

    def plain(self, name: str) -> Tensor:
        return self._source.get(name).to(self._ops.device, self._ops.dtype)

    def layer(self, layer: int) -> LayerWeights:
        spec, p = self._spec, names.layer_prefix(layer)
        attn, moe = f"{p}.self_attn", spec.moe_at(layer)
        normed = spec.qk_norm != "none"
        return LayerWeights(
            input_norm=self.plain(f"{p}.input_layernorm.weight"),
            post_norm=self.plain(f"{p}.post_attention_layernorm.weight"),
            qkv=self._fused(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj", bias=spec.qkv_bias),
            o=self._fused(f"{attn}.o_proj", bias=spec.o_bias),
            q_norm=self.plain(f"{attn}.q_norm.weight") if normed else None,
            k_norm=self.plain(f"{attn}.k_norm.weight") if normed else None,
            mlp=self._moe(layer, moe) if moe else self._mlp(f"{p}.mlp", bias=spec.mlp_bias),
        )

    def _mlp(self, block: str, *, bias: bool = False) -> MlpWeights:
        return MlpWeights(
            gate_up=self._fused(f"{block}.gate_proj", f"{block}.up_proj", bias=bias),
            down=self._fused(f"{block}.down_proj", bias=bias),
        )

    def _moe(self, layer: int, moe: MoeSpec) -> MoeWeights:
        block, experts = f"{names.layer_prefix(layer)}.{moe.block}", self._cut.experts(moe)
        return MoeWeights(
            spec=moe,
            router=self._fused(f"{block}.gate") if self._cut.is_head else None,
            first_expert=experts.start,
            experts=self._experts(layer, moe, experts),
            shared=self._mlp(f"{block}.shared_expert") if moe.shared_dim else None,
            shared_gate=self._fused(f"{block}.shared_expert_gate") if moe.shared_dim else None,
        )

    def _experts(self, layer: int, moe: MoeSpec, experts: range) -> Experts:
        h, f = self._spec.hidden_dim, moe.expert_dim
        modules = [self._expert_modules(layer, moe, expert) for expert in experts]
        stacks = self._ops.stacks(len(experts), (2 * f, h), (h, f))
        if isinstance(stacks, Ungrouped):
            products = [(self._fused(gate, up), self._fused(down)) for gate, up, down in modules]
            return EachExpert(products, hidden_dim=h, expert_dim=f, how=stacks.reason)
        gate_ups, downs = stacks
        for place, (gate, up, down) in enumerate(modules):
            gate_ups.weights[place].copy_(self._weight(gate, up))
            downs.weights[place].copy_(self._weight(down))
        return StackedExperts(gate_ups, downs, is_all=len(experts) == moe.num_experts)

    def _expert_modules(self, layer: int, moe: MoeSpec, expert: int) -> tuple[str, str, str]:
        gate, up, down = (
            names.expert_module(layer, moe, expert, name) for name in (moe.gate_name, moe.up_name, moe.down_name)
        )
        return gate, up, down

    def _fused(self, *modules: str, bias: bool = False) -> Linear:
        biases = torch.cat([self._source.get(f"{m}.bias") for m in modules]) if bias else None
        return self._ops.linear(self._weight(*modules), biases)

    def _weight(self, *modules: str) -> Tensor:
        return torch.cat([self._source.get(f"{m}.weight") for m in modules])
