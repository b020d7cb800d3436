"""Class D, from the store to a slot: prefixes, more adapters than slots, a disk cache that is small, emptied, away."""

import asyncio
import os
import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from support.api import Api, Scored
from support.cases import PROMPT, Change, Files, config, keyed, modules
from support.s3_proxy import Fault, Seen
from support.worlds import LOGPROB_BOUND, SMALL_CACHE_BYTES, World, each, error_of, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]

QV = modules("q_proj", "v_proj")


def numbered(world: World, seed: int) -> tuple[Files, list[Change]]:
    loras = world.oracle.loras(QV, seed=seed)
    return Files(config(), keyed(loras)), world.oracle.merge(loras, 2.0)


async def registered(world: World, prefix: str, count: int) -> dict[str, list[Change]]:
    """So many adapters, all unlike; a few at a time, as the gateway's workers take them."""
    made = {f"{prefix}-{seed}": numbered(world, 1000 + seed) for seed in range(count)}
    names = list(made)
    for first in range(0, count, 4):
        await each(*(world.register(made[name][0], name=name) for name in names[first : first + 4]))
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


def lora_servers(fleet: dict[str, Any]) -> list[dict[str, Any]]:
    return [member["load"] for member in fleet["members"] if member["kind"] == "lora-server"]


def residents(fleet: dict[str, Any]) -> list[str]:
    """One entry for each slot of the fleet that holds an adapter."""
    return [digest for load in lora_servers(fleet) for digest in load["resident"]]


async def pin(world: World, name: str, *, pinned: bool) -> None:
    """Pin or unpin an adapter, and wait until it is in a slot or, unpinned, anything may take its place."""
    entry = (await world.api.http.post(f"/v1/adapters/{name}/pin", json={"pinned": pinned})).json()
    if pinned:
        await world.factory.fleet(
            lambda body: any(entry["digest"] in load["resident"] for load in lora_servers(body)), within_s=30
        )


