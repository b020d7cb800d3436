"""Ways of serving one load beside each other; and a recorded run of the real system beside its simulation."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from infinilora.planner.jsonfile import read_json
from infinilora.planner.simulate.costs import Costs
from infinilora.planner.simulate.fleet import Fleet, check_room
from infinilora.planner.simulate.load import MAX_TOKENS, Request
from infinilora.planner.simulate.outcome import Outcome, Slo, quantiles
from infinilora.planner.simulate.run import serviceable_rate, simulate, simulate_load
from infinilora.planner.simulate.scenario import Scenario, Way
from infinilora.planner.workload import MAX_BYTES, MAX_NUMBER
from infinilora.protocol.errors import InvalidRequest

TOLERANCE = 0.15
"""Of the measured figure, that a prediction may be off."""


class Served(msgspec.Struct, frozen=True):
    """One way's result: `rate` is the load's, or the serviceable one where it was searched for (0: there is none)."""

    way: str
    rate: float
    outcome: Outcome | None


def run_ways(scenario: Scenario, ways: Sequence[Way], *, seed: int, search: bool) -> list[Served]:
    """The same requests for every way."""
    costs, sizes = scenario.read_costs(), scenario.sizes()
    fleets = [replace(scenario.fleet, mode=way.mode, routing=way.routing) for way in ways]
    for fleet in fleets:
        check_room(fleet, sizes)
    found = []
    for way, fleet in zip(ways, fleets, strict=True):
        if search:
            rate, outcome = serviceable_rate(fleet, costs, sizes, scenario.load, scenario.slo, seed=seed)
            found.append(Served(way.name, rate, outcome))
        else:
            outcome = simulate_load(fleet, costs, sizes, scenario.load, scenario.slo, seed=seed)
            found.append(Served(way.name, scenario.load.rate, outcome))
    return found


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A request as `infinilora bench record` wrote it; adapter -1 is the base."""

    arrival_s: float
    adapter: int
    prompt: int
    output: int
    ttft_s: float
    end_s: float


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A file of it. `fleet`: what it ran on, in the words of a scenario."""

    requests: list[Recorded]
    fleet: Fleet = Fleet()
    adapter_bytes: tuple[int, ...] = ()


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Measured, predicted, and how far off: predicted / measured - 1."""

    record: str
    tokens_per_s: tuple[float, float]
    ttft_p95_s: tuple[float, float]
    off_tokens: float
    off_ttft: float
    is_within: bool


def read_record(path: Path) -> Record:
    record = read_json(path, Record, param="record", wanted="what bench record writes")
    if not record.requests:
        raise InvalidRequest(f"{path}: found no requests; wanted one or more", param="record")
    if not all(1 <= size <= MAX_BYTES // len(record.adapter_bytes) for size in record.adapter_bytes):
        raise InvalidRequest(f"{path}: adapter_bytes: found {list(record.adapter_bytes)}; wanted 1 or more each")
    for index, one in enumerate(record.requests):
        has_tokens = 1 <= one.prompt <= MAX_TOKENS and 1 <= one.output <= MAX_TOKENS
        has_times = 0 <= one.arrival_s < one.end_s <= MAX_NUMBER and 0 < one.ttft_s <= MAX_NUMBER
        if not (has_tokens and has_times and -1 <= one.adapter < len(record.adapter_bytes)):
            times = "an arrival from 0, a first token and an end after it"
            wanted = f"tokens from 1, {times}, an adapter below {len(record.adapter_bytes)}"
            raise InvalidRequest(f"{path}: requests[{index}]: found {one}; wanted {wanted}", param="record")
    return record


def compare(path: Path, costs: Costs) -> Compared:
    """Play a record's requests, as they arrived and as long as they were, in its own fleet."""
    record = read_record(path)
    ordered = sorted(record.requests, key=lambda one: one.arrival_s)
    check_room(record.fleet, record.adapter_bytes)
    first_s = ordered[0].arrival_s
    requests = [Request(i, o.arrival_s - first_s, o.adapter, o.prompt, o.output) for i, o in enumerate(ordered)]
    predicted = simulate(record.fleet, costs, record.adapter_bytes, requests, Slo())
    measured_s = max(one.end_s for one in ordered) - first_s
    measured = sum(one.output for one in ordered) / measured_s
    p95_s = quantiles([one.ttft_s for one in ordered]).p95
    off_tokens, off_ttft = predicted.output_tokens_per_s / measured - 1, predicted.ttft_s.p95 / p95_s - 1
    return Compared(
        record=path.name,
        tokens_per_s=(measured, predicted.output_tokens_per_s),
        ttft_p95_s=(p95_s, predicted.ttft_s.p95),
        off_tokens=off_tokens,
        off_ttft=off_ttft,
        is_within=max(abs(off_tokens), abs(off_ttft)) <= TOLERANCE,
    )
