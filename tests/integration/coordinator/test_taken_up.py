"""What a leader knew of the traffic outlives it, as real processes on a real store."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from infinilora.protocol import keys, subjects
from infinilora.protocol.control import Beat, EngineLoad
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.protocol.traffic import DemandHistory, Traffic
from infinilora.runtime.bus import NatsBus
from infinilora.runtime.store import RedisStore
from support.clusters import BEAT_MS, Coordinator, a_cluster
from support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

BASE = Fingerprint(digest_of(b"base"))
A = digest_of(b"a")
QUICK = {"LEAD_S": "6"}
"""Buckets of a second."""


async def serve_for_ever(bus: NatsBus) -> None:
    """An engine that beats."""
    seq = 0
    while True:
        seq += 1
        beat = Beat(
            kind="engine", id="e1", incarnation="x", seq=seq, state="ready", base=BASE, model="m", load=EngineLoad()
        )  # fmt: skip
        await bus.publish(subjects.heartbeat("engine", "e1"), beat)
        await asyncio.sleep(BEAT_MS / 1000)


async def ask_for_ever(bus: NatsBus) -> None:
    """A gateway that reports requests."""
    arrived = 0
    while True:
        arrived += 2
        report = Traffic(gateway="g", incarnation="x", arrivals={BASE: arrived}, by_adapter={A: 2})
        await bus.publish(subjects.TRAFFIC, report)
        await asyncio.sleep(0.05)


async def demand(coordinator: Coordinator) -> dict[str, Any]:
    shown: dict[str, Any] = (await coordinator.ask("/v1/scale"))[1]["demand"].get(BASE, {})
    return shown


async def test_a_coordinator_that_was_never_there_goes_on_from_what_a_killed_leader_left(tmp_path: Path) -> None:
    async with (
        a_cluster(tmp_path) as cluster,
        RedisStore(cluster.valkey.url) as store,
        NatsBus(cluster.nats.url) as bus,
    ):
        loop = asyncio.get_running_loop()
        serving, asking = loop.create_task(serve_for_ever(bus)), loop.create_task(ask_for_ever(bus))
        try:
            first = await cluster.coordinator("c1", **QUICK)

            async def left() -> int:
                found = await store.get(keys.demand(BASE), DemandHistory)
                return sum(found.value.counts) if found else 0

            async def is_left() -> bool:
                return await left() > 0

            await eventually(is_left, "the leader leaves what it knows", 60)
            assert (await demand(first))["rps"] > 0
            first.kill()
            asking.cancel()
            second = await cluster.coordinator("c2", **QUICK)
            await eventually(second.leads, "the second leads", 20)

            async def knows() -> bool:
                return bool((await demand(second)).get("rps"))

            await eventually(knows, "the second knows of requests that it has not heard of", 20)
        finally:
            serving.cancel()
            asking.cancel()
            await asyncio.wait([serving, asking])
