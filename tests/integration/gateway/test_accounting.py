"""What requests leave behind: one trace, heat, usage events."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from infinilora.protocol import keys, subjects
from infinilora.protocol.control import UsageEvent
from infinilora.protocol.errors import AdapterFailed, Overloaded
from infinilora.protocol.traffic import Tally, Traffic, merged
from infinilora.runtime.telemetry import Telemetry
from support.gateway_house import House, open_house
from support.scripted_engine import ScriptedEngine
from support.waiting import eventually

pytestmark = pytest.mark.integration


async def usage_events(house: House, count: int) -> list[UsageEvent]:
    async with asyncio.timeout(5):
        while len(house.bus.durable) < count:
            await asyncio.sleep(0.01)
    assert {subject for subject, _ in house.bus.durable} == {subjects.USAGE}
    return [msgspec.json.decode(payload, type=UsageEvent) for _, payload in house.bus.durable]


async def test_one_trace_from_the_client_to_the_engine(tmp_path: Path) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with open_house(tmp_path, telemetry=Telemetry(provider)) as house:
        headers = {"traceparent": f"00-{trace}-{parent}-01"}
        for stream in (False, True):
            body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "stream": stream}
            await house.http.post("/v1/completions", json=body, headers=headers)
        for span, metadata in zip(exporter.get_finished_spans(), house.engine.metadata, strict=True):
            context = span.get_span_context()
            assert context is not None
            assert f"{context.trace_id:032x}" == trace
            assert span.parent is not None
            assert f"{span.parent.span_id:016x}" == parent
            assert metadata["traceparent"] == f"00-{trace}-{context.span_id:016x}-01"
            assert (span.attributes or {})["gen_ai.usage.output_tokens"] == 1


async def test_each_request_leaves_a_usage_event_however_it_ended(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        digest = await house.seed("a1")
        await house.complete("a1", prompt=[5, 6], max_tokens=3, n=2)
        house.engine.pause_after = 2
        body = {"model": "tiny", "prompt": [5], "max_tokens": 9, "stream": True}
        async with house.http.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                break
        done, left = await usage_events(house, 2)
        assert (done.tenant, done.model, done.digest) == ("default", "a1", digest)
        assert (done.prompt_tokens, done.completion_tokens, done.finish_reason) == (2, 6, "length")
        assert (left.model, left.finish_reason) == ("tiny", "abort")
        assert 1 <= left.completion_tokens <= 2


async def test_a_usage_event_says_that_the_base_answered(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        await house.seed("a1")
        await house.complete("a1", max_tokens=1, lora_fallback="base")
        house.engine.degrades = True
        await house.complete("a1", max_tokens=1, lora_fallback="base")
        assert [event.degraded for event in await usage_events(house, 2)] == [False, True]


async def test_heat_is_added_once_a_request_for_adapters_only(tmp_path: Path) -> None:
    async with open_house(tmp_path, heat_half_lives_s=(10, 60)) as house:
        digest = await house.seed("a1")
        for _ in range(3):
            await house.complete("a1", max_tokens=1, n=2)
        await house.complete("tiny", max_tokens=1)
        async with asyncio.timeout(5):
            while not all(found := await house.store.heat(keys.heats([10, 60]), 10)):
                await asyncio.sleep(0.05)
        assert [list(heat) for heat in found] == [[digest], [digest]]
        assert found[1][digest] == pytest.approx(3 * 0.693 / 60, rel=0.2)


async def test_what_fails_for_us_has_missed_its_slo_and_what_fails_by_itself_has_not(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        digest = await house.seed("a1")
        reports = house.bus.subscribe(subjects.TRAFFIC, Traffic)
        house.engine.refuse = [AdapterFailed("damaged"), Overloaded("full")]
        codes = [(await house.complete("a1", prompt=[5], max_tokens=1)).status_code for _ in range(3)]
        assert codes == [424, 503, 200]
        tallies: list[Tally] = []
        async with asyncio.timeout(5):
            while sum(tally.ttft.count for tally in tallies if tally.digest is None) < 2:
                tallies += (await anext(reports)).tallies
        for tally in merged(tallies).values():
            assert (tally.digest in (None, digest), tally.ttft.count, tally.ttft.within(1000.0)) == (True, 2, 1)


async def test_whoever_leaves_without_a_token_is_told_of_with_the_time_that_was_waited(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        reports = house.bus.subscribe(subjects.TRAFFIC, Traffic)
        house.engine.pause_after = 0
        for stream in (False, True):
            waiting = asyncio.create_task(house.complete(prompt=[5], max_tokens=1, stream=stream))
            await eventually(lambda: house.engine.running == 1, "it waits")
            waiting.cancel()
            await house.until_idle()
        tally = Tally(house.card.fingerprint, "standard")
        async with asyncio.timeout(5):
            while tally.left.count < 2:
                for told in (await anext(reports)).tallies:
                    tally.merge(told)
        assert tally.ttft.count == 0


async def test_engines_report_what_is_resident(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        digest = await house.seed("a1")
        engine: ScriptedEngine = house.engine
        engine.resident = (digest,)
        async with asyncio.timeout(5):
            while (await house.http.get("/v1/adapters/a1")).json()["state"] != "ready":
                await asyncio.sleep(0.02)
