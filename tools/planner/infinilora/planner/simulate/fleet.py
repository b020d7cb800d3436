"""What a simulated fleet is made of, as a person says it."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from infinilora.planner.workload import MAX_BYTES
from infinilora.protocol.errors import InvalidRequest

Mode = Literal["coupled", "disaggregated", "hybrid"]
Routing = Literal["load", "warm", "home"]
MAX_MEMBERS = 1000


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member dies at `at_s` and is back, empty, `for_s` later."""

    kind: Literal["engine", "group"]
    index: int
    at_s: float
    for_s: float


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines, LoRA groups, and how requests find them.

    `routing`: `load` knows no adapters; `warm` is the gateway's own, which prefers engines that have the adapter by
    a little; `home` gives each adapter engines of its own by the coordinator's placement, and uses no others.
    """

    mode: Mode = "disaggregated"
    routing: Routing = "warm"
    gateways: int = 1
    engines: int = 4
    groups: int = 1
    max_running: int = 64
    step_tokens: int = 512
    tpot_ms: int = 100
    kv_tokens: int = 65536
    """Of one engine."""
    engine_bytes: int = 1 << 30
    """For adapters, in each engine: coupled and hybrid."""
    group_bytes: int = 8 << 30
    """For adapters, in each group: disaggregated and hybrid."""
    slots: int = 1024
    host_bytes: int = 1 << 40
    """For adapters in host memory, beside each pool."""
    is_host_warm: bool = False
    """All adapters are there at the start, as far as they fit."""
    is_pool_warm: bool = False
    """They are in every pool at the start, the first adapters first, as far as they fit."""
    heartbeat_s: float = 0.5
    detect_s: float = 0.05
    """From a death to the first retry elsewhere: the connection ends at once."""
    replan_s: float = 10.0
    failures: tuple[Failure, ...] = ()

    @property
    def has_groups(self) -> bool:
        return self.mode != "coupled"

    @property
    def has_pools(self) -> bool:
        return self.mode != "disaggregated"


def check_fleet(fleet: Fleet) -> None:
    """InvalidRequest names the field."""
    for name in ("gateways", "engines", "groups"):
        _within(getattr(fleet, name), 1, MAX_MEMBERS, name)
    for name in ("max_running", "step_tokens", "slots"):
        _within(getattr(fleet, name), 1, 1_000_000, name)
    _within(fleet.kv_tokens, 16, 1 << 26, "kv_tokens")
    for name in ("engine_bytes", "group_bytes", "host_bytes"):
        _within(getattr(fleet, name), 0 if name == "host_bytes" else 1, MAX_BYTES, name)
    for name in ("heartbeat_s", "replan_s"):
        _within(getattr(fleet, name), 0.01, 1e9, name)
    _within(fleet.detect_s, 0, 1e6, "detect_s")
    _within(fleet.tpot_ms, 0, 1_000_000, "tpot_ms")
    for place, failure in enumerate(fleet.failures):
        members = fleet.engines if failure.kind == "engine" else fleet.groups if fleet.has_groups else 0
        _within(failure.index, 0, members - 1, f"failures[{place}].index")
        _within(failure.at_s, 0, 1e9, f"failures[{place}].at_s")
        _within(failure.for_s, 0, 1e9, f"failures[{place}].for_s")


def check_room(fleet: Fleet, adapter_bytes: Iterable[int]) -> None:
    """InvalidRequest for an adapter that no pool could ever hold: its requests would wait for ever."""
    where = "group_bytes" if fleet.has_groups else "engine_bytes"
    room, largest = getattr(fleet, where), max(adapter_bytes, default=0)
    if largest > room:
        told = f"found an adapter of {largest} bytes; wanted {room} at most, what fleet.{where} has room for"
        raise InvalidRequest(f"adapter_bytes: {told}", param="adapter_bytes")


def _within(value: float, least: float, most: float, param: str) -> None:
    if not least <= value <= most:
        raise InvalidRequest(f"found {value:g}; wanted a number from {least:g} to {most:g}", param=param)
