"""What every benchmark here shares: the demo model, adapters, a stack, and the last line.

A benchmark states its conditions, warms up, interleaves what it compares, reports medians with n, and ends
with one JSON object: name, value, target, met, conditions.
"""

import asyncio
import json
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch

from infinilora.bench.load import Ask, Timeline, decode_throughput, run_together
from infinilora.cli.stack import Stack

ROOT = Path(__file__).parents[1]
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
THREADS = 2


def demo_model(name: str = "smollm2-135m") -> Path:
    """The prepared demo model; prepares it when it is not there yet."""
    path = ROOT / ".var" / "models" / name
    if not (path / "config.json").exists():
        subprocess.run([sys.executable, "-m", "infinilora.engine.demo", name, "--out", str(path)], check=True)
    return path


def prompts(count: int, length: int, *, seed: int, vocab: int = 40_000) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(1000, vocab) for _ in range(length)] for _ in range(count)]


@asynccontextmanager
async def served(model: Path, *, lora: str, adapters: Path, **env: str) -> AsyncIterator[Stack]:
    """A whole system on free ports, ended afterwards."""
    with TemporaryDirectory(prefix="infinilora-bench-") as var:
        stack = Stack(
            Path(var),
            model=str(model),
            served_name="base",
            port=0,
            lora=lora,
            threads=THREADS,
            extra_env={"INFINILORA_ADAPTER_ROOTS": str(adapters), **env},
        )
        await stack.start()
        try:
            yield stack
        finally:
            await stack.stop()


async def register(stack: Stack, adapters: dict[str, Path]) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=300) as http:
        for name, path in adapters.items():
            answer = await http.post("/v1/adapters", json={"name": name, "source": f"file://{path}"})
            answer.raise_for_status()


async def decode(stack: Stack, models: list[str], *, streams: int, tokens: int, seed: int, prompt: int = 16) -> float:
    """Decode tokens per second of `streams` concurrent streams, models dealt round robin."""
    asks = [Ask(models[i % len(models)], p, tokens) for i, p in enumerate(prompts(streams, prompt, seed=seed))]
    return decode_throughput(await run_together(stack.url, asks))


async def one(stack: Stack, model: str, prompt: list[int], *, tokens: int = 2) -> Timeline:
    return (await run_together(stack.url, [Ask(model, prompt, tokens)]))[0]


def conditions(**more: Any) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "threads": THREADS,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **more,
    }


def cpu_name() -> str:
    """With family and model: virtual machines give generations of a processor one name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().partition("\n\n")[0].splitlines() if path.exists() else []
    known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" not in known:
        return platform.processor()
    return f"{known['model name']}, family {known.get('cpu family', '?')}, model {known.get('model', '?')}"


def median(values: list[float]) -> float:
    return statistics.median(values)


def report(name: str, value: float, target: float, *, met: bool | None = None, **more: Any) -> None:
    """Print the last line. `met` defaults to value >= target."""
    record = {
        "name": name,
        "value": round(value, 4),
        "target": target,
        "met": value >= target if met is None else met,
        "conditions": conditions(**more),
    }
    print(json.dumps(record))


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)
