"""What is to be simulated, as a JSON file and some words that change it: `fleet.engines=8`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from infinilora.planner.jsonfile import read_json
from infinilora.planner.simulate.costs import CPU_FILE, Costs, read_costs
from infinilora.planner.simulate.fleet import Fleet, Mode, Routing, check_fleet
from infinilora.planner.simulate.load import Load, check_load
from infinilora.planner.simulate.outcome import Slo
from infinilora.planner.simulate.run import MOST_BEATS
from infinilora.planner.workload import MAX_BYTES
from infinilora.protocol.errors import InvalidRequest


class Way(msgspec.Struct, frozen=True):
    """A way of serving that is compared with others."""

    mode: Mode
    routing: Routing

    @property
    def name(self) -> str:
        return f"{self.mode}:{self.routing}"


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet, its costs and a load. `adapter_bytes` are dealt in turn, from the most popular adapter on."""

    fleet: Fleet = Fleet()
    load: Load = Load(rate=8.0, requests=2000, prompt=32, output=48, output_cv=0.5)
    slo: Slo = Slo()
    adapter_bytes: tuple[int, ...] = (10_000_000,)
    costs: str = "cpu"
    """`cpu`, or the name of a file."""

    def read_costs(self) -> Costs:
        return read_costs(CPU_FILE if self.costs == "cpu" else Path(self.costs))

    def sizes(self) -> list[int]:
        return [self.adapter_bytes[i % len(self.adapter_bytes)] for i in range(self.load.adapters)]

    def ways(self, text: str) -> tuple[Way, ...]:
        """`coupled:home,disaggregated`: each a mode, and a routing if it is not the fleet's. Empty: the fleet's own."""
        if not text:
            return (Way(self.fleet.mode, self.fleet.routing),)
        words = [part.strip().partition(":") for part in text.split(",")]
        try:
            return tuple(
                msgspec.convert({"mode": mode, "routing": routing or self.fleet.routing}, Way)
                for mode, _, routing in words
            )
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"found {text!r}: {error}", param="ways") from None


def read_scenario(path: Path | None, changes: list[str]) -> Scenario:
    """InvalidRequest names the file or the word, the place in it, what was found and what was wanted."""
    told: dict[str, object] = {}
    if path is not None:
        told = read_json(path, dict[str, object], param="scenario", wanted="an object")
    for change in changes:
        _change(told, change)
    try:
        scenario = msgspec.convert(told, Scenario)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{path or 'the scenario'}: {error}", param="scenario") from None
    check_scenario(scenario)
    return scenario


def check_scenario(scenario: Scenario) -> None:
    """InvalidRequest names the place first, as `--set` takes it."""
    try:
        _check(scenario)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error.param}: {error.message}", param=error.param) from None


def _check(scenario: Scenario) -> None:
    with _part("fleet"):
        check_fleet(scenario.fleet)
    with _part("load"):
        check_load(scenario.load)
    check_span(scenario.fleet, scenario.load)
    sizes, most = scenario.adapter_bytes, MAX_BYTES // scenario.load.adapters
    if not sizes or not all(1 <= size <= most for size in sizes):
        told = f"found {list(sizes)}; wanted sizes of 1 byte or more, {most} at most"
        raise InvalidRequest(told, param="adapter_bytes")
    for name in ("ttft_s", "tpot_s"):
        if not getattr(scenario.slo, name) > 0:
            raise InvalidRequest(f"found {getattr(scenario.slo, name):g}; wanted a number above 0", param=f"slo.{name}")


def check_span(fleet: Fleet, load: Load) -> None:
    """InvalidRequest for a load so thin that a run would be nothing but heartbeats."""
    least = load.requests / (MOST_BEATS * fleet.heartbeat_s)
    if load.rate < least:
        told = f"found {load.rate:g}; wanted {least:g} or more for {load.requests} requests"
        raise InvalidRequest(f"{told}: a run has {MOST_BEATS:g} heartbeats at most", param="load.rate")


@contextmanager
def _part(name: str) -> Iterator[None]:
    """What is wrong within is wrong in this part."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param=f"{name}.{error.param}") from None


def _change(told: dict[str, object], change: str) -> None:
    """Put a value in its place; it is JSON, else a word as it stands."""
    place, equals, text = change.partition("=")
    *outer, last = place.split(".")
    if not (equals and last and len(outer) <= 1):
        raise InvalidRequest(f"found {change!r}; wanted PLACE=VALUE, as in fleet.engines=8", param="set")
    try:
        value: object = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = text
    for name in outer:
        found = told.setdefault(name, _defaults(name))
        if not isinstance(found, dict):
            raise InvalidRequest(f"found {change!r}; wanted a place that is there: {name} has no parts", param="set")
        told = found
    told[last] = value


def _defaults(name: str) -> object:
    """What a part is where the file says nothing of it."""
    defaults: dict[str, object] = msgspec.to_builtins(Scenario())
    return defaults.get(name, {})
