"""A hundred thousand registered adapters: how long a name takes to resolve, a page to list, and what the gateway holds.

A real Redis-compatible server is filled, and a real gateway process reads it. Resolving is timed where it happens, in
this process over a mirror of the same store (10,000 names of one tenant in random order, a third each by name, by
version and by alias); pages, single lookups and the gateway's memory through its HTTP API.
"""

import argparse
import asyncio
import hashlib
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
import msgspec
import redis.asyncio
from harness import ROOT, report

from infinilora.cli.ports import free_ports
from infinilora.gateway.catalog import Catalog
from infinilora.gateway.fleet import Fleet
from infinilora.gateway.registry import Registry
from infinilora.protocol import keys
from infinilora.protocol.adapter import AdapterRecord, AliasRecord, VersionRecord
from infinilora.protocol.control import Beat, EngineLoad
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.members import Heart
from infinilora.runtime.membership import Member
from infinilora.runtime.memory import MemoryBus
from infinilora.runtime.rpc import Channels
from infinilora.runtime.store import RedisStore

sys.path.insert(0, str(ROOT / "tests"))

from support.procs import NatsServer, ValkeyServer
from support.waiting import eventually

TENANT = "default"
BASE = Fingerprint("sha256:" + hashlib.sha256(b"base").hexdigest())
ALIAS_EVERY = 100
"""One adapter of so many has an alias."""
RESOLVE_MS = 1.0
PAGE_MS = 50.0
FLAT = 0.05
"""Growth of the gateway's memory, of its own size after loading, that is called flat."""


