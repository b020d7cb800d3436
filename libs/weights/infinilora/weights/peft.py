"""Read an adapter directory: its configuration and its tensors, mapped and not yet understood.

A PEFT directory, with its first values where it has any (`pissa`), or what MLX writes (`exports`). Refuses what is
not safetensors by name. Which tensor belongs where is `keys`, `names` and `rules`.
"""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from infinilora.protocol.errors import AdapterInvalid, SourceNotFound
from infinilora.weights import pissa
from infinilora.weights.config import CONFIG_FILE, refuse_drafters
from infinilora.weights.exports import MLX_TENSORS_FILE, is_mlx, mlx_rules
from infinilora.weights.refuse import invalid
from infinilora.weights.rules import LoraRules, rules_of
from infinilora.weights.tensorfile import TensorFile, open_tensors

TENSORS_FILE = "adapter_model.safetensors"
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt", ".pickle"})
_MODEL_CONFIG_FILE = "config.json"
_MAX_CONFIG_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter directory that was read: rules that hold for it, tensors still on disk."""

    directory: Path
    rules: LoraRules
    tensors: TensorFile
    hashing: Future[str]
    """Of all files that were read; it goes on while the rest is looked at."""
    declared_base: str = ""
    """The base model that the configuration names: words of its trainer, which nothing is looked up by."""
    is_mlx: bool = False
    """Its tensors are MLX's `lora_a` [in, r] and `lora_b` [r, out]."""

    @property
    def source_digest(self) -> str:
        """sha256 over all files: the identity of what the user gave us. Waits for it."""
        return self.hashing.result()


class _Files(NamedTuple):
    """A configuration and the weight file that it goes with, read."""

    config_bytes: bytes
    config: dict[str, Any]
    rules: LoraRules
    tensors: TensorFile
    is_mlx: bool = False


def read_adapter(directory: Path) -> PeftAdapter:
    """Read `adapter_config.json` and map the weight file that it goes with.

    Raises SourceNotFound where one of them is missing, AdapterInvalid for what they are.
    """
    place = pissa.first_values(directory)
    own = _read_files(directory, has_first=place is not None)
    rules, tensors, read = own.rules, own.tensors, {"": own}
    if place is not None and pissa.began_in_base(own.config):
        first = read[f"{place.name}/"] = _read_first(place)
        tensors = pissa.joined(own.tensors, first.tensors, own.rules, place.name)
        rules = pissa.doubled(own.rules, first.rules, place.name)
    elif place is not None and not own.is_mlx:
        pissa.refuse_unconverted(own.tensors, place)
    pool = ThreadPoolExecutor(1)
    hashing = pool.submit(_source_digest, read)
    pool.shutdown(wait=False)
    declared = own.config.get("model" if own.is_mlx else "base_model_name_or_path")
    return PeftAdapter(
        directory=directory,
        rules=rules,
        tensors=tensors,
        hashing=hashing,
        declared_base=declared if isinstance(declared, str) else "",
        is_mlx=own.is_mlx,
    )


def _read_files(directory: Path, *, has_first: bool) -> _Files:
    """`has_first`: there are first values, so that training may have begun in the base."""
    config_bytes = _read_config(directory)
    config = _parse_config(config_bytes)
    if is_mlx(config):
        rules = mlx_rules(config)
        return _Files(config_bytes, config, rules, _open(_tensors_path(directory, MLX_TENSORS_FILE)), is_mlx=True)
    rules = rules_of(pissa.begun_plainly(config) if has_first else config)
    return _Files(config_bytes, config, rules, _open(_tensors_path(directory, TENSORS_FILE)))


def _read_first(place: Path) -> _Files:
    """The first values of an adapter. Refusals name their directory."""
    try:
        return _read_files(place, has_first=True)
    except (AdapterInvalid, SourceNotFound) as error:
        raise type(error)(f"{place.name}/{error.message}", param=error.param) from error


def _source_digest(read: dict[str, _Files]) -> str:
    """`read` by the directory below the adapter's own."""
    lines = "".join(
        f"{below}{CONFIG_FILE} {hashlib.sha256(files.config_bytes).hexdigest()}\n"
        f"{below}{files.tensors.name} {files.tensors.sha256()}\n"
        for below, files in read.items()
    )
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def _read_config(directory: Path) -> bytes:
    path = directory / CONFIG_FILE
    if not path.is_file():
        _refuse_a_drafters_directory(directory)
        raise SourceNotFound(f"{CONFIG_FILE}: file: found none; wanted it at the top of the adapter", param="source")
    return _read_small(path)


def _read_small(path: Path) -> bytes:
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise invalid(path.name, "size", found=f"{path.stat().st_size} bytes", wanted=f"at most {_MAX_CONFIG_BYTES}")
    return path.read_bytes()


def _refuse_a_drafters_directory(directory: Path) -> None:
    path = directory / _MODEL_CONFIG_FILE
    if path.is_file():
        refuse_drafters(path.name, _parse_config(_read_small(path), path.name))


def _parse_config(data: bytes, name: str = CONFIG_FILE) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(name, "content", found=str(error), wanted="a JSON object") from error
    except RecursionError:
        raise invalid(name, "content", found="nesting too deep to read", wanted="a JSON object") from None


def _tensors_path(directory: Path, wanted: str) -> Path:
    path = directory / wanted
    if path.is_file():
        return path
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix.lower() in PICKLE_SUFFIXES)
    if pickles:
        raise invalid(
            pickles[0],
            "file format",
            found="a pickle file, which can run code when it is read",
            wanted=f"{wanted} (save it again with safe_serialization=True)",
        )
    raise SourceNotFound(f"{wanted}: file: found none; wanted it beside {CONFIG_FILE}", param="source")


def _open(path: Path) -> TensorFile:
    if not path.stat().st_size:
        raise _empty(path.name, "an empty file")
    file = open_tensors(path)
    if not file.tensors:
        raise _empty(path.name, "a file without tensors")
    if all(0 in info.shape for info in file.tensors.values()):
        raise _empty(path.name, f"{len(file.tensors)} tensors, all empty")
    return file


def _empty(name: str, what: str) -> AdapterInvalid:
    """What training under ZeRO-3 leaves behind when it saves weights that it has not gathered."""
    return invalid(name, "tensors", found=f"no LoRA tensors ({what})", wanted="at least one LoRA pair")
