"""How many shards an engine has: what was asked for, or as few as hold the model."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from infinilora.engine.assemble import ModelOptions, activation_dtype, sizes_of
from infinilora.engine.model.cut import Cut, check_cut, misfit, weight_numbers
from infinilora.engine.model.spec import ModelSpec, read_spec
from infinilora.engine.options import model_options
from infinilora.engine.settings import Settings
from infinilora.protocol.errors import InvalidRequest

RESERVE = 0.1
"""Of a device's memory, for activations, buffers and the library's own."""


class Need(NamedTuple):
    """Memory that the fullest of `num_shards` shards takes."""

    num_shards: int
    weight_bytes: int
    kv_bytes: int


def choose_shards(needs: Sequence[Need], *, device_bytes: int, num_devices: int) -> int:
    """The fewest shards that fit, each on one of the devices. Raises InvalidRequest where none do."""
    room = int(device_bytes * (1 - RESERVE))
    for need in sorted(needs):
        if need.num_shards <= num_devices and need.weight_bytes + need.kv_bytes <= room:
            return need.num_shards
    tried = ", ".join(f"{n} shards: {weights} of weights + {kv} of keys and values" for n, weights, kv in sorted(needs))
    raise InvalidRequest(
        f"the model does not fit {num_devices} devices of {room} usable bytes each ({tried}); "
        "wanted more or larger devices, or smaller kv_bytes"
    )


def needs_of(spec: ModelSpec, options: ModelOptions, num_devices: int) -> list[Need]:
    """What each number of shards takes that the model can be cut into: powers of two."""
    width = activation_dtype(options).itemsize
    counts = [1 << power for power in range(num_devices.bit_length()) if 1 << power <= num_devices]
    cuts = [Cut(0, count) for count in counts if not misfit(spec, count)]
    return [
        Need(cut.num_shards, weight_numbers(spec, cut) * width, sizes_of(options, spec, cut).kv_bytes) for cut in cuts
    ]


def number_of_shards(settings: Settings) -> int:
    """As the settings say; `auto` looks at the model and the devices. On a CPU shards share one memory: one.

    Raises InvalidRequest where the model cannot be cut so, or there are not so many devices.
    """
    asked = settings.engine_shards
    if asked == "auto":
        return 1 if settings.device == "cpu" else _fewest(settings)
    if settings.device == "cuda" and asked > torch.cuda.device_count():
        raise InvalidRequest(f"{asked} engine shards; this machine shows {torch.cuda.device_count()} CUDA devices")
    if asked > 1:
        check_cut(read_spec(settings.model), asked)
    return asked


def _fewest(settings: Settings) -> int:
    num_devices = torch.cuda.device_count()
    device_bytes = min((torch.cuda.mem_get_info(number)[1] for number in range(num_devices)), default=0)
    needs = needs_of(read_spec(settings.model), model_options(settings), num_devices)
    return choose_shards(needs, device_bytes=device_bytes, num_devices=num_devices)
