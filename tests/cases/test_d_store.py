"""Class D, from the store to a slot: prefixes, more adapters than slots, a disk cache that is small, emptied, away."""

import asyncio
import random
from pathlib import Path

import pytest

from support.cases import PROMPT, Change, Files, config, keyed, modules
from support.s3_proxy import Fault
from support.worlds import LOGPROB_BOUND, SMALL_CACHE_BYTES, World, each, error_of, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]

QV = modules("q_proj", "v_proj")


def numbered(world: World, seed: int) -> tuple[Files, list[Change]]:
    loras = world.oracle.loras(QV, seed=seed)
    return Files(config(), keyed(loras)), world.oracle.merge(loras, 2.0)


async def registered(world: World, prefix: str, count: int) -> dict[str, list[Change]]:
    """So many adapters, all unlike."""
    made = {f"{prefix}-{seed}": numbered(world, 1000 + seed) for seed in range(count)}
    await each(*(world.register(files, name=name) for name, (files, _) in made.items()))
    return {name: changes for name, (_, changes) in made.items()}


def disk_cache(world: World) -> Path:
    return world.factory.stack.home.directory / "cache"


def cached_bytes(world: World) -> int:
    return sum(path.stat().st_size for path in disk_cache(world).rglob("*") if path.is_file())


@on("L")
async def test_d11_prefixes_that_begin_alike(world: World) -> None:
    noise = {"lora/1/": b"", "lora/1-old/adapter_config.json": b"[]", "lora/1.bak/adapter_config.json": b"[]"}
    many = {f"lora/1/checkpoints/{i}.bin": b"x" for i in range(1100)}
    for number in (1, 10, 5):
        files, changes = numbered(world, number)
        uri = world.put(f"lora/{number}", files, more=noise | many if number == 1 else None)
        await world.exact_from(uri, changes, name=f"d11-{number}")


@on("L/two-slots")
async def test_d07_more_adapters_than_slots(world: World) -> None:
    made = await registered(world, "d07", 12)
    for name, changes in made.items():
        await world.serves(name, changes)
    dice = random.Random(7)
    for _ in range(5):
        await each(*(world.serves(name, made[name]) for name in dice.choices(list(made), k=8)))


def traces(world: World, digest: str) -> list[Path]:
    """Files of an adapter in the store and in the LoRA server's disk cache."""
    number = digest.removeprefix("sha256:")
    return [path for root in (world.root / "store", disk_cache(world)) for path in root.rglob(f"*{number}*")]


async def is_held(world: World, digest: str) -> bool:
    """Whether a LoRA server has it in a slot, by the fleet's own account."""
    fleet = await world.factory.fleet(lambda body: bool(body["members"]), within_s=10)
    servers = [member["load"] for member in fleet["members"] if member["kind"] == "lora-server"]
    return any(digest in load["resident"] for load in servers)


@on("L/two-slots")
async def test_d08_what_is_unloaded_is_nowhere(world: World) -> None:
    made, digests = {}, {}
    for seed, name in enumerate(("d08-a", "d08-b", "d08-c")):
        files, made[name] = numbered(world, 800 + seed)
        digests[name] = (await world.register(files, name=name))["digest"]
        await world.serves(name, made[name])
    gone = digests["d08-b"]
    assert len(traces(world, gone)) >= 2, "nothing to see: not in the store, or not on the disk"
    await world.serves("d08-b", made["d08-b"])
    assert (await world.api.http.delete("/v1/adapters/d08-b")).status_code == 200
    async with asyncio.timeout(45):
        while traces(world, gone) or await is_held(world, gone):
            await asyncio.sleep(0.2)
    files, changes = numbered(world, 808)
    again = await world.register(files, name="d08-b")
    assert again["digest"] != gone
    await each(world.serves("d08-b", changes), *(world.serves(name, made[name]) for name in ("d08-a", "d08-c")))


@on("L/two-slots")
async def test_d28_cached_files_that_vanish(world: World) -> None:
    made = await registered(world, "d28", 6)
    for name, changes in made.items():
        await world.serves(name, changes)
    for path in disk_cache(world).glob("*.safetensors"):
        path.unlink()
    for name, changes in made.items():
        await world.serves(name, changes)


@on("L/two-slots")
async def test_d29_a_disk_cache_stays_within_its_bytes(world: World) -> None:
    made = await registered(world, "d29", 16)
    for name, changes in made.items():
        await world.serves(name, changes)
        assert cached_bytes(world) <= SMALL_CACHE_BYTES
    assert cached_bytes(world) > SMALL_CACHE_BYTES // 2, (
        "nothing was cached: this test could not see a cache that grows"
    )


