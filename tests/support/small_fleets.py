"""Costs and fleets of the simulator in round numbers, so that what comes out can be reckoned by hand."""

from typing import Any

import msgspec

from infinilora.planner.constants import Constant
from infinilora.planner.simulate.costs import BaseCost, Costs, DeltaCost, LoadCost
from infinilora.planner.simulate.fleet import Fleet
from infinilora.planner.simulate.load import Request
from infinilora.planner.simulate.outcome import Ended
from infinilora.planner.simulate.world import World

MB = 1_000_000


def number(value: float) -> Constant:
    return Constant(value, "a round number")


def costs(
    *,
    fixed_s: float = 0.01,
    row_s: float = 0.001,
    token_s: float = 0.0,
    context_s: float = 0.0,
    floor_s: float = 0.0,
    join_s: float = 0.0,
    local: tuple[float, ...] = (0.0, 0.0, 0.0),
    remote: tuple[float, ...] = (0.0, 0.0, 0.0),
    service: tuple[float, ...] = (0.0, 0.0, 0.0),
    hidden: float = 0.0,
    latency_s: float = 0.0,
    store: float = 1e8,
    host: float = 1e9,
    first: float = 1.0,
    gateway_s: float = 0.0,
    lease_s: float = 0.0,
) -> Costs:
    def line(numbers: tuple[float, ...]) -> DeltaCost:
        """The last number may be left out."""
        return DeltaCost(*map(number, (*numbers, 0.0)[:4]))

    return Costs(
        name="round numbers",
        is_measured=False,
        base=BaseCost(*map(number, (fixed_s, row_s, token_s, context_s, floor_s, join_s))),
        local=line(local),
        remote=line(remote),
        service=line(service),
        load=LoadCost(number(latency_s), number(store), number(host), number(first)),
        read_share=number(1.0),
        hidden=number(hidden),
        gateway_s=number(gateway_s),
        lease_s=number(lease_s),
        wire_bytes_per_row=number(1000.0),
    )


def fleet(**changes: Any) -> Fleet:
    """One coupled engine with room for all, unless changed."""
    told: dict[str, Any] = {"mode": "coupled", "engines": 1, "tpot_ms": 0, "engine_bytes": 1000 * MB}
    return msgspec.convert(told | changes, Fleet)


def asks(*rows: tuple[float, int, int, int]) -> list[Request]:
    """(arrival, adapter, prompt, output) each."""
    return [Request(i, *row) for i, row in enumerate(rows)]


def play(
    fleet: Fleet, costs: Costs, requests: list[Request], *, sizes: list[int] | None = None, can_stretch: bool = True
) -> tuple[list[Ended], World]:
    """What became of each, by its number."""
    ended: list[Ended] = []
    world = World(fleet, costs, sizes or [10 * MB] * 8, requests, on_end=ended.append, can_stretch=can_stretch)
    world.run()
    return sorted(ended, key=lambda one: one.id), world
