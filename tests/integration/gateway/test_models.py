"""How models are named and listed, and who may see what."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from infinilora.protocol import keys, subjects
from infinilora.protocol.errors import Overloaded
from infinilora.protocol.traffic import Traffic
from support.gateway_house import House, error_of, open_house
from support.waiting import eventually

pytestmark = pytest.mark.integration

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


async def ask(house: House, model: Any, **more: Any) -> list[httpx.Response]:
    """The same model on both routes, streamed and not."""
    return [
        await house.http.post(route, json={"model": model, "max_tokens": 1} | body | {"stream": stream} | more)
        for route, body in ROUTES.items()
        for stream in (False, True)
    ]


async def test_an_unknown_model_is_404_before_any_byte_and_no_work(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        await house.seed("a1")
        for model, code in (
            *(("a1-typo", "adapter_not_found"), ("base:a1", "model_not_found"), ("base:", "model_not_found")),
            *(("a1@v2", "adapter_not_found"), ("other/a1", "adapter_not_found")),
            (f"a1@sha256:{'0' * 64}", "adapter_not_found"),
        ):
            for answer in await ask(house, model):
                assert answer.status_code == 404, model
                error = error_of(answer)
                assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", code)
        assert not house.engine.requests


async def test_a_base_that_sleeps_is_there_for_whoever_wakes_it(tmp_path: Path) -> None:
    """To a gateway that has never heard an engine of it, too; who asks is counted, which is what wakes it."""
    async with open_house(tmp_path, engines=0, is_asleep=True, patience_s=0.1) as house:
        reports = house.bus.subscribe(subjects.TRAFFIC, Traffic)
        listed = (await house.http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["state"]) for model in listed] == [("tiny", "pending")]
        for answer in await ask(house, "tiny"):
            assert (answer.status_code, error_of(answer)["code"]) == (503, "unavailable")
            assert "nobody used it; one is started" in error_of(answer)["message"]
            assert "retry-after" in answer.headers
        async with asyncio.timeout(5):
            while (await anext(reports)).arrivals != {house.card.fingerprint: 4}:
                pass
        await house.store.put(keys.ASLEEP, {})
        await eventually(lambda: not house.gateway.fleet.served(), "it is not asleep any more, and nobody has it")
        assert (await house.http.get("/readyz")).status_code == 503


async def test_what_is_no_model_name_is_400(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        for model in (None, "", 5, "x" * 10_000, "../x", "a/../../t2/b", "a\0b"):
            for answer in await ask(house, model):
                assert answer.status_code == 400, model
                assert error_of(answer)["param"] == "model"
        missing = await house.http.post("/v1/completions", json={"prompt": "x"})
        assert (missing.status_code, error_of(missing)["param"]) == (400, "model")


async def test_every_way_to_name_an_adapter_gives_that_adapter(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        digest = await house.seed("a1")
        for model in ("a1", "default/a1", "a1@v1", f"a1@{digest}"):
            for answer in await ask(house, model):
                assert answer.headers["x-adapter-digest"] == digest
        assert {request.digest for request in house.engine.requests} == {digest}


async def test_base_models_answer_to_name_prefix_and_alias_also_beside_adapters(tmp_path: Path) -> None:
    async with open_house(tmp_path, model_aliases="base-v1=tiny") as house:
        await house.seed("a1")
        for model in ("tiny", "base:tiny", "base-v1", "base:base-v1"):
            answer = await house.complete(model, max_tokens=1)
            assert answer.status_code == 200
            assert answer.json()["model"] == model
        assert {request.digest for request in house.engine.requests} == {""}


async def test_an_adapter_named_in_any_other_field_is_refused(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        await house.seed("a1")
        for field in ("lora_adapter", "adapter_id", "lora_path", "lora_request"):
            for model in ("tiny", "a1"):
                for answer in await ask(house, model, **{field: "a1"}):
                    assert (answer.status_code, error_of(answer)["param"]) == (400, field)
        assert not house.engine.requests


async def test_a_name_of_a_base_and_of_an_adapter_is_not_guessed_at(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        digest = await house.seed("tiny")
        assert (await house.complete("tiny")).status_code == 409
        assert (await house.complete("tiny@v1", max_tokens=1)).headers["x-adapter-digest"] == digest
        assert (await house.complete("base:tiny", max_tokens=1)).status_code == 200


async def test_the_list_holds_exactly_what_answers(tmp_path: Path) -> None:
    async with open_house(tmp_path, model_aliases="base-v1=tiny") as house:
        digest = await house.seed("a1")
        listed = (await house.http.get("/v1/models")).json()["data"]
        assert {item["id"] for item in listed} == {"tiny", "base-v1", "a1"}
        for item in listed:
            assert (await house.complete(item["id"], max_tokens=1)).status_code == 200
            assert (await house.http.get(f"/v1/models/{item['id']}")).json() == item
        (adapter,) = [item for item in listed if item["parent"]]
        assert adapter == {
            "id": "a1",
            "object": "model",
            "created": 1767323045,
            "owned_by": "default",
            "parent": "tiny",
            "root": "tiny",
            "digest": digest,
            "state": "pending",
        }
        assert error_of(await house.http.get("/v1/models/nope"))["code"] == "adapter_not_found"


async def test_a_model_whose_engines_are_away_is_neither_listed_nor_unknown(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        await house.seed("a1")
        away = house.engines[:]
        house.engines.clear()  # nobody's heart beats
        async with asyncio.timeout(20):
            while (await house.http.get("/v1/models")).json()["data"]:
                await asyncio.sleep(0.05)
        for name in ("tiny", "base:tiny", "a1", "a1@v1"):
            answer = await house.http.get(f"/v1/models/{name}")
            assert (answer.status_code, error_of(answer)["code"]) == (503, "unavailable"), name
            assert int(answer.headers["retry-after"]) > 0
        house.engines.extend(away)
        async with asyncio.timeout(20):
            while (await house.http.get("/v1/models/a1")).status_code != 200:
                await asyncio.sleep(0.05)


async def test_tenants_see_and_use_only_their_own(tmp_path: Path) -> None:
    async with open_house(tmp_path, api_keys="k1:red, k2:blue") as house:
        await house.seed("a1", tenant="red")
        red, blue = ({"authorization": f"Bearer {key}"} for key in ("k1", "k2"))

        async def status(headers: dict[str, str], model: str) -> int:
            body = {"model": model, "prompt": "x", "max_tokens": 1}
            return (await house.http.post("/v1/completions", json=body, headers=headers)).status_code

        assert [await status(red, name) for name in ("a1", "red/a1", "tiny")] == [200, 200, 200]
        assert [await status(blue, name) for name in ("a1", "red/a1", "tiny")] == [404, 404, 200]
        for headers in ({}, {"authorization": "Bearer k3"}, {"authorization": "Basic k1"}):
            answer = await house.http.get("/v1/models", headers=headers)
            assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
        mine = (await house.http.get("/v1/adapters", headers=blue)).json()["data"]
        assert mine == []
        assert (await house.http.get("/v1/adapters/a1", headers=blue)).status_code == 404
        assert (await house.http.delete("/v1/adapters/a1", headers=blue)).status_code == 404


async def test_probes_metrics_and_unknown_routes(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        await house.seed("a1")
        await house.complete("a1", max_tokens=3)
        await house.complete("nope")
        assert (await house.http.get("/healthz")).status_code == 200
        page = (await house.http.get("/metrics")).text
        assert 'gen_ai_server_time_to_first_token_seconds_count{adapter="default/a1",route="completions"} 1.0' in page
        assert 'infinilora_requests_total{code="adapter_not_found",route="completions"} 1.0' in page
        assert 'infinilora_tokens_total{adapter="default/a1",direction="out"} 3.0' in page
        house.engine.refuse = [Overloaded("full")]
        await house.complete("a1", max_tokens=3)
        page = (await house.http.get("/metrics")).text
        assert 'infinilora_requests_total{code="overloaded",route="completions"} 1.0' in page
        lost = await house.http.get("/v1/nothing")
        assert (lost.status_code, error_of(lost)["type"]) == (404, "invalid_request_error")
        wrong = await house.http.get("/v1/completions")
        assert (wrong.status_code, error_of(wrong)["type"]) == (405, "invalid_request_error")
