"""On a machine with a GPU: the four services with engine and LoRA server on it, through HTTP, against transformers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from support.api import Api
from support.oracle import ATTENTION, MLP, Oracle, write_adapter
from support.shard_pools import prompt
from support.stacks import StackFactory
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BOUND, SHORTFALL = 1e-3, 2e-3
COMPILE_S = 300.0
ON_GPU = {"INFINILORA_DEVICE": "cuda", "INFINILORA_DTYPE": "fp32"}


@pytest.fixture
async def stacks(tmp_path: Path) -> AsyncIterator[StackFactory]:
    factory = StackFactory(tmp_path)
    yield factory
    await factory.stop()


async def compiled(api: Api, name: str) -> None:
    """Until it is answered: Triton compiles each kind of kernel once for a machine, and calls are late meanwhile."""
    async with asyncio.timeout(COMPILE_S):
        while True:
            try:
                await api.score(name, prompt(90), max_tokens=6)
            except httpx.HTTPStatusError as error:
                assert error.response.status_code in (424, 503), error.response.text
            else:
                return


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
@pytest.mark.parametrize("backend", ["cuda", "shm", "tcp", "local"])
async def test_services_on_a_gpu_serve_what_transformers_computes(
    family: str, backend: str, stacks: StackFactory, tmp_path: Path
) -> None:
    """Over every link: two processes on one GPU signal each other by host, and rows of shm and tcp are carried."""
    checkpoint = make_tiny_model(family, tmp_path / "tiny").directory
    oracle = Oracle(checkpoint)
    named: dict[str, Path | None] = {"tiny": None}
    for seed, targets in enumerate(((*ATTENTION, *MLP), ATTENTION)):
        named[f"a{seed}"] = write_adapter(
            tmp_path / f"a{seed}", checkpoint, rank=4 + seed, targets=targets, seed=seed, std=0.25
        )
    links = {} if backend in ("cuda", "local") else {"INFINILORA_LINK_BACKENDS": backend}
    api = await stacks.start(checkpoint, backend="local" if backend == "local" else "shm", env=ON_GPU | links)
    for name, path in named.items():
        if path is not None:
            await api.register(name, path)

    for name in named:
        await compiled(api, name)

    async def check(name: str, path: Path | None, length: int) -> None:
        asked = prompt(length)
        scored = await api.score(name, asked, max_tokens=6)
        pairs = zip(scored.prompt_logprobs, oracle.logprobs(asked, path), strict=True)
        assert max(abs(told - wanted) for told, wanted in pairs) <= BOUND
        assert oracle.shortfall(asked, scored.token_ids, path) <= SHORTFALL

    async with asyncio.TaskGroup() as together:
        for length in (3, 40, 90):
            for name, path in named.items():
                together.create_task(check(name, path, length))
    if backend != "local":
        (log,) = (tmp_path / "var0").rglob("engine.log")
        assert f'"backend":"{backend}"' in log.read_text()
