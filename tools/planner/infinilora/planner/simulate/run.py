"""One run of the simulator, and the search for the rate that a fleet can serve."""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from infinilora.planner.simulate.costs import Costs
from infinilora.planner.simulate.fleet import Fleet
from infinilora.planner.simulate.load import MAX_REQUESTS, Load, Request, requests_of
from infinilora.planner.simulate.outcome import (
    ATTAINED,
    Ended,
    Moved,
    Outcome,
    Slo,
    attainment,
    jain,
    percentiles,
    quantiles,
    tpots,
    ttfts,
)
from infinilora.planner.simulate.world import World
from infinilora.protocol.errors import InvalidRequest

LATE_SHARE = 0.05
"""More late first tokens than this, and the P95 is missed whatever comes after."""
PRECISION = 0.05
"""Of the rate that a search finds."""
MAX_DOUBLINGS = 24
MOST_BEATS = 1_000_000
"""Heartbeats of a run: at rates for which it takes more, each request has long been alone."""
SEARCH_S = 20.0
"""Of virtual time that each rate of a search is kept up at least: a queue that grows slowly is seen."""


def simulate(
    fleet: Fleet,
    costs: Costs,
    sizes: Sequence[int],
    requests: Sequence[Request],
    slo: Slo,
    *,
    num_warmup: int = 0,
    may_leave: bool = False,
    can_stretch: bool = True,
) -> Outcome:
    """Run all requests. `may_leave`: end as soon as the P95 of TTFT cannot be met any more."""
    ended: list[Ended] = []
    late = 0
    most_late = LATE_SHARE * (len(requests) - num_warmup) if may_leave else float("inf")

    def on_end(one: Ended) -> None:
        nonlocal late
        if one.id >= num_warmup:
            ended.append(one)
            late += one.ttft_s is None or one.ttft_s > slo.ttft_s or not one.is_done

    world = World(fleet, costs, sizes, requests, on_end=on_end, can_stretch=can_stretch)
    world.run(lambda: late > most_late)
    return _outcome(world, costs, requests, ended, slo, num_warmup)


def _outcome(
    world: World, costs: Costs, requests: Sequence[Request], ended: list[Ended], slo: Slo, num_warmup: int
) -> Outcome:
    pools = [*world.groups.values(), *world.own.values()]
    seconds = max(world.timeline.now - requests[num_warmup].arrival_s, 1e-9)
    first_s, shares = ttfts(ended), attainment(ended, slo)
    ttft, tpot = quantiles(first_s), quantiles(tpots(ended) or [0.0])
    is_whole = world.num_ended == len(requests)
    return Outcome(
        requests=len(ended),
        failed=sum(not one.is_done for one in ended),
        rate=len(ended) / seconds,
        output_tokens_per_s=sum(requests[one.id].output for one in ended if one.is_done) / seconds,
        ttft_s=ttft,
        ttft_percentiles_s=percentiles(first_s),
        tpot_s=tpot,
        is_within_slo=is_whole and ttft.p95 <= slo.ttft_s and tpot.mean <= slo.tpot_s,
        requests_within_slo=sum(map(slo.is_met, ended)) / len(ended),
        adapters_within_slo=float((shares > ATTAINED).mean()),
        jain=jain(shares),
        moved=Moved(
            fetched_bytes=sum(pool.fetched_bytes for pool in pools),
            staged_bytes=sum(pool.moved_bytes for pool in pools),
            link_bytes=int(world.link_rows * costs.wire_bytes_per_row.value),
            loads=sum(pool.num_loads for pool in pools),
        ),
        preemptions=sum(engine.num_preempted for engine in world.engines.values()),
        steps=sum(engine.num_steps for engine in world.engines.values()),
        events=world.timeline.num_events,
        virtual_s=world.timeline.now,
        is_whole=is_whole,
    )


def simulate_load(
    fleet: Fleet, costs: Costs, sizes: Sequence[int], load: Load, slo: Slo, *, seed: int, may_leave: bool = False
) -> Outcome:
    """Run a load's requests of this seed."""
    if len(sizes) != load.adapters:
        raise InvalidRequest(f"found sizes of {len(sizes)} adapters; wanted {load.adapters}", param="adapters")
    requests = requests_of(load, seed)
    warm = int(load.warmup * load.requests)
    return simulate(fleet, costs, sizes, requests, slo, num_warmup=warm, may_leave=may_leave)


def serviceable(is_met: Callable[[float], bool], first: float) -> float:
    """The largest rate for which `is_met`, to PRECISION, by doubling and halving; 0 where even tiny ones are not.

    A rate that is met by luck above one that is not is not found: rates are taken to be one stretch.
    """
    good, bad, rate = 0.0, 0.0, first
    for _ in range(MAX_DOUBLINGS):
        if is_met(rate):
            good = rate
        else:
            bad = rate
        if good and bad:
            break
        rate = rate / 2 if bad else rate * 2
    while good and bad and bad - good > PRECISION * good:
        middle = (good * bad) ** 0.5
        good, bad = (middle, bad) if is_met(middle) else (good, middle)
    return good


def serviceable_rate(
    fleet: Fleet, costs: Costs, sizes: Sequence[int], load: Load, slo: Slo, *, seed: int
) -> tuple[float, Outcome | None]:
    """The largest rate that this fleet serves within the SLO, and what came of the run at it."""
    found: dict[float, Outcome] = {}

    def is_met(rate: float) -> bool:
        num_requests = min(max(load.requests, int(rate * SEARCH_S)), MAX_REQUESTS)
        if num_requests > rate * MOST_BEATS * fleet.heartbeat_s:
            return False
        at = replace(load, rate=rate, requests=num_requests)
        found[rate] = simulate_load(fleet, costs, sizes, at, slo, seed=seed, may_leave=True)
        return found[rate].is_within_slo

    rate = serviceable(is_met, load.rate)
    return rate, found.get(rate)
