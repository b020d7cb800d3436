"""Which shard of a group owns what of a base model: arithmetic that engines and servers do alone; no message has it.

    layers    | stage 0 | stage 1 | ...        runs as even as can be; embed is in the first, lm_head in the last
    a stage   | column 0 | column 1 | ...      expert x of n is in column x * expert_parallel // n;
                                               each dense site is in one column, dealt round by (layer + its place)
    shard = stage * expert_parallel + column   shard 0 is the head

Pure; knows no process and no adapter.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import override

from infinilora.protocol.adapter import SiteGeometry
from infinilora.protocol.errors import InvalidRequest

HEAD = 0
MAX_PARALLEL = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Shards of a group: columns of experts times stages of layers. Written `ExL`."""

    expert_parallel: int = 1
    layer_parallel: int = 1

    def __post_init__(self) -> None:
        for name, ways in (("expert_parallel", self.expert_parallel), ("layer_parallel", self.layer_parallel)):
            if not 1 <= ways <= MAX_PARALLEL:
                raise InvalidRequest(f"{name} of a group is {ways}; wanted 1 to {MAX_PARALLEL}")

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """`2x4`: two columns, four stages. Raises InvalidRequest for anything else."""
        found = re.fullmatch(r"(\d{1,3})x(\d{1,3})", text)
        if found is None:
            raise InvalidRequest(f"the shape of a group is {text!r}; wanted ExL, such as 1x1 or 2x4")
        return cls(int(found[1]), int(found[2]))

    @override
    def __str__(self) -> str:
        return f"{self.expert_parallel}x{self.layer_parallel}"

    @property
    def num_shards(self) -> int:
        return self.expert_parallel * self.layer_parallel


ONE = Shape()
"""A group that is one process."""


class Sharding:
    """A shape over the sites of one base. Equal arguments give equal answers in every process."""

    def __init__(self, shape: Shape, num_layers: int, sites: Iterable[SiteGeometry]) -> None:
        """`num_layers` is the base's; lm_head's layer has that number. Raises InvalidRequest for empty stages."""
        if shape.layer_parallel > num_layers:
            raise InvalidRequest(
                f"a group of shape {shape} cuts layers into {shape.layer_parallel} stages; this base has {num_layers}"
            )
        self.shape = shape
        self.num_layers = num_layers
        self._stage_ends = [num_layers * (i + 1) // shape.layer_parallel for i in range(shape.layer_parallel - 1)]
        self._experts: dict[tuple[int, int], int] = {}
        self._dense: dict[tuple[int, int], int] = {}
        places: dict[int, int] = {}
        for site in sorted(sites, key=lambda s: (s.layer, s.site)):
            at = (site.layer, int(site.site))
            if site.num_experts:
                self._experts[at] = site.num_experts
                continue
            place = places[site.layer] = places.get(site.layer, -1) + 1
            column = (site.layer + place) % shape.expert_parallel
            self._dense[at] = self.shard(self.stage_of(site.layer), column)

    def shard(self, stage: int, column: int) -> int:
        return stage * self.shape.expert_parallel + column

    def stage_of(self, layer: int) -> int:
        return bisect_right(self._stage_ends, layer)

    def columns_of(self, layer: int) -> range:
        """The shards of a layer's stage, in order of columns."""
        first = self.shard(self.stage_of(layer), 0)
        return range(first, first + self.shape.expert_parallel)

    def dense_shard(self, layer: int, site: int) -> int:
        """The one owner of a dense site. KeyError where the base has no such site."""
        return self._dense[layer, int(site)]

    def one_owner(self, layer: int, site: int) -> int | None:
        """The shard that computes a site alone; None where its experts are cut over several columns."""
        owner = self._dense.get((layer, int(site)))
        if owner is None and self.shape.expert_parallel == 1:
            return self.shard(self.stage_of(layer), 0)
        return owner

    def first_expert(self, column: int, num_experts: int) -> int:
        """The least expert of a column; that of the column after the last is `num_experts`."""
        return -(-column * num_experts // self.shape.expert_parallel)

    def experts(self, shard: int, layer: int, num_experts: int) -> range:
        """The experts of a layer that a shard owns, of `num_experts`: none where the layer is of another stage."""
        stage, column = divmod(shard, self.shape.expert_parallel)
        if stage != self.stage_of(layer):
            return range(0)
        return range(self.first_expert(column, num_experts), self.first_expert(column + 1, num_experts))

    def owns(self, shard: int, layer: int, site: int) -> bool:
        """Whether a shard computes any of this site; False where the base has no such site."""
        at = (layer, int(site))
        if num_experts := self._experts.get(at):
            return bool(self.experts(shard, layer, num_experts))
        return self._dense.get(at) == shard
