"""Which projection of the base a tensor's name means, in every spelling that trainers use.

The one place that knows PEFT's key grammar and the names that models had in earlier transformers. Pure.
"""

import re
from dataclasses import dataclass
from typing import Literal

from infinilora.protocol.adapter import BaseCard, SiteGeometry
from infinilora.weights.refuse import invalid

PREFIX = "base_model.model."
Half = Literal["A", "B"]

_LORA_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])\.weight\Z")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")

# Earlier transformers' names (left) of what cards call by today's (right): Mixtral until 4.57.
ALIASES = (
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"(\.experts\.(?:\d+|\{expert\}))\.w1\Z"), r"\1.gate_proj"),
    (re.compile(r"(\.experts\.(?:\d+|\{expert\}))\.w2\Z"), r"\1.down_proj"),
    (re.compile(r"(\.experts\.(?:\d+|\{expert\}))\.w3\Z"), r"\1.up_proj"),
)

# What a key that is no LoRA half tells: (part of the key, why it is refused).
_TELLING = (
    ("lora_magnitude_vector", "DoRA, which is not served"),
    ("lora_embedding_", "LoRA on an embedding, which is not served"),
    ("modules_to_save", "a whole module trained beside the LoRA, which is not served"),
    ("token_adapter", "trained token embeddings, which are not served"),
    (".bias", "a bias, which is not served"),
    ("base_layer.weight", "a copy of base weights (save again with save_embedding_layers=False)"),
)


@dataclass(frozen=True, slots=True)
class Place:
    """One projection of the base: a part of a site, and the expert if the site has experts."""

    geometry: SiteGeometry
    part: int
    expert: int | None


def split_key(file: str, key: str) -> tuple[str, Half]:
    """The module and the half (A or B) that a tensor's name means. Raises AdapterInvalid."""
    found = _LORA_KEY.match(key)
    if not found:
        why = next((why for part, why in _TELLING if part in key), "no LoRA weight")
        raise invalid(file, f"tensor {key}", found=why, wanted="...lora_A.weight or ...lora_B.weight")
    module = found.group("module")
    if not module.startswith(PREFIX):
        raise invalid(file, f"tensor {key}", found="a name that PEFT does not load", wanted=f"{PREFIX}...")
    return module.removeprefix(PREFIX), "A" if found.group("half") == "A" else "B"


def canonical(module: str) -> str:
    """A module's name of today."""
    for pattern, today in ALIASES:
        module = pattern.sub(today, module)
    return module


class ModuleIndex:
    """Every projection of a base model by name. Pure and immutable after construction."""

    def __init__(self, card: BaseCard) -> None:
        self._card = card
        self._places = {
            canonical(part.module): (site, index) for site in card.sites for index, part in enumerate(site.parts)
        }

    def find(self, module: str) -> Place | None:
        """The place a module name means; None if this base has no such projection, or no such expert."""
        name = canonical(module)
        if (exact := self._places.get(name)) and not exact[0].num_experts:
            return Place(geometry=exact[0], part=exact[1], expert=None)
        number = _EXPERT.search(name)
        if number is None:
            return None
        template = f"{name[: number.start(1)]}{{expert}}{name[number.end(1) :]}"
        known = self._places.get(template)
        expert = int(number.group(1))
        if known is None or expert >= known[0].num_experts:
            return None
        return Place(geometry=known[0], part=known[1], expert=expert)

    def experts_of(self, module: str) -> tuple[SiteGeometry, ...]:
        """The MoE sites whose experts live in the container `module` (`...mlp.experts`), in site order."""
        prefix = canonical(f"{module}.").removesuffix(".") + ".{expert}."
        names = (name for name in self._places if name.startswith(prefix))
        sites = {self._places[name][0].site: self._places[name][0] for name in names}
        return tuple(sites[site] for site in sorted(sites))

    def describe(self) -> str:
        """What this base can adapt, for a refusal."""
        leaves = sorted({name.rpartition(".")[2] for name in self._places})
        return f"a projection of {self._card.name} ({self._card.num_layers} layers; {', '.join(leaves)})"
