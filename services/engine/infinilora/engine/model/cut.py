"""What one shard of an engine holds of a model: pure arithmetic over a ModelSpec, and a source of cut tensors.

q heads          | shard 0 | shard 1 |        k, v the same, or one head that several shards have a copy of
gate, up         columns of the output;  o, down: columns of the input, so that a product is a partial sum
experts          whole ones, in runs;    a shared expert like a dense MLP
the rest         whole on every shard;   router, lm_head: the head shard's alone
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from infinilora.engine.model.checkpoint import TensorSource
from infinilora.engine.model.names import EMBED, LM_HEAD, tensor_shapes
from infinilora.engine.model.spec import ModelSpec, MoeSpec
from infinilora.pool.share import Share
from infinilora.pool.slices import SiteSlice
from infinilora.protocol.adapter import Site, SiteEntry
from infinilora.protocol.errors import InvalidRequest

_ROWS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
"""Of these a shard has some of the outputs: rows of the weight, and of the bias."""
_COLUMNS = frozenset({"o_proj", "down_proj"})
"""Of these some of the inputs. The bias is the head's."""
HEAD_SITES = frozenset({Site.ROUTER, Site.LM_HEAD})
"""Computed by the head alone."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Shard `shard` of `num_shards`. The default is a whole model."""

    shard: int = 0
    num_shards: int = 1

    @property
    def is_head(self) -> bool:
        return self.shard == 0

    def part(self, width: int) -> range:
        """This shard's run of `width` things, as even as can be."""
        return range(width * self.shard // self.num_shards, width * (self.shard + 1) // self.num_shards)

    def heads(self, spec: ModelSpec) -> range:
        return self.part(spec.num_heads)

    def kv_heads(self, spec: ModelSpec) -> range:
        """Those that its query heads attend to."""
        if spec.num_kv_heads >= self.num_shards:
            return self.part(spec.num_kv_heads)
        one = spec.num_kv_heads * self.shard // self.num_shards
        return range(one, one + 1)

    def experts(self, moe: MoeSpec) -> range:
        return self.part(moe.num_experts)


def misfit(spec: ModelSpec, num_shards: int) -> str:
    """Why a model cannot be cut into so many shards; empty if it can."""
    heads, kv = spec.num_heads, spec.num_kv_heads
    if heads % num_shards:
        return f"{heads} attention heads do not divide by {num_shards}"
    if kv % num_shards and num_shards % kv:
        return f"{kv} KV heads and {num_shards} shards: neither number divides by the other"
    narrowest = min(_widths(spec))
    if narrowest < num_shards:
        return f"an MLP of {narrowest} columns or experts is narrower than {num_shards}"
    return ""


def check_cut(spec: ModelSpec, num_shards: int) -> None:
    """Raise InvalidRequest, with the numbers that do fit, unless a model can be cut so."""
    if why := misfit(spec, num_shards):
        fitting = [n for n in range(1, spec.num_heads + 1) if not misfit(spec, n)]
        raise InvalidRequest(
            f"a {spec.model_type} model cannot run as {num_shards} engine shards: {why}; "
            f"wanted one of {', '.join(map(str, fitting))}"
        )


def _widths(spec: ModelSpec) -> list[int]:
    widths = [] if all(spec.moe_layers) and spec.moe_layers else [spec.mlp_dim]
    if spec.moe is not None:
        widths += [spec.moe.num_experts, *([spec.moe.shared_dim] if spec.moe.shared_dim else [])]
    return widths


def local_spec(spec: ModelSpec, cut: Cut) -> ModelSpec:
    """The model that a shard runs: its heads and columns. The number of experts stays that of all."""
    moe = spec.moe and replace(spec.moe, shared_dim=len(cut.part(spec.moe.shared_dim)))
    return replace(
        spec,
        num_heads=len(cut.heads(spec)),
        num_kv_heads=len(cut.kv_heads(spec)),
        mlp_dim=len(cut.part(spec.mlp_dim)),
        moe=moe,
    )


def weight_numbers(spec: ModelSpec, cut: Cut) -> int:
    """How many numbers a shard's weights are, to a router's rows: what a device must hold."""
    own = local_spec(spec, cut)
    moe = own.moe and replace(own.moe, num_experts=len(cut.experts(own.moe)))
    shapes = tensor_shapes(replace(own, moe=moe))
    total = sum(math.prod(shape) for name, shape in shapes.items() if cut.is_head or name != LM_HEAD)
    has_copy = spec.tied_embeddings and cut.is_head
    return total + (math.prod(shapes[EMBED]) if has_copy else 0)


class CutTensors:
    """A TensorSource of what a shard holds of each tensor of another."""

    def __init__(self, source: TensorSource, spec: ModelSpec, cut: Cut) -> None:
        self._source = source
        self._spec = spec
        self._cut = cut

    def get(self, name: str) -> Tensor:
        tensor = self._source.get(name)
        stem, _, kind = name.rpartition(".")
        module = stem.rpartition(".")[2]
        if ".experts." in name:
            return tensor
        if module in _ROWS or (self._spec.qk_norm == "full" and module in ("q_norm", "k_norm")):
            columns = self._columns(stem, module)
            return tensor[columns.start : columns.stop].contiguous()
        if module in _COLUMNS and kind == "weight":
            columns = self._columns(stem, module)
            return tensor[:, columns.start : columns.stop].contiguous()
        if module in _COLUMNS and not self._cut.is_head:
            return torch.zeros_like(tensor)
        return tensor

    def _columns(self, stem: str, module: str) -> range:
        spec, cut = self._spec, self._cut
        match module[0]:
            case "q" | "o":
                return _wide(cut.heads(spec), spec.head_dim)
            case "k" | "v":
                return _wide(cut.kv_heads(spec), spec.head_dim)
            case _:
                shared = spec.moe.shared_dim if spec.moe and ".shared_expert." in stem else None
                return cut.part(spec.mlp_dim if shared is None else shared)


def site_slices(spec: ModelSpec, cut: Cut) -> dict[tuple[int, Site], SiteSlice]:
    """What a shard sends and asks for at the sites that it has a part of. Empty for a whole model."""
    if cut.num_shards == 1:
        return {}
    heads, kv = _wide(cut.heads(spec), spec.head_dim), _wide(cut.kv_heads(spec), spec.head_dim)
    outputs = (_run(heads, 0), _run(kv, spec.q_dim), _run(kv, spec.q_dim + spec.kv_dim))
    slices: dict[tuple[int, Site], SiteSlice] = {}
    for layer in range(spec.num_layers):
        slices[layer, Site.QKV] = SiteSlice(outputs=outputs)
        slices[layer, Site.O] = SiteSlice(inputs=_run(heads, 0))
        moe = spec.moe_at(layer)
        if moe is None:
            slices |= _mlp_slices(layer, Site.GATE_UP, Site.DOWN, spec.mlp_dim, cut)
        elif moe.shared_dim:
            slices |= _mlp_slices(layer, Site.SHARED_GATE_UP, Site.SHARED_DOWN, moe.shared_dim, cut)
    return slices


def share_of(spec: ModelSpec, cut: Cut) -> Share | None:
    """What a pool beside a shard's weights holds of each adapter; None beside a whole model: all of it."""
    if cut.num_shards == 1:
        return None
    first, end = (cut.experts(spec.moe).start, cut.experts(spec.moe).stop) if spec.moe else (0, 0)

    def held(entry: SiteEntry) -> range:
        if entry.num_experts:
            return range(entry.num_experts)[first:end]
        return range(cut.is_head or entry.site not in HEAD_SITES)

    return Share(f"shard {cut.shard} of an engine of {cut.num_shards}", held, site_slices(spec, cut))


def _mlp_slices(layer: int, gate_up: Site, down: Site, width: int, cut: Cut) -> dict[tuple[int, Site], SiteSlice]:
    columns = cut.part(width)
    return {
        (layer, gate_up): SiteSlice(outputs=(_run(columns, 0), _run(columns, width))),
        (layer, down): SiteSlice(inputs=_run(columns, 0)),
    }


def _wide(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _run(columns: range, offset: int) -> tuple[int, int]:
    return columns.start + offset, columns.stop + offset
