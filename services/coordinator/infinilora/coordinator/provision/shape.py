"""How fast a group of a shape answers, and how much of an adapter lies on its fullest shard.

A group is expert_parallel x layer_parallel shards: its layers in contiguous stages, the experts of a stage over
its shards, each dense site of a stage whole on one of them. An engine asks once for each site of each layer and waits:

    call     2 x (call_s + (fan-out - 1) x peer_s) + service + queue
    service  launch_s + weights read / memory bandwidth + rows moved / link bandwidth, the fullest shard's part
    queue    rho / 2(1 - rho) services, rho the share of time in which the other engines keep a stage busy

Nothing overlaps here: the times are those of a system that waits, an upper bound. Speeds are arguments.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from infinilora.coordinator.provision.admission import in_use
from infinilora.coordinator.provision.pools import Demand
from infinilora.coordinator.provision.popularity import Floats

ROW_BYTES = 2
"""Of a number of an activation on the link: engines on GPUs compute in 16 bits."""


@dataclass(frozen=True, slots=True)
class SiteShape:
    """One site of one layer: numbers sent and returned for a row; of A and B for each rank. 0 experts: dense."""

    sent: int
    returned: int
    numbers: int
    experts: int = 0
    top_k: int = 0


Sites = tuple[SiteShape, ...]
Layers = tuple[Sites, ...]


@dataclass(frozen=True, slots=True)
class Speeds:
    """What the hardware does, in seconds and bytes a second; `peers` is the most shards that a stage may have."""

    call_s: float
    peer_s: float
    launch_s: float
    link_bytes_per_s: float
    memory_bytes_per_s: float
    cold_bytes_per_s: float
    base_step_s: float
    ttft_floor_s: float
    peers: int


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """expert_parallel x layer_parallel."""

    experts: int
    layers: int

    @property
    def shards(self) -> int:
        return self.experts * self.layers


@dataclass(frozen=True, slots=True)
class Traffic:
    """A group's part of one engine's step: rows, bytes of their distinct adapters, mean bytes of a row's adapter."""

    engines: int
    rows: float
    distinct_bytes: float
    row_bytes: float


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A base's layers with the experts of each over `across` shards; `fullest` [L]: numbers on each one's fullest."""

    layers: Layers
    across: int
    fullest: Floats

    def fullest_share(self, stages: int) -> float:
        """The part of every adapter that lies on the fullest shard of a group of so many stages."""
        return _fullest_stage(self.fullest, stages) / numbers_of(self.layers)


@dataclass(frozen=True, slots=True, eq=False)
class Pace:
    """One group's part of an engine's step, before it is cut into stages: `alone_s` of a step with nobody else there.

    `services_s` [L] of it keep a shard of each layer busy.
    """

    engines: int
    alone_s: float
    services_s: Floats

    def step_s(self, stages: int) -> float:
        """Seconds of an engine's step, the waits for the other engines' calls included.

        step = alone + services x rho / 2(1 - rho) with rho = others / step: the larger root of a quadratic equation.
        """
        others = (self.engines - 1) * _fullest_stage(self.services_s, stages)
        spread = math.sqrt((self.alone_s - others) ** 2 + 2 * float(self.services_s.sum()) * others)
        return (self.alone_s + others + spread) / 2


def splits(layers: Layers, peers: int) -> list[Split]:
    """Every way in which a base's experts are split evenly over at most so many shards; without experts, one."""
    experts = max(site.experts for sites in layers for site in sites)
    across = [x for x in range(1, peers + 1) if x == 1 or (experts and experts % x == 0)]
    return [Split(layers, x, _by_layer(layers, partial(_fullest, across=x))) for x in across]


def numbers_of(layers: Layers) -> int:
    """Numbers of an adapter for each rank."""
    return sum(site.numbers for sites in layers for site in sites)


def _by_layer(layers: Layers, measure: Callable[[Sites], float]) -> Floats:
    """A measure of each layer, [L]; of layers that are alike it is taken once."""
    taken = {sites: measure(sites) for sites in set(layers)}
    return np.array([taken[sites] for sites in layers])


def _fullest(sites: Sites, across: int) -> float:
    """Numbers on the fullest shard of a stage of one layer: dense sites, the largest first, to the emptiest shard."""
    shards = [sum(site.numbers for site in sites if site.experts) / across] * across
    for numbers in sorted((site.numbers for site in sites if not site.experts), reverse=True):
        shards[shards.index(min(shards))] += numbers
    return max(shards)


def _fullest_stage(of_layers: Floats, num_stages: int) -> float:
    """The largest sum over contiguous stages whose numbers of layers differ by one at most."""
    starts = len(of_layers) * np.arange(num_stages) // num_stages
    return float(np.add.reduceat(of_layers, starts).max())


def traffic_of(group: Demand, engines: int) -> Traffic:
    """Rows in flight spread evenly over the engines; each decodes one row of each in a step."""
    offered = group.offered / engines
    sizes = group.num_bytes.astype(np.float64)
    rows = float(offered.sum())
    return Traffic(engines, rows, float(in_use(offered) @ sizes), float(offered @ sizes) / rows)


def pace(split: Split, traffic: Traffic, speeds: Speeds) -> Pace:
    """What a step costs in a group split like this."""
    numbers = numbers_of(split.layers)

    def service(sites: Sites) -> float:
        return sum(_service_s(site, _fan_out(site, split.across), traffic, speeds, numbers) for site in sites)

    def trips(sites: Sites) -> float:
        return sum(2 * (speeds.call_s + (_fan_out(site, split.across) - 1) * speeds.peer_s) for site in sites)

    services = _by_layer(split.layers, service)
    waits = float(services.sum()) + float(_by_layer(split.layers, trips).sum())
    return Pace(traffic.engines, speeds.base_step_s + waits, services)


def _fan_out(site: SiteShape, across: int) -> int:
    return across if site.experts else 1


def _service_s(site: SiteShape, fan_out: int, traffic: Traffic, speeds: Speeds, numbers: int) -> float:
    """Seconds that a call keeps a shard busy. A row reads top_k of the experts, and no expert is read twice."""
    read = traffic.distinct_bytes
    if site.experts:
        read = min(read, traffic.rows * traffic.row_bytes * site.top_k / site.experts)
    weights_s = read * site.numbers / numbers / fan_out / speeds.memory_bytes_per_s
    moved = traffic.rows * (site.sent + site.returned) * ROW_BYTES / fan_out
    return speeds.launch_s + weights_s + moved / speeds.link_bytes_per_s


def ttft_s(largest_bytes: float, fullest_share: float, step_s: float, speeds: Speeds) -> float:
    """Seconds to the first token of a request that is admitted at once and whose adapter is not there yet.

    Every shard brings in its own part of the adapter; the fullest is last.
    """
    cold = largest_bytes * fullest_share / speeds.cold_bytes_per_s
    return speeds.ttft_floor_s + cold + step_s - speeds.base_step_s
