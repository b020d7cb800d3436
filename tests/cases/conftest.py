"""One running system a fixture base, shared by all cases on it; at any time only one of them runs."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from infinilora.cli.stack import Urls
from support.cases import Oracle, make_base
from support.hangs import Hangs
from support.procs import TlsWeedServer, WeedServer, free_port
from support.s3_proxy import S3Proxy
from support.stacks import StackFactory
from support.worlds import SMALL_CACHE_BYTES, SMALL_HOST_BYTES, Answer, World, base_answer

KV_BLOCK_BYTES = 4096
"""Of 16 tokens of L."""

ENV: dict[str, dict[str, str]] = {
    "L": {"INFINILORA_MODEL_ALIASES": "base-v1=tiny,elsewhere=another-base"},
    "L/one-slot": {"INFINILORA_NUM_SLOTS": "1", "INFINILORA_HOST_BYTES": str(64 << 10)},
    "L/two-slots": {
        "INFINILORA_NUM_SLOTS": "2",
        "INFINILORA_CACHE_BYTES": str(SMALL_CACHE_BYTES),
        "INFINILORA_HOST_BYTES": str(SMALL_HOST_BYTES),
        "INFINILORA_DELETE_GRACE_S": "0.2",
    },
    "Q2/2x2": {"INFINILORA_NUM_SLOTS": "1", "INFINILORA_HOST_BYTES": str(256 << 10)},
    "L/lives": {},
    "L/engines": {},
    "L/fails": {"INFINILORA_LOAD_RETRY_S": "0.3"},
    "L/hang": {"INFINILORA_STEP_LIMIT_S": "4", "INFINILORA_CALL_LIMIT_S": "4"},
    "L/bf16": {},
    "L/tight": {  # chunks of 16, keys and values of about three sequences of 128
        "INFINILORA_STEP_TOKENS": "16",
        "INFINILORA_KV_BYTES": str(24 * KV_BLOCK_BYTES),
        "INFINILORA_POOL_SLOTS": "2",
    },
    "L-long/hybrid": {
        "INFINILORA_HYBRID_BYTES": str(64 << 10),
        "INFINILORA_PING_PONG": "on",
        "INFINILORA_LINK_BACKENDS": "tcp",
        "INFINILORA_KV_BYTES": str(160 * KV_BLOCK_BYTES),
    },
}
"""What a world's services are told beyond the defaults; before the slash is the fixture base."""
S3_WORLDS = ("L",)


def keys(server: WeedServer) -> dict[str, str]:
    return {"INFINILORA_S3_ACCESS_KEY": server.access_key, "INFINILORA_S3_SECRET_KEY": server.secret_key}


def elsewhere(endpoint: str) -> dict[str, str]:
    """What some clients of S3 take for their endpoint, whatever they are told: here a server that only watches."""
    return dict.fromkeys(("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"), endpoint) | {"AWS_REGION": "elsewhere-1"}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Parametrized by name: pytest runs all cases of one world before the next one starts.

    After the slash `ExL`: a group of LoRA servers so cut; `in-N`: an engine of N shards.
    """
    name: str = request.param
    base, _, variant = name.partition("/")
    root: Path = tmp_path_factory.mktemp(name.replace("/", "-"))
    checkpoint = make_base(base, root / "tiny", dtype=torch.bfloat16 if variant == "bf16" else torch.float32)
    urls = Urls() if name in S3_WORLDS else Urls(store=f"file://{root / 'store'}")
    env = ENV.get(name, {})
    factory = StackFactory(root)
    with ExitStack() as servers:
        proxy = None
        if variant in ("proxy", "fails"):
            weed = WeedServer(root / "weed").start()
            servers.callback(weed.kill)
            proxy = servers.enter_context(S3Proxy(weed.port))
            urls = Urls(store=proxy.url("cases"))
            env = env | keys(weed)
        if variant == "tls":
            server = TlsWeedServer(root / "weed").start()
            servers.callback(server.kill)
            proxy = servers.enter_context(S3Proxy(server.port))
            urls = Urls(store=server.url("cases"))
            env = keys(server) | elsewhere(proxy.endpoint)
        try:
            more: dict[str, Any] = {"lora_shape": variant} if re.fullmatch(r"\dx\d", variant) else {}
            more |= {"engines": 2} if variant in ("engines", "hang") else {}
            env = env | Hangs(root / "hangs").environment if variant == "hang" else env
            if cut := re.fullmatch(r"in-(\d)", variant):
                more = {"engine_shards": cut[1]}
            if variant == "tight":  # without LoRA servers: the one process that listens there is the engine
                more = {"backend": "local"}
                env = env | {"INFINILORA_METRICS_LISTEN": f"127.0.0.1:{free_port()}"}
            api = await factory.start(checkpoint, env=env, urls=urls, **more)
            made = World(name, Oracle(checkpoint), api, factory, root, proxy=proxy)
            await made.settle()
            yield made
        finally:
            await factory.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def without_lora(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Awaitable[Answer]]:
    """What a fixture base says in a system that has no LoRA at all; each is asked once."""
    known: dict[str, Answer] = {}

    async def ask(base: str) -> Answer:
        if base not in known:
            root = tmp_path_factory.mktemp(f"{base}-without")
            factory = StackFactory(root)
            try:
                api = await factory.start(make_base(base, root / "tiny"), backend="none")
                known[base] = await base_answer(api)
            finally:
                await factory.stop()
        return known[base]

    return ask


@pytest_asyncio.fixture(loop_scope="session")
async def world(running: World) -> AsyncIterator[World]:
    """The world of a case, which must be as it was when the case is over."""
    before = running.factory.stack.pids()
    yield running
    await running.undisturbed(before)
