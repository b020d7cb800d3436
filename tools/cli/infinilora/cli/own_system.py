"""What measurements have in common: a system of their own, with random adapters of the model that is measured."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from infinilora.cli.api import Api, Wish
from infinilora.cli.settings import child_env
from infinilora.cli.stack import Stack
from infinilora.cli.terminal import err
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import InvalidRequest, Unavailable

Adapters = Annotated[int, typer.Option("--adapters", min=0, help="Random ones, on all linear layers; 0: base alone.")]
Rank = Annotated[int, typer.Option("--rank", min=1, help="Of each.")]
Prompt = Annotated[int, typer.Option("--prompt", min=1, help="Tokens of each prompt.")]
Lora = Annotated[Literal["remote", "local"], typer.Option("--lora", help="Where: a LoRA server, or the engine.")]
Threads = Annotated[int, typer.Option("--threads", min=0, help="Cores for each engine's step; 0: all.")]


def check_writable(*files: Path) -> None:
    """Asked before a measurement that takes minutes. Raises InvalidRequest."""
    for file in files:
        if not file.absolute().parent.is_dir():
            raise InvalidRequest(f"found no directory {file.absolute().parent}; wanted one to write {file.name} to")


def make_adapters(model: Path, into: Path, *, count: int, rank: int) -> dict[str, Path]:
    """Random adapters for the model, by name. Reading its shapes takes torch, and so a process of its own."""
    from infinilora.weights.synth import write_peft_adapter

    command = [sys.executable, "-m", "infinilora.engine.prepare", str(model)]
    done = subprocess.run(command, capture_output=True, env=child_env(), check=False)  # noqa: S603 - ours
    if done.returncode:
        raise Unavailable(f"reading {model} ended with status {done.returncode}: {done.stderr.decode()[-500:]}")
    card = msgspec.json.decode(done.stdout, type=BaseCard)
    names = [f"adapter-{number}" for number in range(count)]
    return {
        name: write_peft_adapter(into / name, card, rank=rank, seed=seed, dtype="BF16", std=0.02)
        for seed, name in enumerate(names)
    }


def say(name: str, event: str) -> None:
    """What happens to a program of the system."""
    err.print(f"{name} {event}")


@asynccontextmanager
async def running(stack: Stack, adapters: dict[str, Path]) -> AsyncIterator[None]:
    """From start, with the adapters registered, to stop."""
    await stack.start()
    try:
        await asyncio.to_thread(_register, stack, adapters)
        yield
    finally:
        await stack.stop()


def _register(stack: Stack, adapters: dict[str, Path]) -> None:
    with Api(stack.url) as api:
        for name, directory in adapters.items():
            api.push(directory, Wish(name), on_bytes=lambda _: None)
