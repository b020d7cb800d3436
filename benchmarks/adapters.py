"""Random adapters for the benchmarks, as PEFT writes them: all linear layers of a dense model, any number of them."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from infinilora.engine.model.names import tensor_shapes
from infinilora.engine.model.spec import ModelSpec, read_spec

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


EXPERTS = ("w1", "w2", "w3", "q_proj", "k_proj", "v_proj", "o_proj")
"""What Mixtral calls them: all experts, and attention."""


def many_adapters(
    root: Path, model: Path, *, count: int, rank: int, dtype: torch.dtype, targets: tuple[str, ...] = ALL_LINEAR
) -> dict[str, Path]:
    """`count` adapters under root, named a00, a01, ...; small enough in effect that text stays text."""
    shapes = weights_of(read_spec(model), targets)
    return {f"a{i:02}": _write(root / f"a{i:02}", shapes, rank=rank, dtype=dtype, seed=i) for i in range(count)}


def weights_of(spec: ModelSpec, targets: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """(out, in) of every module whose last name is a target, experts one by one."""
    names = {name.removesuffix(".weight"): shape for name, shape in tensor_shapes(spec).items()}
    return {name: shape for name, shape in names.items() if name.rpartition(".")[2] in targets}


def num_parameters(path: Path) -> int:
    """Of one adapter as it was written."""
    with safe_open(path / "adapter_model.safetensors", "pt") as file:
        return sum(file.get_slice(key).get_shape()[0] * file.get_slice(key).get_shape()[1] for key in file.keys())  # noqa: SIM118 - not a mapping


def _write(out: Path, shapes: dict[str, tuple[int, ...]], *, rank: int, dtype: torch.dtype, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (n_out, n_in) in shapes.items():
        stem = f"base_model.model.{module}"
        tensors[f"{stem}.lora_A.weight"] = (torch.randn(rank, n_in, generator=generator) * 0.02).to(dtype)
        tensors[f"{stem}.lora_B.weight"] = (torch.randn(n_out, rank, generator=generator) * 0.02).to(dtype)
    out.mkdir(parents=True)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({module.split(".")[-1] for module in shapes}),
        "bias": "none",
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out
