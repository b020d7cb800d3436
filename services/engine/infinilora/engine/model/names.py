"""The checkpoint's tensor names and shapes, from a ModelSpec: what must be there, and the modules of each site.

Knows no file and no tensor. Fused (three-dimensional) expert tensors are an alternative that the reader knows.
"""

from infinilora.engine.model.spec import ModelSpec, MoeSpec
from infinilora.protocol.adapter import PARTS, PartGeometry, Site, SiteGeometry

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}"


def expert_module(layer: int, moe: MoeSpec, expert: int | str, name: str) -> str:
    return f"{layer_prefix(layer)}.{moe.block}.experts.{expert}.{name}"


def tensor_shapes(spec: ModelSpec) -> Shapes:
    """Every tensor of the checkpoint, in a fixed order. Experts one by one."""
    h = spec.hidden_dim
    shapes: Shapes = {EMBED: (spec.vocab_size, h), FINAL_NORM: (h,)}
    if not spec.tied_embeddings:
        shapes[LM_HEAD] = (spec.vocab_size, h)
    for layer in range(spec.num_layers):
        shapes.update(_attention_shapes(spec, layer))
        moe = spec.moe_at(layer)
        shapes.update(_expert_shapes(spec, layer, moe) if moe else _mlp_shapes(spec, layer))
    return shapes


def _attention_shapes(spec: ModelSpec, layer: int) -> Shapes:
    p, h = layer_prefix(layer), spec.hidden_dim
    shapes: Shapes = {f"{p}.input_layernorm.weight": (h,), f"{p}.post_attention_layernorm.weight": (h,)}
    for part, width in (("q", spec.q_dim), ("k", spec.kv_dim), ("v", spec.kv_dim)):
        shapes[f"{p}.self_attn.{part}_proj.weight"] = (width, h)
        if spec.qkv_bias:
            shapes[f"{p}.self_attn.{part}_proj.bias"] = (width,)
    shapes[f"{p}.self_attn.o_proj.weight"] = (h, spec.q_dim)
    if spec.o_bias:
        shapes[f"{p}.self_attn.o_proj.bias"] = (h,)
    if spec.qk_norm != "none":
        per_head = spec.qk_norm == "head"
        shapes[f"{p}.self_attn.q_norm.weight"] = (spec.head_dim if per_head else spec.q_dim,)
        shapes[f"{p}.self_attn.k_norm.weight"] = (spec.head_dim if per_head else spec.kv_dim,)
    return shapes


def _mlp_shapes(spec: ModelSpec, layer: int) -> Shapes:
    p, h, f = f"{layer_prefix(layer)}.mlp", spec.hidden_dim, spec.mlp_dim
    shapes: Shapes = {
        f"{p}.gate_proj.weight": (f, h),
        f"{p}.up_proj.weight": (f, h),
        f"{p}.down_proj.weight": (h, f),
    }
    if spec.mlp_bias:
        shapes |= {f"{p}.gate_proj.bias": (f,), f"{p}.up_proj.bias": (f,), f"{p}.down_proj.bias": (h,)}
    return shapes


def _expert_shapes(spec: ModelSpec, layer: int, moe: MoeSpec) -> Shapes:
    p, h, f = f"{layer_prefix(layer)}.{moe.block}", spec.hidden_dim, moe.expert_dim
    shapes: Shapes = {f"{p}.gate.weight": (moe.num_experts, h)}
    for expert in range(moe.num_experts):
        shapes[f"{expert_module(layer, moe, expert, moe.gate_name)}.weight"] = (f, h)
        shapes[f"{expert_module(layer, moe, expert, moe.up_name)}.weight"] = (f, h)
        shapes[f"{expert_module(layer, moe, expert, moe.down_name)}.weight"] = (h, f)
    if s := moe.shared_dim:
        shapes |= {
            f"{p}.shared_expert.gate_proj.weight": (s, h),
            f"{p}.shared_expert.up_proj.weight": (s, h),
            f"{p}.shared_expert.down_proj.weight": (h, s),
            f"{p}.shared_expert_gate.weight": (1, h),
        }
    return shapes


def site_geometry(spec: ModelSpec) -> tuple[SiteGeometry, ...]:
    """Where adapters may add deltas, by (layer, site). `embed` is of layer 0, `lm_head` of the layer after the last."""
    h, vocab = spec.hidden_dim, spec.vocab_size
    sites = [site for layer in range(spec.num_layers) for site in _layer_sites(spec, layer)]
    sites.append(_site(0, Site.EMBED, vocab, (EMBED.removesuffix(".weight"),), (h,)))
    sites.append(_site(spec.num_layers, Site.LM_HEAD, h, (LM_HEAD.removesuffix(".weight"),), (vocab,)))
    return tuple(sorted(sites, key=lambda site: (site.layer, site.site)))


def _layer_sites(spec: ModelSpec, layer: int) -> list[SiteGeometry]:
    p, h = layer_prefix(layer), spec.hidden_dim
    attn = f"{p}.self_attn"
    qkv = (f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj")
    sites = [
        _site(layer, Site.QKV, h, qkv, (spec.q_dim, spec.kv_dim, spec.kv_dim)),
        _site(layer, Site.O, spec.q_dim, (f"{attn}.o_proj",), (h,)),
    ]
    moe = spec.moe_at(layer)
    if moe is None:
        f = spec.mlp_dim
        sites.append(_site(layer, Site.GATE_UP, h, (f"{p}.mlp.gate_proj", f"{p}.mlp.up_proj"), (f, f)))
        sites.append(_site(layer, Site.DOWN, f, (f"{p}.mlp.down_proj",), (h,)))
        return sites
    return sites + _moe_sites(spec, layer, moe)


def _moe_sites(spec: ModelSpec, layer: int, moe: MoeSpec) -> list[SiteGeometry]:
    p, h, f, e = f"{layer_prefix(layer)}.{moe.block}", spec.hidden_dim, moe.expert_dim, moe.num_experts
    gate, up, down = (
        expert_module(layer, moe, "{expert}", name) for name in (moe.gate_name, moe.up_name, moe.down_name)
    )
    sites = [
        _site(layer, Site.MOE_GATE_UP, h, (gate, up), (f, f), experts=e),
        _site(layer, Site.MOE_DOWN, f, (down,), (h,), experts=e),
    ]
    if s := moe.shared_dim:
        shared = f"{p}.shared_expert"
        sites.append(_site(layer, Site.SHARED_GATE_UP, h, (f"{shared}.gate_proj", f"{shared}.up_proj"), (s, s)))
        sites.append(_site(layer, Site.SHARED_DOWN, s, (f"{shared}.down_proj",), (h,)))
    sites.append(_site(layer, Site.ROUTER, h, (f"{p}.gate",), (e,)))
    if moe.shared_dim:
        sites.append(_site(layer, Site.SHARED_GATE, h, (f"{p}.shared_expert_gate",), (1,)))
    return sites


def _site(
    layer: int, site: Site, in_dim: int, modules: tuple[str, ...], dims: tuple[int, ...], *, experts: int = 0
) -> SiteGeometry:
    parts, at = [], 0
    for name, module, width in zip(PARTS[site], modules, dims, strict=True):
        parts.append(PartGeometry(name=name, module=module, out_dim=width, out_offset=at))
        at += width
    return SiteGeometry(layer=layer, site=site, in_dim=in_dim, out_dim=at, num_experts=experts, parts=tuple(parts))
