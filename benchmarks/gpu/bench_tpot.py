"""Time per token of remote LoRA on this machine's GPU over its floor: 64 streams of 8 and of 16 adapters.

    PYTHONPATH=benchmarks/gpu:benchmarks python benchmarks/gpu/bench_tpot.py [--quick] [--only NAME] [--layers N]

Layers of Qwen3-30B-A3B and Mixtral-8x7B with random weights, adapters on attention and all experts. Floor: what a step
must read, once, over the bandwidth of a copy: every weight that its rows use, and every factor of an adapter that its
own rows use; of experts as many as rows that draw theirs are expected to choose. Keys, values and activations are not
in it. Of a model's layers so many are run as an engine makes up in the time that it has to start; each is whole.
"""

import argparse
import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from adapters import many_adapters, weights_of
from bench_services import ON_GPU, link_of, warm
from device import bytes_per_s, conditions, report, require_device
from harness import decode, demo_model, median, register, served

from infinilora.engine.model.names import EMBED, tensor_shapes
from infinilora.engine.model.spec import ModelSpec, read_spec

STREAMS, RANK, TOKENS, ROUNDS = 64, 16, 96, 5
BATCHES = (8, 16)
"""Adapters, dealt evenly to the streams."""
TARGET = 1.10
WIDTH = torch.bfloat16.itemsize
MOST_ADAPTERS = max(BATCHES)
COMMON = {"vocab_size": 49152, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "eos_token_id": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's layers; `targets` are the last names of what its adapters adapt."""

    layers: int
    config: dict[str, Any]
    targets: tuple[str, ...]


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SHAPES = {
    "qwen3-30b-a3b": Shape(
        12,
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
        (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
    ),
    "mixtral-8x7b": Shape(
        8,
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        (*ATTENTION, "w1", "w2", "w3"),
    ),
}


def used_experts(spec: ModelSpec, rows: float) -> float:
    """Of a layer's experts the part that so many rows are expected to choose; 1 without experts."""
    return 1.0 if spec.moe is None else 1.0 - (1.0 - spec.moe.top_k / spec.moe.num_experts) ** rows


def base_bytes(spec: ModelSpec, rows: int) -> float:
    """Weights that a step of so many rows reads, in bf16. Of an embedding it reads rows, and all of it as the head."""
    read = used_experts(spec, rows)
    shapes = {name: shape for name, shape in tensor_shapes(spec).items() if name != EMBED or spec.tied_embeddings}
    return WIDTH * sum(torch.Size(s).numel() * (read if ".experts." in name else 1.0) for name, s in shapes.items())


def adapter_bytes(spec: ModelSpec, targets: tuple[str, ...], rank: int, rows: float) -> float:
    """What a step reads of one adapter of which it has so many rows."""
    read = used_experts(spec, rows)
    adapted = weights_of(spec, targets).items()
    return WIDTH * rank * sum(sum(shape) * (read if ".experts." in name else 1.0) for name, shape in adapted)


def write_model(shape: Shape, layers: int, out: Path) -> Path:
    """A directory without weights, with the demo model's tokenizer."""
    out.mkdir()
    for file in demo_model().glob("*token*"):
        shutil.copy(file, out)
    (out / "config.json").write_text(json.dumps({**COMMON, **shape.config, "num_hidden_layers": layers}))
    return out


async def measure(shape: Shape, layers: int, rounds: int, env: dict[str, str]) -> dict[str, Any]:
    """Milliseconds a token with 8 and 16 adapters and of the base alone, and who signals the link."""
    with TemporaryDirectory(prefix="infinilora-tpot-") as work:
        model, root = write_model(shape, layers, Path(work) / "model"), Path(work) / "adapters"
        adapters = many_adapters(
            root, model, count=MOST_ADAPTERS, rank=RANK, dtype=torch.bfloat16, targets=shape.targets
        )
        held = sum(path.stat().st_size for path in root.rglob("*.safetensors"))
        env = env | {"INFINILORA_LOAD_FORMAT": "dummy", "INFINILORA_POOL_BYTES": str(held + held // 8)}
        async with served(model, lora="remote", adapters=root, INFINILORA_NUM_SLOTS=str(MOST_ADAPTERS), **env) as stack:
            await register(stack, adapters)
            batches = {"base": ["base"], **{str(n): list(adapters)[:n] for n in BATCHES}}
            for models in batches.values():
                await warm(stack, models)
            rates: dict[str, list[float]] = {name: [] for name in batches}
            for turn in range(rounds):
                for name, models in batches.items():
                    rate = await decode(stack, models, streams=STREAMS, tokens=TOKENS, seed=turn + 1)
                    rates[name].append(rate)
            backend, signal = link_of(stack)
    told = {name: round(1e3 * STREAMS / median(found), 3) for name, found in rates.items()}
    return {"tpot_ms": told, "link": f"{backend} {signal}".strip()}


def beside_floors(found: dict[str, Any], spec: ModelSpec, targets: tuple[str, ...], bandwidth: float) -> dict[str, Any]:
    """With the floor of each batch, and its time over it."""
    base = base_bytes(spec, STREAMS)
    floors = {"base": base} | {str(n): base + n * adapter_bytes(spec, targets, RANK, STREAMS / n) for n in BATCHES}
    floor_ms = {name: round(1e3 * num_bytes / bandwidth, 3) for name, num_bytes in floors.items()}
    over = {name: round(found["tpot_ms"][name] / ms, 2) for name, ms in floor_ms.items()}
    return found | {"floor_ms": floor_ms, "over_floor": over}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one round and one layer: whether it runs at all")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--layers", type=int, default=0, help="of each model; 0: as many as are made up in time")
    options = parser.parse_args()
    device = require_device()
    bandwidth, told = bytes_per_s(device), {}
    for name, shape in ((n, s) for n, s in SHAPES.items() if options.only in n):
        layers = 1 if options.quick else options.layers or shape.layers
        found = asyncio.run(measure(shape, layers, 1 if options.quick else ROUNDS, ON_GPU))
        with TemporaryDirectory() as work:
            spec = read_spec(write_model(shape, layers, Path(work) / "model"))
        told[name] = beside_floors(found, spec, shape.targets, bandwidth) | {"layers": layers}
        print(name, told[name], flush=True)
    worst = max(found["over_floor"][str(n)] for found in told.values() for n in BATCHES)
    facts = conditions(device, gb_per_s=round(bandwidth / 1e9), streams=STREAMS, rank=RANK, models=told)
    report("gpu-tpot", worst, TARGET, met=worst <= TARGET, **facts)


if __name__ == "__main__":
    main()
