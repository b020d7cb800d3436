"""An adapter that came at this time yesterday is in a full pool before anybody asks for it, and its use is counted."""

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from infinilora.coordinator.prefetch import SLOTS
from infinilora.protocol import keys
from infinilora.protocol.ids import Digest
from infinilora.protocol.traffic import CalendarSpan
from support.api import Api
from support.oracle import ATTENTION, write_adapter
from support.stacks import StackFactory
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

DAY_S = 86_400
PROMPT = [5, 77, 12, 3]
SETTINGS = {"INFINILORA_NUM_SLOTS": "2", "INFINILORA_HEAT_HALF_LIVES_S": "1"}


async def came_yesterday(redis_url: str, digest: Digest) -> None:
    """In the span of now, and in the one after it."""
    number = int(time.time() / (DAY_S / SLOTS)) - SLOTS
    async with Redis.from_url(redis_url) as redis:
        for span in (CalendarSpan(number=each, counts={digest: 9}) for each in (number, number + 1)):
            await redis.hset(keys.CALENDAR, str(span.number % SLOTS), msgspec.json.encode(span))


async def shown(coordinator: Api, line: str) -> None:
    async with asyncio.timeout(60):
        while line not in (await coordinator.http.get("/metrics")).text:
            await asyncio.sleep(0.1)


def resident(fleet: dict[str, Any]) -> set[str]:
    return {digest for member in fleet["members"] if member["group"] for digest in member["load"]["resident"]}


async def test_what_came_yesterday_is_there_before_it_is_asked_for(stacks: StackFactory, tmp_path: Path) -> None:
    checkpoint = make_tiny_model("llama", tmp_path / "tiny").directory
    api = await stacks.start(checkpoint, env=SETTINGS)
    digests: dict[str, Digest] = {}
    for seed, name in enumerate(("daily", "one", "two")):
        directory = write_adapter(tmp_path / name, checkpoint, rank=4, targets=ATTENTION, seed=seed, std=0.3)
        digests[name] = (await api.register(name, directory))["digest"]
    for name in ("one", "two"):
        await api.generate(name, PROMPT, max_tokens=2)
    await stacks.fleet(lambda fleet: resident(fleet) == {digests["one"], digests["two"]}, within_s=30)
    await stacks.fleet(lambda fleet: not fleet["heat"], within_s=60)

    await came_yesterday(stacks.stack._started().shared["INFINILORA_REDIS_URL"], digests["daily"])
    stacks.stack.kill("coordinator")
    await stacks.fleet(lambda fleet: fleet["is_leading"] and digests["daily"] in resident(fleet), within_s=60)
    coordinator = Api(stacks.stack.coordinator_url)
    stacks.apis.append(coordinator)

    await shown(coordinator, "infinilora_prefetched_resident 1.0")
    await api.generate("daily", PROMPT, max_tokens=2)
    await shown(coordinator, 'infinilora_prefetched_total{outcome="used"} 1.0')
