"""Make random PEFT adapters for any base: seeded, of any rank, dtype and set of targets. For tests and benchmarks.

What is written is what PEFT itself writes for modules (experts one by one, under the card's names), and the
same arguments give the same bytes.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from infinilora.protocol.adapter import BaseCard, Site
from infinilora.protocol.errors import InvalidRequest
from infinilora.weights.config import CONFIG_FILE
from infinilora.weights.names import PREFIX
from infinilora.weights.peft import TENSORS_FILE
from infinilora.weights.tensorfile import LENGTH_BYTES, NUMPY_DTYPES, Array


def modules_of(card: BaseCard, targets: Sequence[str] | None = None) -> Iterator[tuple[str, int, int]]:
    """(module, in, out) of every projection whose last name is in `targets`; None: every one of the layers.

    The embedding and lm_head must be named: they are as wide as the vocabulary, and few adapters have them.
    """
    for site in card.sites:
        for part in site.parts:
            wanted = site.site not in (Site.EMBED, Site.LM_HEAD)
            if wanted if targets is None else part.module.rpartition(".")[2] in targets:
                for expert in range(site.num_experts or 1):
                    yield part.module.replace("{expert}", str(expert)), site.in_dim, part.out_dim


def write_peft_adapter(
    directory: Path,
    card: BaseCard,
    *,
    rank: int,
    targets: Sequence[str] | None = None,
    seed: int = 0,
    dtype: str = "F32",
    std: float = 0.05,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a random adapter into `directory` (made if need be) and return it.

    `std` is that of both factors; alpha is 2 x rank; `config` overrides keys of adapter_config.json.
    """
    modules = list(modules_of(card, targets))
    if not modules:
        raise InvalidRequest(f"targets {targets!r} name no projection of {card.name}")
    settings = lora_config(card, rank=rank, modules=[m for m, _, _ in modules], targets=targets)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(settings | (config or {}))))
    write_tensors(directory / TENSORS_FILE, random_pairs(modules, rank=rank, seed=seed, dtype=dtype, std=std))
    return directory


def lora_config(card: BaseCard, *, rank: int, modules: list[str], targets: Sequence[str] | None) -> dict[str, Any]:
    """The configuration PEFT would write for these targets."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": card.name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(set(targets or (m.rpartition(".")[2] for m in modules))),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def random_pairs(
    modules: Sequence[tuple[str, int, int]], *, rank: int, seed: int, dtype: str, std: float
) -> dict[str, Array]:
    """A normal A and B for each module, under PEFT's keys. An embedding is a module of this name."""
    dice, kind = np.random.default_rng(seed), NUMPY_DTYPES[dtype]
    tensors: dict[str, Array] = {}
    for module, in_dim, out_dim in modules:
        key = "lora_embedding_{}" if module.endswith("embed_tokens") else "lora_{}.weight"
        for half, shape in (("A", (rank, in_dim)), ("B", (out_dim, rank))):
            values = dice.standard_normal(shape, np.float32) * np.float32(std)
            tensors[f"{PREFIX}{module}.{key.format(half)}"] = values.astype(kind)
    return tensors


def write_tensors(path: Path, tensors: dict[str, Array]) -> None:
    """Write a safetensors file; tensors in order of their names."""
    names = {kind: name for name, kind in NUMPY_DTYPES.items()}
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        array = tensors[name]
        begin, end = end, end + math.prod(array.shape) * array.itemsize
        table[name] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": (begin, end)}
    header = msgspec.json.encode(table)
    header += b" " * (-len(header) % LENGTH_BYTES)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        for name in sorted(tensors):
            file.write(np.ascontiguousarray(tensors[name]).tobytes())
