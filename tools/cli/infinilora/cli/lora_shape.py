"""The shape of a local system's LoRA server where nobody says it: by the cost model, with what was measured here."""

from pathlib import Path

from infinilora.cli.link_command import FILE, TRIPS, measured
from infinilora.coordinator.provision.auto import Choice, Room, auto_shape
from infinilora.coordinator.provision.shape import Traffic
from infinilora.planner.constants import Constants, read_constants, write_constants
from infinilora.planner.geometry import TARGETS, find_base
from infinilora.protocol.shards import Shape

ROWS, ADAPTERS, RANK, NUMBER_BYTES = 32, 16, 16, 2
"""The load that a shape is chosen for: a decode step of so many rows of so many adapters, saved in BF16."""
POOL_BYTES = 1 << 62
"""A local system's pool is as large as each shard is told: it is no reason for more of them."""


def constants_of(var_dir: Path, *, threads: int) -> Constants:
    """Those of this directory; measured now, and kept, if nobody has measured yet."""
    file = var_dir / FILE
    if not file.is_file():
        var_dir.mkdir(parents=True, exist_ok=True)
        write_constants(measured(n=TRIPS, threads=threads), file)
    return read_constants(file)


def choose(model: Path, constants: Constants, *, engines: int, lora_threads: int) -> Choice:
    """Shards of one machine share its memory, and there are at most as many as the LoRA server has threads.

    InvalidRequest for a model whose sites planning does not know.
    """
    base = find_base(str(model), frozenset(TARGETS))
    adapter = base.adapter_bytes(RANK, NUMBER_BYTES)
    traffic = Traffic(engines, ROWS, float(ADAPTERS * adapter), float(adapter))
    room = Room(max_shards=lora_threads, shard_bytes=POOL_BYTES, shared=True)
    return auto_shape(base.layers, ADAPTERS * adapter, traffic, constants.speeds("host"), room)


def shape_of(choice: Choice) -> Shape:
    return Shape(choice.shape.experts, choice.shape.layers)
