"""Base cards of small models of every family, as an engine would publish them."""

from collections.abc import Iterator

from infinilora.protocol.adapter import PARTS, BaseCard, PartGeometry, Site, SiteGeometry
from infinilora.protocol.ids import Fingerprint, digest_of

Modules = dict[str, tuple[str, int]]
"""Part name -> (module, out width)."""


def make_card(
    model_type: str,
    *,
    num_layers: int = 2,
    hidden: int = 32,
    intermediate: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    num_experts: int = 0,
    shared_intermediate: int = 0,
    vocab_size: int = 128,
    outer: bool = False,
) -> BaseCard:
    """A card for a model of these sizes; `num_experts` 0 is dense. `outer`: with the embedding and lm_head."""

    def site(layer: int, kind: Site, in_dim: int, experts: int, modules: Modules) -> SiteGeometry:
        parts, offset = [], 0
        for name in PARTS[kind]:
            module, out_dim = modules[name]
            parts.append(PartGeometry(name, module, out_dim, offset))
            offset += out_dim
        return SiteGeometry(layer, kind, in_dim, offset, experts, tuple(parts))

    def layer_sites(layer: int) -> Iterator[SiteGeometry]:
        attn, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        kv, q = kv_heads * head_dim, heads * head_dim
        qkv = {"q": (f"{attn}.q_proj", q), "k": (f"{attn}.k_proj", kv), "v": (f"{attn}.v_proj", kv)}
        yield site(layer, Site.QKV, hidden, 0, qkv)
        yield site(layer, Site.O, q, 0, {"o": (f"{attn}.o_proj", hidden)})
        if not num_experts:
            yield from gated(layer, mlp, Site.GATE_UP, Site.DOWN, intermediate, 0)
            return
        experts = f"{mlp}.experts.{{expert}}"
        yield from gated(layer, experts, Site.MOE_GATE_UP, Site.MOE_DOWN, intermediate, num_experts)
        if shared_intermediate:
            shared = f"{mlp}.shared_expert"
            yield from gated(layer, shared, Site.SHARED_GATE_UP, Site.SHARED_DOWN, shared_intermediate, 0)
        yield site(layer, Site.ROUTER, hidden, 0, {"router": (f"{mlp}.gate", num_experts)})
        if shared_intermediate:
            yield site(layer, Site.SHARED_GATE, hidden, 0, {"shared_gate": (f"{mlp}.shared_expert_gate", 1)})

    def gated(layer: int, mlp: str, up_site: Site, down_site: Site, width: int, experts: int) -> Iterator[SiteGeometry]:
        modules = {"gate": (f"{mlp}.gate_proj", width), "up": (f"{mlp}.up_proj", width)}
        yield site(layer, up_site, hidden, experts, modules)
        yield site(layer, down_site, width, experts, {"down": (f"{mlp}.down_proj", hidden)})

    def sites() -> Iterator[SiteGeometry]:
        for layer in range(num_layers):
            yield from layer_sites(layer)
        if outer:
            yield site(0, Site.EMBED, vocab_size, 0, {"embed": ("model.embed_tokens", hidden)})
            yield site(num_layers, Site.LM_HEAD, hidden, 0, {"lm_head": ("lm_head", vocab_size)})

    return BaseCard(
        fingerprint=Fingerprint(digest_of(f"{model_type} {hidden} {num_experts}".encode())),
        name=f"tiny-{model_type}",
        model_type=model_type,
        num_layers=num_layers,
        hidden_dim=hidden,
        vocab_size=vocab_size,
        max_model_len=256,
        dtype="F32",
        eos_token_ids=(2,),
        sites=tuple(sorted(sites(), key=lambda s: (s.layer, s.site))),
    )


def tiny_cards() -> dict[str, BaseCard]:
    """One card a family: dense, and MoE with and without a shared expert."""
    return {
        "llama": make_card("llama"),
        "mixtral": make_card("mixtral", num_experts=4),
        "qwen3_moe": make_card("qwen3_moe", num_experts=4, intermediate=24),
        "qwen2_moe": make_card("qwen2_moe", num_experts=4, intermediate=24, shared_intermediate=40),
        "olmoe": make_card("olmoe", num_experts=8, intermediate=16, kv_heads=4),
    }