SOAK_D07 = pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("requests", [100, SOAK_D07])
@pytest.mark.timeout(300)
@on("L/two-slots")
async def test_d07_more_adapters_than_slots(world: World, requests: int) -> None:
    made = await registered(world, "d07", 50)
    wanted = {name: world.oracle.logprobs(PROMPT, changes) for name, changes in made.items()}

    async def right(name: str) -> None:
        scored = await world.api.score(name, PROMPT)
        assert max(abs(a - b) for a, b in zip(scored.prompt_logprobs, wanted[name], strict=True)) <= LOGPROB_BOUND

    async def within_limits() -> None:
        fleet = await world.factory.fleet(lambda body: bool(lora_servers(body)), within_s=10)
        assert all(len(load["resident"]) <= 2 for load in lora_servers(fleet))

    for name in made:
        await right(name)
    await within_limits()
    await pin(world, "d07-7", pinned=True)
    dice = random.Random(7)
    for _ in range(requests // 10):
        await each(*(right(name) for name in dice.choices(list(made), k=10)))
    await within_limits()
    await pin(world, "d07-7", pinned=True)  # it never left
    await all_slots_pinned(world, "d07-7", "d07-8", cold="d07-9")
    await right("d07-9")


async def all_slots_pinned(world: World, first: str, second: str, *, cold: str) -> None:
    """With every slot pinned a cold adapter is refused with a reason, and the pinned ones answer."""
    await pin(world, second, pinned=True)
    async with asyncio.timeout(30):
        while (
            answer := await world.api.http.post("/v1/completions", json={"model": cold, "prompt": PROMPT})
        ).is_success:
            await asyncio.sleep(0.1)  # the pin is on its way to the LoRA server
    error = error_of(answer, [429, 503])
    assert "pin" in error["message"]
    assert "retry-after" in answer.headers
    await each(*(world.api.generate(name, PROMPT, max_tokens=1) for name in (first, second)))
    for name in (first, second):
        await pin(world, name, pinned=False)
    async with asyncio.timeout(30):
        body = {"model": cold, "prompt": PROMPT}
        while not (answer := await world.api.http.post("/v1/completions", json=body)).is_success:
            error_of(answer, [429, 503])
            await asyncio.sleep(0.1)


def traces(world: World, digest: str) -> list[Path]:
    """Files of an adapter in the store and in the LoRA server's disk cache."""
    number = digest.removeprefix("sha256:")
    return [path for root in (world.root / "store", disk_cache(world)) for path in root.rglob(f"*{number}*")]


async def is_held(world: World, digest: str) -> bool:
    """Whether a LoRA server has it in a slot, by the fleet's own account."""
    fleet = await world.factory.fleet(lambda body: bool(body["members"]), within_s=10)
    return any(digest in load["resident"] for load in lora_servers(fleet))


@on("L/two-slots")
async def test_d08_what_is_unloaded_is_nowhere(world: World) -> None:
    made, digests = {}, {}
    for seed, name in enumerate(("d08-a", "d08-b", "d08-c")):
        files, made[name] = numbered(world, 800 + seed)
        digests[name] = (await world.register(files, name=name))["digest"]
        await world.serves(name, made[name])
    gone = digests["d08-b"]
    await world.serves("d08-b", made["d08-b"])
    assert traces(world, gone), "nothing to see in the store or on the disk"
    async with asyncio.timeout(45):  # the fleet's account is as old as a beat
        while not await is_held(world, gone):
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
async def test_d08_who_was_away_when_it_was_unloaded_has_it_no_more_when_it_is_back(running: World) -> None:
    files, changes = numbered(running, 809)
    gone = (await running.register(files, name="d08-away"))["digest"]
    await running.serves("d08-away", changes)
    pid = running.factory.stack.pid("lora-server")
    assert pid is not None
    os.killpg(pid, signal.SIGSTOP)
    assert (await running.api.http.delete("/v1/adapters/d08-away")).status_code == 200
    async with asyncio.timeout(45):
        while any(path.is_relative_to(running.root / "store") for path in traces(running, gone)):
            await asyncio.sleep(0.2)
    assert traces(running, gone), "nothing to see on the disk of whoever is away"
    os.killpg(pid, signal.SIGKILL)
    async with asyncio.timeout(45):
        while traces(running, gone):
            await asyncio.sleep(0.2)
    await running.until_ready("lora-server", 1)


@on("L/two-slots")
async def test_d28_cached_files_that_vanish(world: World) -> None:
    made = await registered(world, "d28", 20)
    for name, changes in made.items():
        await world.serves(name, changes)
    shutil.rmtree(disk_cache(world))
    for name, changes in made.items():
        await world.serves(name, changes)


SOAK_D29 = pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("adapters", [16, SOAK_D29])
@on("L/two-slots")
async def test_d29_a_disk_cache_stays_within_its_bytes(world: World, adapters: int) -> None:
    made = await registered(world, f"d29-{adapters}", adapters)
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
    dotted = world.put("d12/gsm8k", files, bucket="adapters.with.dots")
    env = {"INFINILORA_ADAPTER_BUCKETS": "adapters.with.dots/d12"}
    other = await world.factory.another_gateway("gateway-d12", env)
    answer = await other.http.post("/v1/adapters", json={"name": "d12-dots", "source": dotted})
    digests.add(answer.json()["digest"])
    assert len(digests) == 1
    _, bucket = world.store()
    for source in (f"{bucket}/d12/gsm8k", "gsm8k", f"s3://{bucket}", f"s3://{bucket}/../x", "http://host/gsm8k"):
        await world.refused_as({"name": "d12-no", "source": source}, status=[400])


class Cold(NamedTuple):
    """An adapter that no LoRA server holds yet, and how often the store was asked for it before."""

    world: World
    name: str
    digest: str
    changes: list[Change]
    asked_before: int

    @property
    def path(self) -> str:
        return self.digest.removeprefix("sha256:")

    def asked(self) -> list[Seen]:
        assert self.world.proxy is not None
        return self.world.proxy.asked("GET", self.path)[self.asked_before :]

    def first_requests(self) -> list[asyncio.Task[Scored]]:
        """Two hundred, all begun."""
        return [asyncio.create_task(self.world.api.score(self.name, PROMPT)) for _ in range(200)]

    async def all_right(self, requests: list[asyncio.Task[Scored]]) -> None:
        wanted = self.world.oracle.logprobs(PROMPT, self.changes)
        for scored in await asyncio.gather(*requests):
            assert max(abs(a - b) for a, b in zip(scored.prompt_logprobs, wanted, strict=True)) <= LOGPROB_BOUND

    async def was_fetched_once(self) -> None:
        """Each range was had once, for both engines together, and the adapter has one slot."""
        ranges = [seen.headers.get("range") for seen in self.asked() if seen.status < 300]
        assert ranges, "nothing was fetched: this test could not see a second download"
        assert len(ranges) == len(set(ranges)), "some bytes were fetched twice"
        # The fleet's account is as old as a beat.
        fleet = await self.world.factory.fleet(lambda body: self.digest in residents(body), within_s=10)
        assert residents(fleet).count(self.digest) == 1


async def cold(world: World, name: str, seed: int) -> Cold:
    assert world.proxy is not None
    files, changes = numbered(world, seed)
    digest = (await world.register(files, name=name))["digest"]
    return Cold(world, name, digest, changes, len(world.proxy.asked("GET", digest.removeprefix("sha256:"))))


IN_FLIGHT = "infinilora_requests_in_flight"


async def until(metrics: Api, name: str, value: int) -> None:
    async with asyncio.timeout(30):
        while await metric(metrics, name) != value:
            await asyncio.sleep(0.05)


async def metric(metrics: Api, name: str) -> float:
    """The sum of a metric of a process over its labels."""
    lines = (await metrics.http.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


@on("L/proxy")
async def test_d06_many_first_requests_for_a_cold_adapter(world: World) -> None:
    async with world.factory.another_engine("engine-d06") as metrics:
        adapter = await cold(world, "d06", 6)
        await adapter.all_right(adapter.first_requests())
        await adapter.was_fetched_once()
        assert 0 < await metric(metrics, "infinilora_engine_step_rows_total") < 200 * len(PROMPT), (
            "one of the two engines had all the requests"
        )


@on("L/proxy")
async def test_d06_a_store_that_fails_first_is_told_to_all_and_asked_again(world: World) -> None:
    assert world.proxy is not None
    async with world.factory.another_engine("engine-d06"):
        adapter = await cold(world, "d06-fails", 61)
        world.proxy.fault(Fault(status=503, path=adapter.path), times=100_000)
        answers = await asyncio.gather(*adapter.first_requests(), return_exceptions=True)
        told = [answer.response for answer in answers if isinstance(answer, httpx.HTTPStatusError)]
        assert len(told) == len(answers)
        assert {error_of(answer, [503])["code"] for answer in told} == {"unavailable"}
        assert len({answer.text for answer in told}) == 1
        assert len(adapter.asked()) < len(told), "everyone who waited asked the store anew"
        world.proxy._faults.clear()
        await asyncio.sleep(float(told[0].headers["retry-after"]))
        await world.serves(adapter.name, adapter.changes)
        await adapter.was_fetched_once()


@on("L/proxy")
async def test_d06_the_first_client_that_leaves_takes_nobody_along(world: World) -> None:
    assert world.proxy is not None
    async with world.factory.another_engine("engine-d06"):
        adapter = await cold(world, "d06-leaves", 62)
        with world.proxy.held(adapter.path):
            other = Api(world.api.url)  # the first one's connections are all taken
            leaver = asyncio.create_task(other.generate(adapter.name, PROMPT, max_tokens=4))
            await asyncio.to_thread(world.proxy.wait_held)  # it is its request that asks the store
            waiting = adapter.first_requests()
            await until(other, IN_FLIGHT, 1 + len(waiting))
            leaver.cancel()
            await until(other, IN_FLIGHT, len(waiting))
            await other.close()
        await adapter.all_right(waiting)
        await adapter.was_fetched_once()


@on("L/proxy")
async def test_d23_what_is_resident_outlives_the_store(world: World) -> None:
    assert world.proxy is not None
    made = {name: numbered(world, seed) for seed, name in enumerate(("d23-warm", "d23-cold"), 230)}
    for name, (files, _) in made.items():
        await world.register(files, name=name)
    await world.serves("d23-warm", made["d23-warm"][1])
    for method in ("GET", "HEAD", "PUT"):
        world.proxy.fault(Fault(method=method, status=503), times=100_000)
    cold = asyncio.create_task(world.api.http.post("/v1/completions", json={"model": "d23-cold", "prompt": PROMPT}))
    while not cold.done():
        await world.serves("d23-warm", made["d23-warm"][1])
        assert (await world.api.http.get("/readyz")).status_code == 200
    assert error_of(cold.result(), [503])["code"] == "unavailable"
    # Whoever has asked the store says so, and is ready all the same.
    degraded = await world.api.wait("/readyz", lambda told: bool(told["away"]), within_s=30)
    assert (degraded["status"], degraded["away"]) == ("degraded", ["store"])
    assert await metric(world.api, "infinilora_object_store_answers") == 0
    await world.factory.fleet(lambda fleet: without_store(fleet) == {"gateway-0", "lora-0"}, within_s=30)
    world.proxy._faults.clear()
    async with asyncio.timeout(30):
        while not (
            await world.api.http.post("/v1/completions", json={"model": "d23-cold", "prompt": PROMPT})
        ).is_success:
            await asyncio.sleep(0.1)
    await world.serves("d23-cold", made["d23-cold"][1])
    await world.api.wait("/readyz", lambda told: told["status"] == "ready", within_s=30)
    assert await metric(world.api, "infinilora_object_store_answers") == 1
    await world.factory.fleet(lambda fleet: not without_store(fleet), within_s=30)


def without_store(fleet: dict[str, Any]) -> set[str]:
    """Which of the system's own processes do not reach the object store, by their own account."""
    own = {"gateway-0", "engine-0", "lora-0"}
    return own & {member["id"] for member in fleet["members"] if "store" in member["away"]}


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
    await wrong_keys_are_refused(world, body, secrets)
    await world.refused_as({"name": "d15-none", "source": f"{uri}-none"}, "adapter_config.json", status=[404])
    before = len(world.proxy.seen)
    await world.exact_from(uri, changes, name="d15")
    assert not [seen.path for seen in world.proxy.seen[before:] if "list-type" in seen.path], "a list was asked for"


async def wrong_keys_are_refused(world: World, body: dict[str, str], secrets: Sequence[str]) -> None:
    """Gateways whose keys the store itself does not take: not their tenants' fault, and told by no word of it."""
    shared = world.factory.stack._started().shared
    for number, env in enumerate(
        ({"INFINILORA_S3_SECRET_KEY": "not the secret"}, {"INFINILORA_S3_ACCESS_KEY": "nobody"})
    ):
        other = await world.factory.another_gateway(f"gateway-d15-{number}", env, until="/healthz")
        async with asyncio.timeout(30):
            while (answer := await other.http.post("/v1/adapters", json=body)).json()["error"]["code"] == "unavailable":
                await asyncio.sleep(0.1)  # it has not heard an engine, or not read the registry yet
        error = error_of(answer, [502, 503])
        assert error["code"] == "store_refused"
        words = (*secrets, shared["INFINILORA_S3_SECRET_KEY"], *env.values())
        assert not [word for word in words if word in error["message"]], error["message"]
