"""Read a PEFT adapter directory: its configuration and its tensors, mapped and not yet understood.

Refuses what is not safetensors by name. Which tensor belongs where is `names` and `rules`.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from infinilora.weights.refuse import invalid
from infinilora.weights.rules import CONFIG_FILE, LoraRules, rules_of
from infinilora.weights.tensorfile import TensorFile, open_tensors

TENSORS_FILE = "adapter_model.safetensors"
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt", ".pickle"})
_MAX_CONFIG_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter directory that was read: rules that hold for it, tensors still on disk."""

    directory: Path
    rules: LoraRules
    tensors: TensorFile
    source_digest: str
    """sha256 over both files: the identity of what the user gave us."""


def read_adapter(directory: Path) -> PeftAdapter:
    """Read `adapter_config.json` and map `adapter_model.safetensors`. Raises AdapterInvalid."""
    if not directory.is_dir():
        raise invalid(str(directory.name), "adapter directory", found="no such directory", wanted="a directory")
    config_bytes = _read_config(directory)
    rules = rules_of(_parse_config(config_bytes))
    tensors = open_tensors(_tensors_path(directory))
    config_sha = hashlib.sha256(config_bytes).hexdigest()
    lines = f"{CONFIG_FILE} {config_sha}\n{TENSORS_FILE} {tensors.sha256()}\n"
    return PeftAdapter(
        directory=directory,
        rules=rules,
        tensors=tensors,
        source_digest="sha256:" + hashlib.sha256(lines.encode()).hexdigest(),
    )


def _read_config(directory: Path) -> bytes:
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise invalid(CONFIG_FILE, "file", found=_listing(directory), wanted=f"{CONFIG_FILE} (a PEFT directory)")
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise invalid(CONFIG_FILE, "size", found=f"{path.stat().st_size} bytes", wanted=f"at most {_MAX_CONFIG_BYTES}")
    return path.read_bytes()


def _parse_config(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(CONFIG_FILE, "content", found=str(error), wanted="a JSON object") from error
    except RecursionError:
        raise invalid(CONFIG_FILE, "content", found="nesting too deep to read", wanted="a JSON object") from None


def _tensors_path(directory: Path) -> Path:
    path = directory / TENSORS_FILE
    if path.is_file():
        return path
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix.lower() in PICKLE_SUFFIXES)
    if pickles:
        raise invalid(
            pickles[0],
            "file format",
            found="a pickle file, which can run code when it is read",
            wanted=f"{TENSORS_FILE} (save it again with safe_serialization=True)",
        )
    raise invalid(TENSORS_FILE, "file", found=_listing(directory), wanted=TENSORS_FILE)


def _listing(directory: Path) -> str:
    names = sorted(p.name for p in directory.iterdir())
    return f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else "an empty directory"
