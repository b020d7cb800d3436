"""Class D, processes that are asked to stop, each kind in turn, under long streams and cold loads."""

import asyncio
import json
import os
import signal
from typing import Any, NamedTuple

import httpx
import pytest

from infinilora.cli.child import Child
from support.api import Api, stream_ids
from support.cases import PROMPT, Change
from support.procs import can_connect
from support.waiting import eventually
from support.worlds import TEACHER_FORCED_BOUND, World, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]

NUM_STREAMS = 20
LONG_TOKENS = 240
DONE = "[DONE]"
LEAVES = {"engine": ("engine", "engine.1"), "lora-server": ("lora-server", "lora-server.lora-1")}


class Told(NamedTuple):
    """All that a stream said: its tokens, and its last event as it came."""

    ids: list[int]
    last: str


async def listen(api: Api, model: str, begun: asyncio.Event) -> Told:
    """A long stream to its end, whatever that is. Raises TransportError where it is cut."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": LONG_TOKENS, "temperature": 0, "ignore_eos": True}
    told = Told([], "")
    try:
        body |= {"stream": True, "return_token_ids": True}
        async with api.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line:
                    begun.set()
                    last = line.removeprefix("data: ")
                    told = Told(told.ids + stream_ids([] if last == DONE else [json.loads(last)]), last)
    finally:
        begun.set()
    return told


async def begin(api: Api, model: str, count: int = NUM_STREAMS) -> list[asyncio.Task[Told]]:
    """So many streams, each of which has its first token."""
    begun = [asyncio.Event() for _ in range(count)]
    streams = [asyncio.create_task(listen(api, model, event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    return streams


async def all_right(world: World, streams: list[asyncio.Task[Told]], changes: list[Change]) -> None:
    for told in await asyncio.gather(*streams):
        assert (told.last, len(told.ids)) == (DONE, LONG_TOKENS)
        assert world.oracle.shortfall(PROMPT, told.ids, changes) <= TEACHER_FORCED_BOUND


@pytest.mark.parametrize("kind", LEAVES)
@on("L/engines")
async def test_d24_a_rolling_restart_cuts_no_stream(running: World, kind: str) -> None:
    stack, num_groups = running.factory.stack, 2 if kind == "lora-server" else 1
    await stack.set_groups(num_groups)
    try:
        await running.until_ready("lora-server", num_groups)
        changes = await running.made(f"d24-{kind}", 241)
        for seed, name in enumerate(LEAVES[kind], 242 if kind == "engine" else 246):
            cold, before = await running.made(f"d24-{seed}", seed), stack.pid(name)
            assert before is not None
            streams = await begin(running.api, f"d24-{kind}")
            load = asyncio.create_task(running.serves(f"d24-{seed}", cold))
            await asyncio.sleep(0)
            os.kill(before, signal.SIGTERM)
            while stack.pid(name) in (before, None):
                await running.serves(f"d24-{kind}", changes)
            await all_right(running, streams, changes)
            await load
            await running.until_ready(kind, 2)
    finally:
        await stack.set_groups(1)


async def gateway(world: World, name: str, drain_s: float) -> tuple[Api, Child]:
    api = await world.factory.another_gateway(name, {"INFINILORA_DRAIN_S": str(drain_s)})
    return api, world.factory.children[-1]


def terminate(child: Child) -> None:
    """Ask it once more to stop."""
    assert child.pid is not None
    os.kill(child.pid, signal.SIGTERM)


async def until_closed(api: Api) -> None:
    """Until a gateway takes no connection any more: nobody finds it ready, and nothing new comes."""
    port = httpx.URL(api.url).port
    assert port is not None
    await eventually(lambda: not can_connect(port), "the gateway has closed its port", timeout_s=30)


@on("L/engines")
async def test_d24_a_gateway_stops_when_its_streams_have_ended(running: World) -> None:
    changes = await running.made("d24-gateway", 244)
    api, child = await gateway(running, "gateway-d24", 60)
    streams = await begin(api, "d24-gateway")
    stopping = asyncio.create_task(child.stop())
    await all_right(running, streams, changes)
    await stopping
    with pytest.raises(httpx.ConnectError):
        await api.http.get("/readyz")


def signal_engines(world: World, number: signal.Signals) -> None:
    for name in LEAVES["engine"]:
        pid = world.factory.stack.pid(name)
        assert pid is not None
        os.killpg(pid, number)


@on("L/engines")
async def test_d24_a_gateway_that_cannot_wait_says_so_to_its_streams(running: World) -> None:
    """At the end of its grace time, and at once when it is asked twice; one that is killed cannot, and harms nobody."""
    changes = await running.made("d24-cut", 245)
    grace_s = {"waits": 1.5, "twice": 600.0, "killed": 600.0}
    gateways = {name: await gateway(running, f"gateway-d24-{name}", seconds) for name, seconds in grace_s.items()}
    streams = await asyncio.gather(*(begin(api, "d24-cut", 1) for api, _ in gateways.values()))
    signal_engines(running, signal.SIGSTOP)  # no stream ends by itself now
    try:
        stopping = [asyncio.create_task(child.stop()) for _, child in gateways.values()]
        await asyncio.gather(*(until_closed(api) for api, _ in gateways.values()))
        terminate(gateways["twice"][1])
        gateways["killed"][1].end()
        waits, twice, killed = await asyncio.gather(*(stream for (stream,) in streams), return_exceptions=True)
        for told in (waits, twice):
            assert isinstance(told, Told), told
            assert json.loads(told.last)["error"]["code"] == "unavailable"
            assert "this gateway stops" in told.last
        assert isinstance(killed, httpx.TransportError), killed
        await asyncio.gather(*stopping)
    finally:
        signal_engines(running, signal.SIGCONT)
    await running.until_ready("engine", 2)
    await running.serves("d24-cut", changes)
    await running.factory.fleet(lambda fleet: not running_now(fleet), within_s=30)


def running_now(fleet: dict[str, Any]) -> int:
    """Sequences on the engines that are there."""
    engines = (m for m in fleet["members"] if (m["kind"], m["health"]) == ("engine", "alive"))
    return sum(member["load"]["running"] for member in engines)