class Spread(NamedTuple):
    """Milliseconds."""

    median: float
    p99: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Spread":
        kept = sorted(seconds)
        return cls(1000 * statistics.median(kept), 1000 * kept[len(kept) * 99 // 100])


def digest(text: str) -> Digest:
    return Digest("sha256:" + hashlib.sha256(text.encode()).hexdigest())


def name_of(number: int) -> str:
    return f"customer-{number:06}"


def record(number: int) -> AdapterRecord:
    name = name_of(number)
    versions = tuple(
        VersionRecord(
            version=version,
            digest=digest(f"{name}/{version}"),
            created_at="2026-11-30T02:00:00+00:00",
            source=f"s3://adapters/customers/{name}",
            num_bytes=9_830_400,
            max_rank=16,
            num_tensors=420,
        )
        for version in range(1, 3 if number % 2 else 2)
    )
    aliases = (f"alias-{number:06}",) if number % ALIAS_EVERY == 0 else ()
    return AdapterRecord(
        tenant=TENANT,
        name=name,
        base=BASE,
        revision=1,
        current=versions[-1].digest,
        versions=versions,
        last_version=len(versions),
        aliases=aliases,
    )


async def fill(url: str, count: int) -> None:
    """As the adapter API would have written it, many at a time."""
    async with redis.asyncio.Redis.from_url(url) as client:
        revision = 0
        for start in range(0, count, 1000):
            pipe = client.pipeline(transaction=False)
            journal: dict[str, int] = {}
            for number in range(start, min(start + 1000, count)):
                made = record(number)
                revision += 1
                pipe.set(keys.adapter(TENANT, made.name), msgspec.json.encode(made))
                journal[keys.adapter_entry(TENANT, made.name)] = revision
                for alias in made.aliases:
                    revision += 1
                    target = AliasRecord(tenant=TENANT, name=alias, target=f"{made.name}@v1", revision=1)
                    pipe.set(keys.alias(TENANT, alias), msgspec.json.encode(target))
                    journal[keys.alias_entry(TENANT, alias)] = revision
            pipe.zadd(keys.REGISTRY_JOURNAL, journal)
            await pipe.execute()
        await client.set(keys.REGISTRY_REVISION, revision)


def beat() -> Beat:
    return Beat(
        kind="engine", id="engine-0", incarnation="1", seq=0, state="ready", address="127.0.0.1:1", model="base",
        base=BASE, load=EngineLoad(),
    )  # fmt: skip


async def time_resolves(url: str, count: int, n: int) -> tuple[Spread, float]:
    """Of `n` names, and the seconds that reading the registry took."""
    async with RedisStore(url) as store, Channels(token="of the benchmark") as channels:
        registry = Registry(store, MemoryBus())
        started = time.perf_counter()
        await registry.refresh()
        read_s = time.perf_counter() - started
        if len(registry) != count:
            sys.exit(f"the mirror holds {len(registry)} adapters; wanted {count}")
        catalog = Catalog(Fleet(lambda: [Member(beat(), 0.0)], channels), registry, {})
        dice = random.Random(1)
        taken = []
        for turn in range(n):
            number = dice.randrange(count)
            aliased = number - number % ALIAS_EVERY
            model, wanted = (
                (name_of(number), record(number).current),
                (f"{name_of(number)}@v1", digest(f"{name_of(number)}/1")),
                (f"alias-{aliased:06}", digest(f"{name_of(aliased)}/1")),
            )[turn % 3]
            started = time.perf_counter()
            target = catalog.resolve(model, TENANT)
            taken.append(time.perf_counter() - started)
            if target.digest != wanted:
                sys.exit(f"{model} was resolved to another digest")
    return Spread.of(taken), read_s


async def time_pages(http: httpx.AsyncClient, path: str, count: int, n: int) -> Spread:
    """Pages of 100 from random places; the first ones warm up and are not counted."""
    dice = random.Random(2)
    taken = []
    for turn in range(n + 10):
        number = dice.randrange(count - 101)
        started = time.perf_counter()
        answer = await http.get(path, params={"limit": 100, "after": name_of(number)})
        spent = time.perf_counter() - started
        ids = [item["id"] for item in answer.raise_for_status().json()["data"]]
        if ids != [name_of(number + i) for i in range(1, 101)]:
            sys.exit(f"{path} after {name_of(number)} is not the page that follows it")
        taken += [spent] if turn >= 10 else []
    return Spread.of(taken)


async def time_lookups(http: httpx.AsyncClient, count: int, n: int) -> Spread:
    dice = random.Random(3)
    taken = []
    for _ in range(n):
        started = time.perf_counter()
        (await http.get(f"/v1/models/{name_of(dice.randrange(count))}")).raise_for_status()
        taken.append(time.perf_counter() - started)
    return Spread.of(taken)


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    sys.exit("the gateway is gone")


async def has_read(http: httpx.AsyncClient, count: int) -> bool:
    """Also a page of models is full: an engine has been heard."""
    try:
        adapters = (await http.get("/readyz")).json()["adapters"]
        return bool(adapters == count and (await http.get("/v1/models?limit=1")).json()["has_more"])
    except httpx.TransportError:
        return False


async def gateway(home: Path, nats: NatsServer, valkey: ValkeyServer, count: int, n: int) -> dict[str, Any]:
    """A gateway process over the filled store: pages, lookups, memory before and after."""
    (port,) = free_ports(1)
    settings = {
        "NATS_URL": nats.url,
        "REDIS_URL": valkey.url,
        "STORE_URL": f"file://{home}/store",
        "VAR_DIR": str(home / "var"),
        "LISTEN": f"127.0.0.1:{port}",
        "LOG_LEVEL": "error",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "infinilora.gateway"),
        env={f"INFINILORA_{key}": value for key, value in settings.items()},
    )
    heart = asyncio.get_running_loop().create_task(Heart(nats.url, beat, interval_s=0.5).run())
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            await eventually(partial(has_read, http, count), "the gateway has read the registry", 120)
            await time_pages(http, "/v1/adapters", count, 10)  # both lists are warm
            await time_pages(http, "/v1/models", count, 10)
            before = resident_mb(process.pid)
            found = {
                "page": await time_pages(http, "/v1/adapters", count, n),
                "models_page": await time_pages(http, "/v1/models", count, n),
                "lookup": await time_lookups(http, count, 10 * n),
            }
            after = resident_mb(process.pid)
        return {**found, "before_mb": before, "after_mb": after}
    finally:
        heart.cancel()
        process.terminate()
        await process.wait()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--n", type=int, default=300)
    options = parser.parse_args()
    with TemporaryDirectory(prefix="infinilora-bench-") as folder:
        home = Path(folder)
        valkey, nats = ValkeyServer(home / "valkey"), NatsServer(home / "nats")
        try:
            valkey.start()
            nats.start()
            await fill(valkey.url, options.count)
            resolve, read_s = await time_resolves(valkey.url, options.count, 10_000)
            print(f"registry of {options.count} read in {read_s:.1f} s")
            print(f"resolve    median {1000 * resolve.median:7.1f} us, p99 {1000 * resolve.p99:7.1f} us, n=10000")
            seen = await gateway(home, nats, valkey, options.count, options.n)
        finally:
            nats.stop()
            valkey.stop()
    for name in ("page", "models_page", "lookup"):
        print(f"{name:10} median {seen[name].median:7.2f} ms, p99 {seen[name].p99:7.2f} ms, over HTTP")
    growth = seen["after_mb"] / seen["before_mb"] - 1
    print(f"gateway    {seen['before_mb']:.0f} MiB before, {seen['after_mb']:.0f} MiB after {100 * growth:+.1f}%")
    page = max(seen["page"].p99, seen["models_page"].p99)
    report(
        "bench-registry",
        resolve.p99,
        RESOLVE_MS,
        met=resolve.p99 <= RESOLVE_MS and page <= PAGE_MS and growth <= FLAT,
        unit="ms, p99 of resolving a name; smaller is better",
        adapters=options.count,
        page_p99_ms=round(page, 2),
        page_target_ms=PAGE_MS,
        lookup_p99_ms=round(seen["lookup"].p99, 2),
        read_s=round(read_s, 2),
        gateway_mb=[round(seen["before_mb"], 1), round(seen["after_mb"], 1)],
        gateway_growth=round(growth, 4),
        growth_target=FLAT,
    )


if __name__ == "__main__":
    asyncio.run(main())
