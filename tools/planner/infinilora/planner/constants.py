"""The speeds and prices that planning takes for granted, each with its source, in one file that can be replaced."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from infinilora.coordinator.provision.shape import Speeds
from infinilora.planner.jsonfile import read_json
from infinilora.protocol.errors import InvalidRequest

FILE = Path(__file__).with_name("constants.json")

Tier = Literal["host", "store"]
"""Where an adapter that is not in the pool is expected: in the memory of the group's hosts, or in the store only."""


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number, and why it is that."""

    value: float
    source: str


class Constants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What constants.json holds: seconds, bytes a second, counts, and a price of any currency."""

    call_s: Constant
    peer_s: Constant
    launch_s: Constant
    link_bytes_per_s: Constant
    memory_bytes_per_s: Constant
    host_bytes_per_s: Constant
    store_bytes_per_s: Constant
    base_step_s: Constant
    ttft_floor_s: Constant
    rows_per_engine: Constant
    peers: Constant
    gpu_hour_price: Constant

    def speeds(self, cold_from: Tier) -> Speeds:
        cold = self.host_bytes_per_s if cold_from == "host" else self.store_bytes_per_s
        return Speeds(
            call_s=self.call_s.value,
            peer_s=self.peer_s.value,
            launch_s=self.launch_s.value,
            link_bytes_per_s=self.link_bytes_per_s.value,
            memory_bytes_per_s=self.memory_bytes_per_s.value,
            cold_bytes_per_s=cold.value,
            base_step_s=self.base_step_s.value,
            ttft_floor_s=self.ttft_floor_s.value,
            peers=int(self.peers.value),
        )


def read_constants(path: Path = FILE) -> Constants:
    """InvalidRequest names the file and the constant that is missing, unknown or not above 0."""
    constants = read_json(path, Constants, param="constants", wanted=f"the form of {FILE.name}")
    for name in Constants.__struct_fields__:
        value = getattr(constants, name).value
        least = 1 if name in ("peers", "rows_per_engine") else 0
        if not (value > 0 and least <= value < float("inf")):
            wanted = "1 or more" if least else "more than 0"
            raise InvalidRequest(f"{path}: {name}: found {value}; wanted {wanted}", param="constants")
    return constants


def with_measured(constants: Constants, measured: Mapping[str, float], source: str) -> Constants:
    """Those that were measured, in place of what they were, with where they are from; the others as they are."""
    return msgspec.structs.replace(constants, **{name: Constant(value, source) for name, value in measured.items()})


def write_constants(constants: Constants, path: Path) -> None:
    """As `read_constants` reads it. InvalidRequest where it cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(constants), indent=2).decode() + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"found {path}, {error.strerror}; wanted a file to write", param="out") from None
