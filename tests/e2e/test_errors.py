"""Bad input is told what is wrong, and nothing else is disturbed."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.api import Api
from support.oracle import ATTENTION, Oracle, write_adapter
from support.stacks import StackFactory
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

PROMPT = [5, 77, 12, 3, 99, 41, 8, 120]


async def refused(api: Api, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], httpx.Headers]:
    answer = await api.http.post(path, json=body)
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return answer.status_code, error, answer.headers


def corrupt(adapter: Path) -> None:
    """Cut the weights short, as a broken upload does."""
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


async def test_bad_input_is_refused_by_name_and_nothing_else_notices(stacks: StackFactory, tmp_path: Path) -> None:
    checkpoint = make_tiny_model("llama", tmp_path / "tiny").directory
    oracle = Oracle(checkpoint)
    good = write_adapter(tmp_path / "good", checkpoint, rank=4, targets=ATTENTION, seed=1, std=0.3)
    broken = write_adapter(tmp_path / "broken", checkpoint, rank=4, targets=ATTENTION, seed=2)
    corrupt(broken)
    api = await stacks.start(checkpoint)
    pids = stacks.stack.pids()
    await api.register("good", good)

    status, error, _ = await refused(api, "/v1/completions", {"model": "nobody", "prompt": PROMPT})
    assert (status, error["code"], error["param"]) == (404, "adapter_not_found", "model")
    status, error, _ = await refused(api, "/v1/adapters", {"name": "broken", "source": f"file://{broken}"})
    assert (status, error["code"]) == (422, "adapter_invalid")
    assert "adapter_model.safetensors" in error["message"]
    too_long = [1] * 100_000
    status, error, _ = await refused(api, "/v1/completions", {"model": "tiny", "prompt": too_long})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    status, error, _ = await refused(api, "/v1/completions", {"model": "tiny", "prompt": []})
    assert (status, error["code"]) == (400, "invalid_request")
    status, error, _ = await refused(api, "/v1/completions", {"model": "tiny", "prompt": [5, 4000]})
    assert (status, error["code"]) == (400, "invalid_request")

    names = [m["id"] for m in (await api.http.get("/v1/models")).json()["data"]]
    assert sorted(names) == ["good", "tiny"]
    for model, adapter in (("good", good), ("tiny", None)):
        tokens = await api.generate(model, PROMPT, max_tokens=8)
        assert oracle.shortfall(PROMPT, tokens, adapter) <= 2e-3
    assert stacks.stack.pids() == pids


async def test_over_capacity_is_told_when_to_come_back(stacks: StackFactory, tmp_path: Path) -> None:
    checkpoint = make_tiny_model("llama", tmp_path / "tiny").directory
    oracle = Oracle(checkpoint)
    api = await stacks.start(checkpoint, env={"INFINILORA_MAX_CONCURRENT_REQUESTS": "4"})
    pids = stacks.stack.pids()

    async def one() -> httpx.Response:
        return await api.http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True},
        )

    answers = await asyncio.gather(*(one() for _ in range(40)))
    statuses = {a.status_code for a in answers}
    assert 200 in statuses
    assert statuses <= {200, 429, 503}
    assert len(statuses) > 1
    for answer in answers:
        if answer.status_code == 200:
            continue
        assert answer.json()["error"]["code"] in {"rate_limited", "overloaded"}
        assert float(answer.headers["retry-after"]) > 0
    tokens = await api.generate("tiny", PROMPT, max_tokens=8)
    assert oracle.shortfall(PROMPT, tokens) <= 2e-3
    assert stacks.stack.pids() == pids
