"""Class D, several engines of one base: who is asked, and what a client sees when one hangs or comes back."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import redis.asyncio

from infinilora.protocol import keys
from support.cases import PROMPT
from support.worlds import World, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]

READY_WITHIN_S = 10.0
LONG = list(range(3, 99))


def send(world: World, name: str, number: signal.Signals) -> int:
    """Signal a program and whatever it started."""
    pid = world.factory.stack.pid(name)
    assert pid is not None
    os.killpg(pid, number)
    return pid


async def ready(world: World, *, within_s: float, wanted: bool = True) -> None:
    """Wait until the gateway says that it is ready, or that it is not."""
    async with asyncio.timeout(within_s):
        while ((await world.api.http.get("/readyz")).status_code == 200) is not wanted:
            await asyncio.sleep(0.05)


@on("L/engines")
async def test_d17_a_new_adapter_is_right_on_every_engine_that_is_asked(running: World) -> None:
    changes = await running.made("d17", 170)

    async def ask(times: int) -> None:
        for _ in range(times // 4):
            await asyncio.gather(*(running.serves("d17", changes) for _ in range(4)))

    pid = send(running, "engine.1", signal.SIGSTOP)  # it loads nothing and says nothing
    await ask(16)
    os.killpg(pid, signal.SIGCONT)
    await running.until_ready("engine", 2)
    await ask(16)
    async with running.factory.another_engine("engine-new"):
        await ask(16)
        send(running, "engine", signal.SIGKILL)
        await ask(16)
    await running.until_ready("engine", 2)


@on("L/engines")
async def test_d33_an_idle_adapter_goes_back_to_where_it_was_warm(running: World) -> None:
    changes = {f"d33-{number}": await running.made(f"d33-{number}", 330 + number) for number in range(10)}
    for name, wanted in changes.items():
        await asyncio.gather(running.serves(name, wanted), running.api.generate("tiny", PROMPT, max_tokens=8))
        await running.api.generate(name, LONG, max_tokens=1)
    body = {"prompt": LONG, "max_tokens": 1, "temperature": 0}
    for name in changes:
        for _ in range(2):
            answer = (await running.api.http.post("/v1/completions", json={"model": name, **body})).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64, "another engine computed it anew"


@on("L/lives")
async def test_d23_healthy_but_dead(running: World) -> None:
    for number in (signal.SIGSTOP, signal.SIGKILL):
        await ready(running, within_s=60)
        started = time.monotonic()
        asked = asyncio.create_task(running.api.http.get("/healthz"))
        pid = send(running, "engine", number)
        if number == signal.SIGSTOP:
            await ready(running, within_s=READY_WITHIN_S, wanted=False)
            assert time.monotonic() - started < READY_WITHIN_S
            answer = await running.api.http.post(
                "/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": 1}, timeout=60
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            os.killpg(pid, signal.SIGCONT)
        assert (await asked).status_code == 200
        async with asyncio.timeout(60):
            while True:
                with suppress(httpx.HTTPStatusError):
                    await running.serves("tiny")
                    break
                await asyncio.sleep(0.2)


@on("L/engines")
async def test_d19_created_deleted_and_created_again_and_many_at_once(running: World) -> None:
    for number in range(20):
        changes = await running.made("d19", 190 + number % 2)
        await running.serves("d19", changes)
        assert (await running.api.http.delete("/v1/adapters/d19")).status_code == 200
    many = {f"d19-{number}": number for number in range(16)}
    together = await asyncio.gather(*(running.made(name, 195 + number) for name, number in many.items()))
    await asyncio.gather(*(running.serves(name, wanted) for name, wanted in zip(many, together, strict=True)))


@on("L/engines")
async def test_d26_the_registry_does_not_answer_and_does_again(running: World) -> None:
    changes = await running.made("d26", 260)
    await running.serves("d26", changes)
    pid = send(running, "redis", signal.SIGSTOP)
    try:
        for _ in range(3):
            await running.serves("d26", changes)
            started = time.monotonic()
            answer = await running.api.http.post("/v1/adapters/d26/pin", json={"pinned": True})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert time.monotonic() - started < 5
    finally:
        os.killpg(pid, signal.SIGCONT)
    late = await running.made("d26-late", 261)
    await asyncio.gather(running.serves("d26", changes), running.serves("d26-late", late))


@on("L/engines")
async def test_d26_a_registry_that_was_emptied_deletes_nothing_that_is_served(running: World) -> None:
    warm, cold = await running.made("d26-warm", 262), await running.made("d26-cold", 263)
    await running.serves("d26-warm", warm)
    async with redis.asyncio.Redis.from_url(running.factory.stack._started().shared["INFINILORA_REDIS_URL"]) as facts:
        epoch = int(await facts.get(keys.EPOCH) or 0)
        await facts.flushall()
    await running.serves("d26-warm", warm)
    new = await running.made("d26-new", 264)
    await asyncio.gather(
        running.serves("d26-warm", warm), running.serves("d26-cold", cold), running.serves("d26-new", new)
    )
    await running.factory.fleet(lambda fleet: fleet["is_leading"] and fleet["epoch"] > epoch, within_s=10)
    late = await running.factory.another_gateway("gateway-d26", {})
    listed = {entry["id"] for entry in (await late.http.get("/v1/models")).json()["data"]}
    assert {"d26-warm", "d26-cold", "d26-new"} <= listed


@on("L/engines")
async def test_d32_names_that_do_not_exist_cost_nothing(running: World) -> None:
    gateway = running.factory.stack.pid("gateway")

    def resident_kib() -> int:
        status = Path(f"/proc/{gateway}/status").read_text().splitlines()
        return int(dict(line.split(":", 1) for line in status)["VmRSS"].split()[0])

    async def ask(first: int) -> None:
        for number in range(first, 1500, 20):
            body = {"model": f"nobody-{number}", "prompt": PROMPT, "max_tokens": 1}
            answer = await running.api.http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "adapter_not_found")

    await asyncio.gather(*(ask(first) for first in range(20)))
    before = resident_kib()
    await asyncio.gather(*(ask(first) for first in range(20)))
    assert resident_kib() <= before * 1.02
    metrics = (await running.api.http.get("/metrics")).text
    assert "nobody-" not in metrics
    changes = await running.made("nobody-7", 327)
    await running.serves("nobody-7", changes)
