"""The four services with engine and LoRA server on this machine's GPU: decode throughput beside that of base alone.

    PYTHONPATH=benchmarks/gpu:benchmarks python benchmarks/gpu/bench_services.py [--quick]

SmolLM2-135M in bf16, rank-16 adapters on all linear layers, 32 streams. `remote` goes over the `cuda` link (said in the
engine's log, and held here), `local` computes deltas in the engine. Where both processes have one GPU and there is no
MPS, each call waits for both hosts: the figure is then that of the slower way, and `signal` says so.
"""

import argparse
import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from adapters import many_adapters
from device import conditions, report, require_device
from harness import decode, demo_model, median, register, served

from infinilora.cli.stack import Stack

STREAMS, ADAPTERS, RANK, TOKENS, ROUNDS = 32, 16, 16, 96, 5
TARGET = 0.78
"""Of base alone, as bench-lora asks of a CPU."""
ON_GPU = {"INFINILORA_DEVICE": "cuda"}
COMPILE_S = 600.0
"""What the first launches of a machine may take in all: Triton compiles each kind of kernel once, and keeps it."""


async def warm(stack: Stack, models: list[str]) -> None:
    """Until a whole round is answered: while kernels are compiled, calls miss their deadlines and requests may fail."""
    async with asyncio.timeout(COMPILE_S):
        while True:
            try:
                await decode(stack, models, streams=STREAMS, tokens=8, seed=0)
            except RuntimeError as error:
                print(f"warming up: {str(error)[:120]}", flush=True)
            else:
                return


def link_of(stack: Stack) -> tuple[str, str]:
    """(back-end, who signals) of the engine's link, as its log says."""
    lines = [json.loads(line) for line in stack.log("engine").read_text().splitlines() if "link opened" in line]
    return lines[-1]["backend"], lines[-1].get("signal", "")


async def rates(lora: str, model: Path, root: Path, adapters: dict[str, Path], rounds: int) -> dict[str, list[float]]:
    """Tokens per second of base and of the adapters, in turn, on one system."""
    found: dict[str, list[float]] = {"base": [], lora: []}
    async with served(model, lora=lora, adapters=root, **ON_GPU) as stack:
        await register(stack, adapters)
        for models in (["base"], list(adapters)):
            await warm(stack, models)
        if lora == "remote":
            backend, signal = link_of(stack)
            if backend != "cuda":
                raise SystemExit(f"the engine's link is {backend!r}; wanted cuda: see its log for the reason")
            print(f"link: cuda, signalled by the {signal}", flush=True)
        for turn in range(rounds):
            for kind, models in (("base", ["base"]), (lora, list(adapters))):
                found[kind].append(await decode(stack, models, streams=STREAMS, tokens=TOKENS, seed=turn + 1))
            print({kind: round(values[-1], 1) for kind, values in found.items()}, flush=True)
    return found


async def measure(rounds: int) -> dict[str, float]:
    model = demo_model()
    with TemporaryDirectory(prefix="infinilora-adapters-") as root:
        adapters = many_adapters(Path(root), model, count=ADAPTERS, rank=RANK, dtype=torch.bfloat16)
        remote = await rates("remote", model, Path(root), adapters, rounds)
        local = await rates("local", model, Path(root), adapters, rounds)
    return {kind: median(values) for kind, values in (local | remote).items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one round: whether it runs at all")
    options = parser.parse_args()
    device = require_device()
    found = asyncio.run(measure(1 if options.quick else ROUNDS))
    value = found["remote"] / found["base"]
    shown = {kind: round(rate, 1) for kind, rate in found.items()}
    facts = conditions(device, streams=STREAMS, adapters=ADAPTERS, rank=RANK, tokens_per_s=shown)
    report("services-cuda", value, TARGET, met=value >= TARGET, **facts)


if __name__ == "__main__":
    main()
