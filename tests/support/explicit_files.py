"""The tensors of an adapter's file as pairs A and B by module, under the names that the trainer's model has.

Part of the oracle of tests/property (`explicit_merge`); knows neither the base nor the config.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from support.explicit_rules import EMBEDDING, NoMeaning

Array = NDArray[Any]

TENSORS_NAME, MLX_TENSORS_NAME = "adapter_model.safetensors", "adapters.safetensors"

_BIAS = ".bias"
_WRAPPERS = ("base_model.model.", "_orig_mod.", "module.", "_fsdp_wrapped_module.")
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.(?P<adapter>[^.]+))??(?P<weight>\.weight)?")
_EMBEDDING_KEY = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<half>[AB])(?:\.(?P<adapter>[^.]+))?")


@dataclass(slots=True)
class _Pair:
    a: Array | None = None
    b: Array | None = None


def read_tensors(path: Path) -> dict[str, Array]:
    """float64 copies of every tensor of the file."""
    try:
        raw = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise NoMeaning(f"weights: {error}") from error
    return {name: _numbers(name, str(t["dtype"]), t["shape"], bytes(t["data"])) for name, t in raw}


def _numbers(name: str, dtype: str, shape: Sequence[int], data: bytes) -> Array:
    match dtype:
        case "F32" | "F16" | "F64":
            values = np.frombuffer(data, f"<f{int(dtype[1:]) // 8}").astype(np.float64)
        case "BF16":  # the upper half of a float32
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        case _:
            raise NoMeaning(f"{name} is {dtype}")
    if not np.isfinite(values).all():
        raise NoMeaning(f"{name} is not finite")
    return values.reshape(shape)


def pairs_of(tensors: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """(A, B) by module name, wrappers' prefixes and the adapter's own name taken off; biases aside."""
    found: dict[str, _Pair] = {}
    prefixes, adapters = set(), set()
    for key, tensor in tensors.items():
        if key.endswith(_BIAS):
            continue
        bare = _unwrapped(key)
        parts = _EMBEDDING_KEY.fullmatch(bare) or _KEY.fullmatch(bare)
        is_embedding = parts is not None and parts.re is _EMBEDDING_KEY
        if parts is None or not (is_embedding or parts["weight"] or tensor.ndim == 3):
            raise NoMeaning(f"{key} is no half of a pair")
        if is_embedding != parts["module"].endswith(EMBEDDING):
            raise NoMeaning(f"{key} takes a matrix for a table, or a table for a matrix")
        prefixes.add(key.removesuffix(bare))
        adapters.add(parts["adapter"])
        pair = found.setdefault(parts["module"], _Pair())
        if (pair.a if parts["half"] == "A" else pair.b) is not None:
            raise NoMeaning(f"{key} is there twice")
        if parts["half"] == "A":
            pair.a = tensor
        else:
            pair.b = tensor
    if not found:
        raise NoMeaning("no tensors")
    if len(prefixes) > 1 or len(adapters) > 1:
        raise NoMeaning(f"more than one file in one: prefixes {prefixes}, adapters {adapters}")
    return {module: _whole(module, pair) for module, pair in found.items()}


def biases_of(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The vector of a lora_B by module name."""
    found = {}
    for key, tensor in tensors.items():
        if not key.endswith(_BIAS):
            continue
        half = key.removesuffix(_BIAS) + ".weight"
        parts = _KEY.fullmatch(_unwrapped(half))
        if parts is None or parts["half"] != "B" or half not in tensors:
            raise NoMeaning(f"{key} is no bias of a lora_B")
        found[parts["module"]] = tensor
    return found


def _unwrapped(key: str) -> str:
    while wrapper := next((w for w in _WRAPPERS if key.startswith(w)), None):
        key = key.removeprefix(wrapper)
    return key


def _whole(module: str, pair: _Pair) -> tuple[Array, Array]:
    if pair.a is None or pair.b is None:
        raise NoMeaning(f"half a pair: {module}")
    return pair.a, pair.b
