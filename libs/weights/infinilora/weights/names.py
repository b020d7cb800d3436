"""Which projection of the base a module's name means, in every spelling that trainers use. Pure.

Knows the names that models had in earlier transformers and inside larger models; not the grammar of keys.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from infinilora.protocol.adapter import BaseCard, Site, SiteGeometry

EMBED, HEAD = "model.embed_tokens", "lm_head"
PREFIX = "base_model.model."
"""What PEFT puts before a module's name in a file."""

_EXPERT = re.compile(r"\.experts\.(0|[1-9][0-9]*)\.")
_ANY_EXPERT = ".{expert}."

# Other names (left) of what cards call by today's (right).
ALIASES = (
    # A language model alone, without its head, or inside a model that also sees or hears.
    (re.compile(r"\A(?:(?:model\.)?language_model\.(?:model\.)?)?(?=(?:layers\.\d+|embed_tokens)(?:\.|\Z))"), "model."),
    (re.compile(r"\A(?:model\.)?language_model\.(?=lm_head(?:\.|\Z))"), ""),
    # Mixtral until transformers 4.57.
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"(\.experts\.(?:\d+|\{expert\}))\.w1\Z"), r"\1.gate_proj"),
    (re.compile(r"(\.experts\.(?:\d+|\{expert\}))\.w2\Z"), r"\1.down_proj"),
    (re.compile(r"(\.experts\.(?:\d+|\{expert\}))\.w3\Z"), r"\1.up_proj"),
)
ROOT = re.compile(r"\A(?P<root>(?:[^.]+\.)*?)(?:layers\.\d+|embed_tokens)(?:\.|\Z)")
"""What comes before the layers or the embedding in a module's name."""
_TODAY = "model."
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EARLIER = {today: earlier for earlier, today in MIXTRAL.items()}
JOINS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Names of fused projections, and the parts that they are of, in the order of their rows."""
_IN_LAYER = re.compile(r"(?P<layer>.*?\blayers\.\d+\.)(?P<parent>.+)\.(?P<leaf>[^.]+)\Z")
_LAYER_NUMBER = re.compile(r"\Amodel\.layers\.\d+\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|\Z)")
_MOE_BLOCK = re.compile(r"\.mlp(?P<rest>\.experts\.(?:\d+|\{expert\})\.(?P<leaf>gate_proj|up_proj|down_proj)|\.gate)\Z")


@dataclass(frozen=True, slots=True)
class Place:
    """One projection of the base: a part of a site, and the expert if the site has experts."""

    geometry: SiteGeometry
    part: int
    expert: int | None


class ExpertParts(NamedTuple):
    """Parts of a MoE site, of every expert alike."""

    geometry: SiteGeometry
    parts: tuple[int, ...]


def canonical(module: str) -> str:
    """A module's name of today."""
    for pattern, today in ALIASES:
        module = pattern.sub(today, module, count=1)
    return module


@dataclass(frozen=True, slots=True)
class FileNames:
    """How a file spells what cards call otherwise. Told by its modules."""

    root: str
    is_earlier: bool | None
    """Mixtral's blocks by their names until transformers 4.57; None: the file has none of them."""

    together: frozenset[tuple[str, str]]
    """(parent, last name) below a layer of every kind of module that stands for several: fused, or of all experts."""

    @classmethod
    def of(cls, modules: Iterable[str]) -> "FileNames":
        root, is_earlier, together = _TODAY, None, set()
        for module in modules:
            if found := ROOT.match(module):
                root = found["root"]
            if ".block_sparse_moe." in module:
                is_earlier = True
            elif is_earlier is None and _MOE_BLOCK.search(module):
                is_earlier = False
            if found := _IN_LAYER.match(module):
                parent, leaf = _NUMBER.sub("{expert}", found["parent"]), found["leaf"]
                if leaf in JOINS or parent.endswith("experts") or (leaf in MIXTRAL and not parent.endswith("}")):
                    together.add((parent, leaf))
        return cls(root, is_earlier, frozenset(together))

    def spellings(self, module: str) -> tuple[str, ...]:
        """The names by which this file's configuration may mean a module of a card."""
        today = canonical(module)
        if ROOT.match(today):
            today = self.root + today.removeprefix(_TODAY)
        return (*self._alone(today), *self._with_others(today))

    def _alone(self, today: str) -> tuple[str, ...]:
        block = _MOE_BLOCK.search(today)
        if not block or self.is_earlier is False:
            return (today,)
        earlier = f"{today[: block.start()]}.block_sparse_moe{block['rest']}"
        if leaf := block["leaf"]:
            earlier = earlier.removesuffix(leaf) + _EARLIER[leaf]
        return (earlier,) if self.is_earlier else (today, earlier)

    def _with_others(self, today: str) -> Iterator[str]:
        """Of the kinds of module in this file, those that have this one as a part."""
        if not self.together or not (found := _IN_LAYER.match(today)):
            return
        own = found["parent"]
        holders = {own, own.removesuffix(".{expert}"), own.removesuffix(".experts.{expert}")}
        for parent, leaf in sorted(self.together):
            parts = JOINS.get(leaf) or (MIXTRAL.get(leaf, leaf),)
            if found["leaf"] in parts and canonical(f".{parent}.").strip(".") in holders:
                yield f"{found['layer']}{parent}.{leaf}"


def parameters_of(projection: str) -> Iterator[str]:
    """The parameters of all experts that may hold a projection `...experts.{expert}.NAME`; none for any other."""
    container, found, leaf = projection.partition(_ANY_EXPERT)
    if not found:
        return
    today = MIXTRAL.get(leaf, leaf)
    wholes = (joined for joined, parts in JOINS.items() if today in parts)
    yield from (f"{container}.{name}" for name in (today, *wholes))
    if earlier := _EARLIER.get(today):
        yield from (f"{container}.{earlier}", f"{container.removesuffix('.experts')}.{earlier}")


class ModuleIndex:
    """Every projection of a base model by name. Pure and immutable after construction."""

    def __init__(self, card: BaseCard) -> None:
        self._card = card
        self._places = {
            canonical(part.module): (site, index) for site in card.sites for index, part in enumerate(site.parts)
        }
        self._containers: dict[str, dict[Site, SiteGeometry]] = {}
        for name, (site, _) in self._places.items():
            container, found, _ = name.partition(_ANY_EXPERT)
            if found:
                self._containers.setdefault(container, {})[site.site] = site

    @property
    def has_two_tables(self) -> bool:
        """Whether embedding and head are surely two; not where the card does not tell, or they hold the same."""
        embedding, head = (self._card.tables.get(module) for module in (EMBED, HEAD))
        return embedding is not None and head is not None and embedding != head

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
        sites = self._containers.get(canonical(f"{module}.").removesuffix("."), {})
        return tuple(sites[site] for site in sorted(sites))

    def expert_parts(self, container: str, names: tuple[str, ...]) -> ExpertParts | None:
        """The projections `names` of all experts in a container; None unless they are parts of one site."""
        prefix = canonical(f"{container}.").removesuffix(".") + _ANY_EXPERT
        places = [self._places.get(canonical(prefix + name)) for name in names]
        found = [place for place in places if place and place[0].num_experts]
        if len(found) < len(names) or any(place[0] is not found[0][0] for place in found):
            return None
        return ExpertParts(found[0][0], tuple(part for _, part in found))

    def describe(self) -> str:
        """What this base can adapt, for a refusal: by its place in a layer, for experts and MLPs have like names."""
        within = sorted({_LAYER_NUMBER.sub("", name) for name in self._places})
        return f"a projection of {self._card.name} ({self._card.num_layers} layers of {', '.join(within)})"
