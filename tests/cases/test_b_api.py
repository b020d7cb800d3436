"""Class B: names, lists and answers of the adapter API, against real processes."""

import asyncio

import pytest

from support.cases import PROMPT, Files, config, keyed, modules
from support.worlds import GOOD, World, each, error_of, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]

QV = modules("q_proj", "v_proj")
FIELDS = {"name", "source", "state", "digest", "matched_tensors", "base", "version", "bytes", "max_rank", "created_at"}


def plain(world: World, seed: int) -> Files:
    return Files(config(), keyed(world.oracle.loras(QV, seed=seed)))


async def unload(world: World, name: str) -> int:
    return (await world.api.http.delete(f"/v1/adapters/{name}")).status_code


async def resident(world: World) -> list[str]:
    """Digests in slots, by the fleet's own account."""
    fleet = await world.factory.fleet(lambda body: bool(body["members"]), within_s=10)
    return [digest for m in fleet["members"] if m["kind"] == "lora-server" for digest in m["load"]["resident"]]


@on("L")
async def test_b06_a_name_of_the_base_is_taken(world: World) -> None:
    source = f"file://{world.place(plain(world, 1))}"
    for name in ("tiny", "base-v1"):
        answer = await world.api.http.post("/v1/adapters", json={"name": name, "source": source})
        assert name in error_of(answer, [400, 409])["message"]
        alias = await world.api.http.post(f"/v1/adapters/{name}/alias", json={"target": GOOD})
        assert name in error_of(alias, [400, 409])["message"]
        await world.serves(name)


@on("L")
async def test_b07_the_list_is_what_answers(world: World) -> None:
    warm = await world.register(plain(world, 71), name="b07-warm")
    gone = await world.register(plain(world, 74), name="b07-gone")
    await world.serves(warm["name"], world.oracle.merge(world.oracle.loras(QV, seed=71), 2.0))
    await world.register(plain(world, 72), name="b07-cold")
    await world.refused(Files(config(), {}))
    assert await unload(world, gone["name"]) == 200
    other = await world.factory.another_gateway("gateway-b07", {})
    names = await world.listed()
    assert {warm["name"], "b07-cold", "tiny", "base-v1", GOOD} <= set(names)
    assert gone["name"] not in names
    await other.wait("/v1/models", lambda body: {m["id"] for m in body["data"]} == set(names), within_s=10)
    for api in (world.api, other):
        await each(*(api.generate(name, PROMPT, max_tokens=1) for name in names))
    entry = (await world.api.http.get(f"/v1/models/{warm['name']}")).json()
    assert entry["parent"] == "tiny"
    assert entry == (await other.http.get(f"/v1/models/{warm['name']}")).json()


@on("L")
async def test_b08_registered_twice(world: World) -> None:
    changes = world.oracle.merge(world.oracle.loras(QV, seed=81), 2.0)
    first = await world.register(plain(world, 81), name="b08")
    await world.serves("b08", changes)
    again = await world.register(plain(world, 81), name="b08")
    assert (again["digest"], again["version"], again["changed"]) == (first["digest"], first["version"], False)
    body = {"name": "b08", "source": f"file://{world.place(plain(world, 82))}"}
    error_of(await world.api.http.post("/v1/adapters", json=body), [409])
    other = await world.register(plain(world, 81), name="b08-too")
    assert other["digest"] == first["digest"]
    await each(world.serves("b08", changes), world.serves("b08-too", changes))
    assert (await resident(world)).count(first["digest"]) <= 1


@on("L")
async def test_b14_unloaded_by_many_at_once(world: World) -> None:
    await world.register(plain(world, 14), name="b14")
    statuses = await asyncio.gather(*(unload(world, "b14") for _ in range(20)))
    assert sorted(statuses) == [200, *[404] * 19]
    assert await unload(world, "nope") == 404
    assert await unload(world, "tiny") == 400


@on("L")
async def test_b25_refusals_have_one_shape(world: World) -> None:
    loras = world.oracle.loras(QV)
    tensors = keyed(loras)
    key = next(iter(tensors))
    kinds = {
        "adapter_config.json": Files(config(use_dora=True), tensors),
        key: Files(config(), tensors | {key: tensors[key] / 0}),
        "[8, 32]": Files(config(r=8), tensors),
        "peft_type": Files(config(peft_type="IA3"), tensors),
        "adapter_model.bin": Files(config(), None, {"adapter_model.bin": b"x"}),
        "adapter_model.safetensors": Files(config(), None, {"adapter_model.safetensors": b"x"}),
    }
    for says, files in kinds.items():
        message = await world.refused(files, says, "found", "wanted", status=[422])
        assert "Traceback" not in message


@on("L")
async def test_b26_a_yes_means_that_it_serves(world: World) -> None:
    tensors = keyed(world.oracle.loras(QV))
    key = next(iter(tensors))
    tensors[key] = tensors[key] * float("nan")
    await world.refused(Files(config(), tensors), key, "NaN")


@on("L")
async def test_b28_the_answers_are_a_contract(world: World) -> None:
    entry = await world.register(plain(world, 28), name="b28")
    assert entry.keys() >= FIELDS
    assert (entry["name"], entry["matched_tensors"], entry["state"]) == ("b28", 8, "pending")
    listed = (await world.api.http.get("/v1/adapters")).json()["data"]
    assert next(e for e in listed if e["name"] == "b28").keys() >= FIELDS
    assert await unload(world, "b28") == 200
    off = await world.factory.another_gateway("gateway-b28", {"INFINILORA_ADAPTER_API": "off"})
    body = {"name": "b28", "source": "file:///nowhere"}
    for method, path in (("POST", ""), ("GET", ""), ("GET", "/good"), ("DELETE", "/good"), ("POST", "/good/alias")):
        answer = await off.http.request(method, f"/v1/adapters{path}", json=body if method == "POST" else None)
        assert "switched off" in error_of(answer, [403])["message"]
    await off.generate(GOOD, PROMPT, max_tokens=1)
