"""The gateway as a real process on real NATS, Redis and S3 servers: start, outages, clean stop."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import nats
import pytest
from nats.js.errors import NotFoundError
from typing_extensions import override

from infinilora.protocol import keys, subjects
from infinilora.protocol.control import UsageEvent
from infinilora.runtime.blobs import BlobStore, open_blobs
from infinilora.runtime.members import Heart
from infinilora.weights.synth import write_peft_adapter
from support.gateway_house import EOS, TOKEN, bare_card, error_of, events
from support.procs import NatsServer, Server, ValkeyServer, WeedServer, can_connect
from support.scripted_engine import ScriptedEngine
from support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

BEAT_S = 0.25
CARD = bare_card()


class GatewayProcess(Server):
    """`python -m infinilora.gateway`."""

    name = "gateway"

    def __init__(self, home: Path, **settings: str) -> None:
        super().__init__(home)
        self.own = settings
        own = {"LISTEN": f"127.0.0.1:{self.port}", "VAR_DIR": str(home / "var"), "RPC_TOKEN": TOKEN}
        self._settings = own | {"BEAT_MS": str(int(BEAT_S * 1000)), "PATIENCE_S": "5"} | settings

    @override
    def command(self) -> list[str]:
        return [sys.executable, "-m", "infinilora.gateway"]

    @override
    def environment(self) -> dict[str, str]:
        return {f"INFINILORA_{key}": value for key, value in self._settings.items()}


@dataclass
class System:
    """One gateway process, the servers it needs, and an engine of the test's."""

    nats: NatsServer
    valkey: ValkeyServer
    gateway: GatewayProcess
    engine: ScriptedEngine
    blobs: BlobStore
    http: httpx.AsyncClient
    root: Path

    async def status(self) -> str:
        try:
            return str((await self.http.get("/readyz")).json()["status"])
        except httpx.TransportError:
            return "away"

    async def until(self, status: str, within_s: float = 20) -> None:
        async def reached() -> bool:
            return await self.status() == status

        async with asyncio.timeout(within_s):
            while not await reached():
                await asyncio.sleep(0.05)

    async def complete(self, model: str, **more: Any) -> httpx.Response:
        body = {"model": model, "prompt": [5, 6], "max_tokens": 3, "ignore_eos": True} | more
        return await self.http.post("/v1/completions", json=body)

    async def register(self, name: str, seed: int, *, replace: bool = False) -> httpx.Response:
        """From a prefix of the store's bucket."""
        source = write_peft_adapter(self.root / name, CARD, rank=4, seed=seed)
        for path in source.iterdir():
            await asyncio.to_thread(self.blobs.put_file, f"incoming/{name}/{path.name}", path)
        body = {"name": name, "source": f"s3://infinilora/incoming/{name}", "replace": replace}
        return await self.http.post("/v1/adapters", json=body)


async def patiently(call: Callable[[], Awaitable[httpx.Response]], within_s: float = 20) -> httpx.Response:
    """The answer; a 503 is asked again as it says, as a client would: a busy machine is slower than a store may be."""
    async with asyncio.timeout(within_s):
        while (answer := await call()).status_code == 503:
            await asyncio.sleep(float(answer.headers["retry-after"]))
    return answer


@asynccontextmanager
async def running_system(root: Path, weed: WeedServer, **settings: str) -> AsyncIterator[System]:
    nats, valkey = NatsServer(root / "nats"), ValkeyServer(root / "valkey")
    engine = ScriptedEngine(CARD.fingerprint, CARD.name, CARD.vocab_size, EOS)
    store_url = weed.url("infinilora")
    blobs = open_blobs(store_url, access_key=weed.access_key, secret_key=weed.secret_key)
    gateway = GatewayProcess(
        root / "gateway",
        NATS_URL=nats.url,
        REDIS_URL=valkey.url,
        STORE_URL=store_url,
        S3_ACCESS_KEY=weed.access_key,
        S3_SECRET_KEY=weed.secret_key,
        **settings,
    )
    async with AsyncExitStack() as stack:
        for server in (nats, valkey):
            stack.callback(server.stop)
            await asyncio.to_thread(server.start)
        await asyncio.to_thread(blobs.put, keys.base_card(CARD.fingerprint), msgspec.json.encode(CARD))
        await stack.enter_async_context(engine.served(TOKEN))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        heart = group.create_task(Heart(nats.url, lambda: engine.beat(0), interval_s=BEAT_S).run())
        stack.callback(heart.cancel)
        stack.callback(gateway.stop)
        await asyncio.to_thread(gateway.start)
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=30, trust_env=False)
        )
        system = System(nats, valkey, gateway, engine, blobs, http, root)
        await system.until("ready")
        yield system


