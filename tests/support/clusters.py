"""A control plane of real processes: NATS, Redis, coordinators, groups that only beat. Any may be killed."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from typing_extensions import override

from infinilora.protocol.ids import Fingerprint
from support.procs import NatsServer, Server, ValkeyServer

BEAT_MS = 200


class Coordinator(Server):
    """`python -m infinilora.coordinator`."""

    name = "coordinator"

    def __init__(self, home: Path, name: str, nats: NatsServer, valkey: ValkeyServer, **settings: str) -> None:
        super().__init__(home / name)
        self.id = name
        self._settings = {
            "NATS_URL": nats.url,
            "REDIS_URL": valkey.url,
            "STORE_URL": f"file://{home}/store",
            "LISTEN": f"127.0.0.1:{self.port}",
            "COORDINATOR_ID": name,
            "BEAT_MS": str(BEAT_MS),
            "LEASE_S": "1.5",
            "RECONCILE_S": "0.3",
            **settings,
        }

    @override
    def command(self) -> list[str]:
        return [sys.executable, "-m", "infinilora.coordinator"]

    @override
    def environment(self) -> dict[str, str]:
        return {f"INFINILORA_{key}": value for key, value in self._settings.items()}

    async def ask(self, path: str) -> tuple[int, Any]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False) as http:
            answer = await http.get(path)
            return answer.status_code, answer.json()

    async def fleet(self) -> dict[str, Any]:
        fleet: dict[str, Any] = (await self.ask("/v1/fleet"))[1]
        return fleet

    async def is_well(self) -> bool:
        status, body = await self.ask("/readyz")
        return (status, body["status"]) == (200, "ready")

    async def metrics(self) -> str:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False) as http:
            return (await http.get("/metrics")).text

    async def leads(self) -> bool:
        return bool((await self.fleet())["is_leading"])


class BeatingGroup(Server):
    """`support.beating_group`: whether it is there is for its observers to say."""

    name = "group"

    def __init__(self, home: Path, name: str, base: Fingerprint, nats: NatsServer, *, rows_per_s: float = 0.0) -> None:
        super().__init__(home / name)
        self.id = name
        self._arguments = [nats.url, name, base, str(BEAT_MS), str(rows_per_s)]

    @override
    def command(self) -> list[str]:
        return [sys.executable, "-m", "support.beating_group", *self._arguments]

    @override
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class Cluster:
    """A broker and a store of the test's own, that it may kill."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.nats = NatsServer(home / "nats")
        self.valkey = ValkeyServer(home / "valkey")
        self.coordinators: list[Coordinator] = []
        self.groups: list[BeatingGroup] = []

    def group(self, name: str, base: Fingerprint, *, rows_per_s: float = 0.0) -> "BeatingGroup":
        server = BeatingGroup(self.home, name, base, self.nats, rows_per_s=rows_per_s)
        self.groups.append(server)
        server.launch()
        return server

    async def coordinator(self, name: str, **settings: str) -> Coordinator:
        server = Coordinator(self.home, name, self.nats, self.valkey, **settings)
        self.coordinators.append(server)
        await asyncio.to_thread(server.start)
        return server

    def stop(self) -> None:
        for server in (*self.coordinators, *self.groups, self.nats, self.valkey):
            server.kill()


@asynccontextmanager
async def a_cluster(home: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(home)
    try:
        await asyncio.to_thread(cluster.nats.start)
        await asyncio.to_thread(cluster.valkey.start)
        yield cluster
    finally:
        await asyncio.to_thread(cluster.stop)
