"""One request, one trace: gateway, engine and LoRA server, received over OTLP."""

import asyncio
from pathlib import Path

import pytest

from support.oracle import ATTENTION, write_adapter
from support.otlp import collecting
from support.stacks import StackFactory
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

TRACE_ID, CALLER_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


async def test_one_request_is_one_trace_across_three_services(stacks: StackFactory, tmp_path: Path) -> None:
    checkpoint = make_tiny_model("llama", tmp_path / "tiny").directory
    adapter = write_adapter(tmp_path / "a", checkpoint, rank=4, targets=ATTENTION, seed=1)
    with collecting() as collector:
        api = await stacks.start(checkpoint, env={"INFINILORA_OTLP_ENDPOINT": collector.endpoint})
        await api.register("a", adapter)
        answer = await api.http.post(
            "/v1/completions",
            json={"model": "a", "prompt": [5, 77, 12, 3], "max_tokens": 4, "ignore_eos": True},
            headers={"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-01"},
        )
        assert answer.status_code == 200
        async with asyncio.timeout(20):
            while not {"gateway", "engine", "lora-server"} <= {
                s.service for s in collector.spans if s.trace_id == TRACE_ID
            }:
                await asyncio.sleep(0.1)
        spans = [s for s in collector.spans if s.trace_id == TRACE_ID]

    by_id = {s.span_id: s for s in spans}
    assert {s.parent_id for s in spans if s.parent_id not in by_id} == {CALLER_ID}, "all hang under the caller's span"
    services_above = {s.service: by_id[s.parent_id].service for s in spans if s.parent_id in by_id}
    assert services_above["lora-server"] == "engine"
