"""Random adapters for the benchmarks, as PEFT writes them: all linear layers of a dense model, any number of them."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def many_adapters(root: Path, model: Path, *, count: int, rank: int, dtype: torch.dtype) -> dict[str, Path]:
    """`count` adapters under root, named a00, a01, ...; small enough in effect that text stays text."""
    with safe_open(model / "model.safetensors", "pt") as file:
        shapes = {
            key.removesuffix(".weight"): tuple(file.get_slice(key).get_shape())
            for key in file.keys()  # noqa: SIM118 - not a mapping
            if key.split(".")[-2] in ALL_LINEAR
        }
    return {f"a{i:02}": _write(root / f"a{i:02}", shapes, rank=rank, dtype=dtype, seed=i) for i in range(count)}


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
        "target_modules": list(ALL_LINEAR),
        "bias": "none",
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out
