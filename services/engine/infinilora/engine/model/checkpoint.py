"""Where weights come from: safetensors files of a Hugging Face directory, or random numbers of the right shape.

Knows names and shapes (names.py), not what a tensor is for. Tensors are read one at a time, as they are asked for.
"""

import json
import zlib
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infinilora.engine.model.names import LM_HEAD, tensor_shapes
from infinilora.engine.model.spec import ModelSpec
from infinilora.protocol.errors import InvalidRequest

_FLOATS = ("F32", "BF16", "F16")


class TensorSource(Protocol):
    """Gives each tensor of a checkpoint by name, in the dtype it is kept in."""

    def get(self, name: str) -> Tensor: ...


class RandomTensors:
    """True shapes, small random values: for measurements where the text does not matter. Same name, same values."""

    def __init__(self, spec: ModelSpec) -> None:
        self._shapes = tensor_shapes(spec)

    def get(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
        source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=source) * 0.02


class Checkpoint:
    """The tensors of a directory, sharded or not, checked against the spec when opened: names, shapes, dtypes.

    Expert tensors may be fused on disk ([experts, ...] under `experts.gate_up_proj` and `experts.down_proj`);
    `get` cuts the one expert out that its per-expert name asks for.
    """

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        self._spec = spec
        files: list[Any] = [safe_open(path, framework="pt") for path in _shard_paths(directory)]
        self._where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict
        self._directory = directory
        self._check()

    def get(self, name: str) -> Tensor:
        if name in self._where:
            tensor: Tensor = self._where[name].get_tensor(name)
            return tensor
        fused, expert, rows = self._fused(name)
        cut: Tensor = self._where[fused].get_slice(fused)[expert]
        return cut[rows]

    def _fused(self, name: str) -> tuple[str, int, slice]:
        """`....experts.3.up_proj.weight` -> the fused tensor, expert 3, the rows of `up`."""
        block, _, rest = name.partition(".experts.")
        moe = self._spec.moe
        if not rest or moe is None:
            return name, 0, slice(None)
        expert, part, _ = rest.split(".")
        if part == moe.down_name:
            return f"{block}.experts.down_proj", int(expert), slice(None)
        half = slice(0, moe.expert_dim) if part == moe.gate_name else slice(moe.expert_dim, None)
        return f"{block}.experts.gate_up_proj", int(expert), half

    def _check(self) -> None:
        for name, shape in tensor_shapes(self._spec).items():
            wanted_name, wanted = name, shape
            if name not in self._where:
                wanted_name, wanted = self._fused(name)[0], self._fused_shape(name, shape)
            if wanted_name not in self._where:
                raise InvalidRequest(f"{self._directory}: tensor {name} {list(shape)} is missing")
            found = self._where[wanted_name].get_slice(wanted_name)
            if tuple(found.get_shape()) != wanted:
                raise InvalidRequest(
                    f"{self._directory}: tensor {wanted_name} is {found.get_shape()}; wanted {list(wanted)}"
                )
            if found.get_dtype() not in _FLOATS:
                raise InvalidRequest(
                    f"{self._directory}: tensor {wanted_name} is {found.get_dtype()}; wanted one of {_FLOATS}"
                )
        self._check_unused()

    def _fused_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        moe = self._spec.moe
        if moe is None:
            return shape
        doubled = 1 if name.endswith(f".{moe.down_name}.weight") else 2
        return (moe.num_experts, shape[0] * doubled, *shape[1:])

    def _check_unused(self) -> None:
        """A tensor that would be ignored could change the text: refuse it, save those known to be derived."""
        used = set(tensor_shapes(self._spec))
        used |= {self._fused(name)[0] for name in used}
        for name in sorted(set(self._where) - used):
            tied = name == LM_HEAD and self._spec.tied_embeddings
            if not tied and not name.endswith(".rotary_emb.inv_freq"):
                raise InvalidRequest(
                    f"{self._directory}: tensor {name} is not part of a {self._spec.model_type} model as "
                    "config.json describes it"
                )


def _shard_paths(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(f"{index}: not a safetensors index ({error!r})") from None
        paths = [directory / name for name in names]
    else:
        paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise InvalidRequest(f"{directory} holds no *.safetensors; only safetensors weights are read")
    for path in paths:
        _check_readable(path)
    return paths


def _check_readable(path: Path) -> None:
    try:
        with safe_open(path, framework="pt"):
            pass
    except FileNotFoundError:
        raise InvalidRequest(f"{path} is named in the index and is missing") from None
    except SafetensorError as error:
        raise InvalidRequest(f"{path}: damaged safetensors file ({error})") from None
