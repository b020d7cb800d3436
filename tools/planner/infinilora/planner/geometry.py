"""Where adapters add deltas in a base model, as numbers that planning needs: from a config.json, or by a known name.

Only sizes are read. Whether a base can be served is the engine's to say; of its families all are known here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from infinilora.coordinator.provision.shape import Layers, SiteShape, numbers_of
from infinilora.planner.jsonfile import read_json
from infinilora.protocol.errors import InvalidRequest

FILE = Path(__file__).with_name("models.json")
DENSE = ("llama", "mistral", "qwen2", "qwen3")
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL = ("num_key_value_heads", "head_dim", "decoder_sparse_step")
TARGETS = ("attention", "mlp", "experts", "shared")
"""Of a base without experts, `mlp` is all of its MLPs; of one with, those of its dense layers."""


class Config(msgspec.Struct, frozen=True):
    """What is read of a config.json."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_local_experts: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    decoder_sparse_step: int | None = None
    mlp_only_layers: list[int] | None = None

    @property
    def experts(self) -> int:
        return self.num_local_experts or self.num_experts or 0

    @property
    def expert_dim(self) -> int:
        """Width of one expert: Mixtral and OLMoE have no name of its own for it."""
        return self.intermediate_size if self.model_type in ("mixtral", "olmoe") else self.moe_intermediate_size or 0

    def has_experts(self, layer: int) -> bool:
        step = self.decoder_sparse_step or 1
        return self.model_type in EXPERTS and layer not in (self.mlp_only_layers or ()) and (layer + 1) % step == 0


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of models.json."""

    name: str
    source: str
    config: Config


@dataclass(frozen=True, slots=True)
class Base:
    """A base model as planning sees it: only the sites that adapters are planned for."""

    name: str
    layers: Layers

    def adapter_bytes(self, rank: int, number_bytes: int) -> int:
        """Of one adapter of all these sites, at true rank."""
        return numbers_of(self.layers) * rank * number_bytes


def known_models() -> tuple[Known, ...]:
    return msgspec.json.decode(FILE.read_bytes(), type=tuple[Known, ...])


def find_base(model: str, targets: frozenset[str]) -> Base:
    """A known model by its name, else the config.json of a directory. `targets` is a part of TARGETS."""
    for known in known_models():
        if known.name == model.lower():
            return Base(known.name, layers_of(known.config, targets, known.name))
    path = Path(model).expanduser() / "config.json"
    if not path.is_file():
        names = ", ".join(known.name for known in known_models())
        raise InvalidRequest(
            f"found {model!r}; wanted one of {names}, or a directory with a config.json", param="model"
        )
    config = read_json(path, Config, param="model", wanted="a model's config.json")
    return Base(path.parent.name, layers_of(config, targets, str(path)))


def layers_of(config: Config, targets: frozenset[str], source: str) -> Layers:
    """The sites of every layer. InvalidRequest for a family or sizes that are not understood."""
    if config.model_type not in DENSE + EXPERTS:
        wanted = ", ".join(DENSE + EXPERTS)
        raise InvalidRequest(
            f"{source}: model_type: found {config.model_type!r}; wanted one of {wanted}", param="model"
        )
    _check(config, source)
    layers = tuple(
        tuple(site for target in TARGETS if target in targets for site in _SITES[target](config, layer))
        for layer in range(config.num_hidden_layers)
    )
    if not any(layers):
        found = ", ".join(sorted(targets))
        raise InvalidRequest(f"found {found}; wanted something that {source} has", param="targets")
    return layers


def _check(config: Config, source: str) -> None:
    sizes: dict[str, int | None] = {name: getattr(config, name) for name in NEEDED}
    sizes |= {name: value for name in OPTIONAL if (value := getattr(config, name)) is not None}
    if config.model_type in EXPERTS:
        sizes["num_experts"], sizes["moe_intermediate_size"] = config.experts, config.expert_dim
        sizes["num_experts_per_tok"] = config.num_experts_per_tok
    for name, value in sizes.items():
        if value is None or value < 1:
            raise InvalidRequest(f"{source}: {name}: found {value}; wanted 1 or more", param="model")
    if config.model_type in EXPERTS and (top_k := config.num_experts_per_tok or 0) > config.experts:
        told = f"found {top_k}; wanted {config.experts} at most, the experts there are"
        raise InvalidRequest(f"{source}: num_experts_per_tok: {told}", param="model")


def _attention(config: Config, _: int) -> tuple[SiteShape, ...]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    head = config.head_dim or hidden // heads
    q, kv = heads * head, (config.num_key_value_heads or heads) * head
    return _dense(hidden, (q, kv, kv)), _dense(q, (hidden,))


def _mlp(config: Config, layer: int) -> tuple[SiteShape, ...]:
    return () if config.has_experts(layer) else _gated(config.hidden_size, config.intermediate_size)


def _shared(config: Config, layer: int) -> tuple[SiteShape, ...]:
    width = config.shared_expert_intermediate_size
    is_there = width and config.model_type == "qwen2_moe" and config.has_experts(layer)
    return _gated(config.hidden_size, width) if width and is_there else ()


def _experts(config: Config, layer: int) -> tuple[SiteShape, ...]:
    """Gate and up come back for each expert of a row; down goes out for each and comes back summed."""
    if not config.has_experts(layer):
        return ()
    h, f, e, k = config.hidden_size, config.expert_dim, config.experts, config.num_experts_per_tok or 0
    gate_up = SiteShape(sent=h, returned=2 * f * k, numbers=e * 2 * (h + f), experts=e, top_k=k)
    return gate_up, SiteShape(sent=f * k, returned=h, numbers=e * (f + h), experts=e, top_k=k)


def _gated(hidden: int, width: int) -> tuple[SiteShape, ...]:
    return _dense(hidden, (width, width)), _dense(width, (hidden,))


def _dense(width: int, parts: tuple[int, ...]) -> SiteShape:
    """One A and one B for each part, all fed by the same input."""
    return SiteShape(sent=width, returned=sum(parts), numbers=sum(width + part for part in parts))


_SITES: Mapping[str, Callable[[Config, int], tuple[SiteShape, ...]]] = {
    "attention": _attention,
    "mlp": _mlp,
    "experts": _experts,
    "shared": _shared,
}
