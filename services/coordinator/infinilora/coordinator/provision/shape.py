"""How fast a group of a shape answers, and how much of an adapter lies on its fullest shard.

A group is expert_parallel x layer_parallel shards: its layers in contiguous stages, the experts of a stage over
its shards, each dense site of a stage whole on one of them. An engine asks once for each site of each layer and waits:

    call     2 x (call_s + (fan-out - 1) x peer_s) + service + queue
    service  launch_s + weights read / memory bandwidth + rows moved / link bandwidth, the fullest shard's part
    queue    rho / 2(1 - rho) services, rho the share of time in which the other engines keep a stage busy

Nothing overlaps here: the times are those of a system that waits, an upper bound. Speeds are arguments.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from infinilora.coordinator.provision.admission import in_use
from infinilora.coordinator.provision.pools import Demand

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


Layers = tuple[tuple[SiteShape, ...], ...]


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


def shapes(layers: Layers, peers: int) -> list[Shape]:
    """Every shape that a base allows: experts split evenly, no stage without a layer."""
    experts = max(site.experts for sites in layers for site in sites)
    across = [x for x in range(1, peers + 1) if x == 1 or (experts and experts % x == 0)]
    return [Shape(x, y) for x in across for y in range(1, len(layers) + 1)]


def numbers_of(layers: Layers) -> int:
    """Numbers of an adapter for each rank."""
    return sum(site.numbers for sites in layers for site in sites)


def fullest_share(layers: Layers, shape: Shape) -> float:
    """The part of every adapter that lies on the group's fullest shard."""
    return max(_stages([_fullest(sites, shape.experts) for sites in layers], shape.layers)) / numbers_of(layers)


def _fullest(sites: tuple[SiteShape, ...], across: int) -> float:
    """Numbers on the fullest shard of a stage of one layer: dense sites, the largest first, to the emptiest shard."""
    shards = [sum(site.numbers for site in sites if site.experts) / across] * across
    for numbers in sorted((site.numbers for site in sites if not site.experts), reverse=True):
        shards[shards.index(min(shards))] += numbers
    return max(shards)


def _stages(of_layers: list[float], num_stages: int) -> list[float]:
    """Sums over contiguous stages whose numbers of layers differ by one at most."""
    ends = [len(of_layers) * stage // num_stages for stage in range(num_stages + 1)]
    sums = [0.0, *accumulate(of_layers)]
    return [sums[end] - sums[start] for start, end in pairwise(ends)]


def traffic_of(group: Demand, engines: int) -> Traffic:
    """Rows in flight spread evenly over the engines; each decodes one row of each in a step."""
    offered = group.offered / engines
    sizes = group.num_bytes.astype(np.float64)
    rows = float(offered.sum())
    return Traffic(engines, rows, float(in_use(offered) @ sizes), float(offered @ sizes) / rows)


def step_s(layers: Layers, shape: Shape, traffic: Traffic, speeds: Speeds) -> float:
    """Seconds of an engine's step, the waits for this group's deltas included."""
    numbers = numbers_of(layers)
    trips = 0.0
    services = []
    for sites in layers:
        trips += sum(2 * (speeds.call_s + (_across(site, shape) - 1) * speeds.peer_s) for site in sites)
        services.append(sum(_service_s(site, _across(site, shape), traffic, speeds, numbers) for site in sites))
    service = sum(services)
    alone = speeds.base_step_s + trips + service
    # step = alone + service x rho / 2(1 - rho) with rho = others / step: the larger root of a quadratic equation.
    others = (traffic.engines - 1) * max(_stages(services, shape.layers))
    return (alone + others + math.sqrt((alone - others) ** 2 + 2 * service * others)) / 2


def _across(site: SiteShape, shape: Shape) -> int:
    return shape.experts if site.experts else 1


def _service_s(site: SiteShape, across: int, traffic: Traffic, speeds: Speeds, numbers: int) -> float:
    """Seconds that a call keeps a shard busy. A row reads top_k of the experts, and no expert is read twice."""
    read = traffic.distinct_bytes
    if site.experts:
        read = min(read, traffic.rows * traffic.row_bytes * site.top_k / site.experts)
    weights_s = read * site.numbers / numbers / across / speeds.memory_bytes_per_s
    moved = traffic.rows * (site.sent + site.returned) * ROW_BYTES / across
    return speeds.launch_s + weights_s + moved / speeds.link_bytes_per_s


def ttft_s(layers: Layers, shape: Shape, largest_bytes: int, step: float, speeds: Speeds) -> float:
    """Seconds to the first token of a request that is admitted at once and whose adapter is not there yet.

    Every shard brings in its own part of the adapter; the fullest is last.
    """
    cold = largest_bytes * fullest_share(layers, shape) / speeds.cold_bytes_per_s
    return speeds.ttft_floor_s + cold + step - speeds.base_step_s