async def test_a_gateway_lives_through_the_loss_of_redis_and_nats(tmp_path: Path, s3_server: WeedServer) -> None:
    async with running_system(tmp_path, s3_server) as system:
        made = await patiently(lambda: system.register("a1", seed=1))
        assert made.status_code == 200, made.text
        digest, pid = made.json()["digest"], system.gateway.pid
        assert (await system.complete("a1")).headers["x-adapter-digest"] == digest

        system.engine.pause_after = 2
        body = {"model": "a1", "prompt": [5], "max_tokens": 5, "ignore_eos": True, "stream": True}
        async with system.http.stream("POST", "/v1/completions", json=body) as answer:
            stream = events(answer)
            seen = [await anext(stream)]
            system.valkey.kill()
            system.nats.kill()
            await system.until("degraded")
            system.engine.go.set()
            seen += [event async for event in stream]
        assert seen[-1] == "[DONE]"
        assert (await system.complete("a1")).headers["x-adapter-digest"] == digest
        refused = await system.register("a2", seed=2)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "unavailable")

        await asyncio.to_thread(system.valkey.start)
        await asyncio.to_thread(system.nats.start)
        await system.until("ready")
        assert (await patiently(lambda: system.register("a2", seed=2))).status_code == 200
        assert {a["id"] for a in (await system.http.get("/v1/adapters")).json()["data"]} == {"a1", "a2"}
        assert system.gateway.pid == pid
        await expect_usage(system, requests=3)


async def test_names_change_hands_on_a_real_redis(tmp_path: Path, s3_server: WeedServer) -> None:
    async with running_system(tmp_path, s3_server) as system:
        one = (await patiently(lambda: system.register("a1", seed=1))).json()
        two = (await patiently(lambda: system.register("a2", seed=2))).json()
        for target, meant in (("a1", one), ("a2@v1", two)):
            body = {"target": target}
            moved = await patiently(partial(system.http.post, "/v1/adapters/prod/alias", json=body))
            assert (moved.status_code, moved.json()["digest"]) == (200, meant["digest"]), moved.text
            assert (await system.complete("prod")).headers["x-adapter-digest"] == meant["digest"]
        whole = (await patiently(lambda: system.http.post("/v1/adapters/a1/verify"))).json()
        assert (whole["ok"], whole["digest"]) == (True, one["digest"])
        delete = partial(system.http.delete, "/v1/adapters/a2")
        gone = await asyncio.gather(*(patiently(delete) for _ in range(20)))
        assert sorted(answer.status_code for answer in gone) == [200] + [404] * 19
        assert [(await system.complete(name)).status_code for name in ("a2", "a2@v1", "prod", "a1")] == [404] * 3 + [
            200
        ]
        again = (await patiently(lambda: system.register("a2", seed=2))).json()
        assert (again["version"], again["digest"]) == (2, two["digest"])


async def has_usage(client: nats.NATS) -> bool:
    """A broker killed in its first second may have lost the stream; who has events to send makes it anew."""
    try:
        await client.jetstream().stream_info(subjects.USAGE_STREAM)
    except NotFoundError:
        return False
    return True


async def expect_usage(system: System, *, requests: int) -> None:
    """Every request's usage event is on the broker's disk, those of the outage too."""
    client = await nats.connect(system.nats.url)
    try:
        found: set[str] = set()
        async with asyncio.timeout(20):
            await eventually(partial(has_usage, client), "the stream of usage is there again", 20)
            reader = await client.jetstream().pull_subscribe(subjects.USAGE, "reader", stream=subjects.USAGE_STREAM)
            while len(found) < requests:
                for message in await reader.fetch(requests, timeout=10):
                    found.add(msgspec.json.decode(message.data, type=UsageEvent).request_id)
                    await message.ack()
    finally:
        await client.close()


async def test_a_stopping_gateway_finishes_its_streams_and_exits_cleanly(tmp_path: Path, s3_server: WeedServer) -> None:
    async with running_system(tmp_path, s3_server) as system:
        system.engine.pause_after = 1
        body = {"model": "tiny", "prompt": [5], "max_tokens": 3, "ignore_eos": True, "stream": True}
        async with system.http.stream("POST", "/v1/completions", json=body) as answer:
            stream = events(answer)
            seen = [await anext(stream)]
            async with asyncio.TaskGroup() as group:
                stopping = group.create_task(asyncio.to_thread(system.gateway.stop))
                await eventually(lambda: not can_connect(system.gateway.port), "the gateway stops listening")
                system.engine.go.set()
                seen += [event async for event in stream]
            assert seen[-1] == "[DONE]"
            assert stopping.result() == 0


@pytest.mark.parametrize(("drain_s", "signals"), [("1", 1), ("600", 2)])
async def test_a_gateway_tells_the_streams_that_it_cannot_wait_for(
    tmp_path: Path, s3_server: WeedServer, drain_s: str, signals: int
) -> None:
    """When the grace time is over, and at once when it is asked a second time."""
    async with running_system(tmp_path, s3_server, DRAIN_S=drain_s) as system:
        system.engine.pause_after = 1
        body = {"model": "tiny", "prompt": [5], "max_tokens": 3, "ignore_eos": True, "stream": True}
        async with system.http.stream("POST", "/v1/completions", json=body) as answer:
            stream = events(answer)
            await anext(stream)
            for _ in range(signals):
                os.kill(system.gateway.pid, signal.SIGTERM)
                await eventually(lambda: not can_connect(system.gateway.port), "the gateway stops listening")
            *_, last = [event async for event in stream]
            assert last["error"]["code"] == "unavailable"
        status = await asyncio.to_thread(system.gateway.stop)
        assert status == 0, system.gateway.log.read_text()[-2000:]