@on("L/proxy")
async def test_d30_no_reads_once_it_is_resident(world: World) -> None:
    assert world.proxy is not None
    files, changes = numbered(world, 30)
    digest = (await world.register(files, name="d30"))["digest"].removeprefix("sha256:")
    await world.serves("d30", changes)
    before = len(world.proxy.asked("GET", digest))
    assert before, "nothing was fetched: this test could not see a read"
    for path in disk_cache(world).glob(f"{digest}*"):
        path.unlink()
    await asyncio.gather(*(world.api.generate("d30", PROMPT, max_tokens=1) for _ in range(100)))
    await world.serves("d30", changes)
    assert len(world.proxy.asked("GET", digest)) == before
    assert not list(disk_cache(world).glob(f"{digest}*"))


@on("L")
async def test_d12_forms_of_an_address(world: World) -> None:
    files, changes = numbered(world, 12)
    digests = set()
    for number, prefix in enumerate(("gsm8k", "with space/a+b", "stra\u00dfe/\u6570\u5b66", "dots.in/it")):
        uri = world.put(f"d12/{prefix}", files)
        digests.add((await world.exact_from(uri, changes, name=f"d12-{number}"))["digest"])
    assert len(digests) == 1
    _, bucket = world.store()
    for source in (f"{bucket}/d12/gsm8k", "gsm8k", f"s3://{bucket}", f"s3://{bucket}/../x", "http://host/gsm8k"):
        await world.refused_as({"name": "d12-no", "source": source}, status=[400])


@on("L/proxy")
async def test_d06_many_first_requests_for_a_cold_adapter(world: World) -> None:
    assert world.proxy is not None
    files, changes = numbered(world, 6)
    entry = await world.register(files, name="d06")
    digest = entry["digest"].removeprefix("sha256:")
    world.proxy.fault(Fault(status=503, path=digest))
    before = len(world.proxy.asked("GET", digest))
    leaver = asyncio.create_task(world.api.generate("d06", PROMPT, max_tokens=4))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(world.api.score("d06", PROMPT)) for _ in range(200)]
    leaver.cancel()
    wanted = world.oracle.logprobs(PROMPT, changes)
    for scored in await asyncio.gather(*waiting):
        assert max(abs(a - b) for a, b in zip(scored.prompt_logprobs, wanted, strict=True)) <= LOGPROB_BOUND
    answered = [seen for seen in world.proxy.asked("GET", digest)[before:] if seen.status < 300]
    ranges = [seen.headers.get("range") for seen in answered]
    assert ranges, "nothing was fetched: this test could not see a second download"
    assert len(ranges) == len(set(ranges)), "some bytes were fetched twice"
    fleet = await world.factory.fleet(lambda body: bool(body["members"]), within_s=10)
    held = [d for member in fleet["members"] if member["kind"] == "lora-server" for d in member["load"]["resident"]]
    assert held.count(entry["digest"]) == 1


@on("L/proxy")
async def test_d15_what_a_store_says_is_told_in_our_words(world: World) -> None:
    assert world.proxy is not None
    files, changes = numbered(world, 15)
    uri = world.put("d15/a", files)
    body = {"name": "d15", "source": uri}
    client, bucket = world.store()
    secrets = (
        client._base_url.host,
        bucket,
        *world.factory.stack._started().shared["INFINILORA_S3_ACCESS_KEY"].split(),
    )
    for code in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "RequestTimeTooSkewed"):
        told = f"<Error><Code>{code}</Code><Message>{bucket} of {secrets[-1]}</Message></Error>"
        for method in ("GET", "HEAD"):
            world.proxy.fault(Fault(method=method, path="d15/a", status=403, body=told))
        error = error_of(await world.api.http.post("/v1/adapters", json=body), [502, 503])
        assert error["code"] == "store_refused"
        assert not [word for word in secrets if word in error["message"]], error["message"]
        world.proxy._faults.clear()
    await world.refused_as({"name": "d15-none", "source": f"{uri}-none"}, "adapter_config.json", status=[404])
    before = len(world.proxy.seen)
    await world.exact_from(uri, changes, name="d15")
    assert not [seen.path for seen in world.proxy.seen[before:] if "list-type" in seen.path], "a list was asked for"
