"""Starts whole systems for the tests: every process real, every port free, everything gone afterwards."""

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from infinilora.cli import services
from infinilora.cli.child import Child
from infinilora.cli.ports import free_ports
from infinilora.cli.stack import Stack
from support.api import Api


class StackFactory:
    """Stacks of one test. `start` gives a client of a ready system; `stop` ends them all."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stacks: list[Stack] = []
        self.apis: list[Api] = []
        self.children: list[Child] = []
        self.coordinators: list[Api] = []

    async def start(self, model: Path, *, backend: str = "shm", env: dict[str, str] | None = None, **more: Any) -> Api:
        """Serve `model` under the name `tiny`; backend is shm, tcp, or local or none: no LoRA server."""
        extra = {"INFINILORA_ADAPTER_ROOTS": str(self.root), **(env or {})}
        if backend == "tcp":
            extra["INFINILORA_LINK_BACKENDS"] = "tcp"
        stack = Stack(
            self.root / f"var{len(self.stacks)}",
            model=str(model),
            served_name="tiny",
            port=0,
            lora=backend if backend in ("local", "none") else "remote",
            extra_env=extra,
            **more,
        )
        self.stacks.append(stack)
        await stack.start()
        api = Api(stack.url)
        self.apis.append(api)
        return api

    async def another_gateway(self, name: str, env: dict[str, str], *, until: str = "/readyz") -> Api:
        """A second gateway of the latest system, told what `env` says beyond the first; `/healthz`: it only lives."""
        plan, (port,) = self.stack._started(), free_ports(1)
        own = {"INFINILORA_GATEWAY_ID": name, **env}
        plan = dataclasses.replace(plan, gateway_port=port, shared={**plan.shared, **own})
        child = Child(services.gateway(plan), self.stack.home.new_log(name), lambda *_: None)
        self.children.append(child)
        child.start()
        api = Api(plan.url)
        self.apis.append(api)
        await api.wait(until, lambda _: True, within_s=30)
        return api

    async def another_coordinator(self, name: str) -> Child:
        """A second coordinator of the latest system, supervised as the first one is."""
        plan, (port,) = self.stack._started(), free_ports(1)
        own = {"INFINILORA_COORDINATOR_ID": name}
        plan = dataclasses.replace(plan, coordinator_port=port, shared={**plan.shared, **own})
        child = Child(services.coordinator(plan), self.stack.home.new_log(name), lambda *_: None)
        self.children.append(child)
        child.start()
        await child.until_ready()
        self.coordinators = [Api(self.stack.coordinator_url), Api(plan.coordinator_url)]
        self.apis += self.coordinators
        return child

    @asynccontextmanager
    async def another_engine(self, name: str) -> AsyncIterator[Api]:
        """A second engine of the latest system, for as long as the block lasts; gives its metrics."""
        plan, (port, metrics_port) = self.stack._started(), free_ports(2)
        address = f"127.0.0.1:{metrics_port}"
        own = {"INFINILORA_ENGINE_ID": name, "INFINILORA_METRICS_LISTEN": address}
        plan = dataclasses.replace(plan, engine_ports=(port,), shared={**plan.shared, **own})
        child = Child(services.engine(plan), self.stack.home.new_log(name), lambda *_: None)
        child.start()
        metrics = Api(f"http://{address}")
        try:
            await self.fleet(lambda body: name in _ready_engines(body), within_s=60)
            yield metrics
        finally:
            await metrics.close()
            await child.stop()

    async def empty_redis(self) -> None:
        """The Redis server of the latest system has lost everything, and goes on."""
        async with Redis.from_url(self.stack._started().shared["INFINILORA_REDIS_URL"]) as redis:
            await redis.flushall()

    @property
    def stack(self) -> Stack:
        return self.stacks[-1]

    async def fleet(self, condition: Callable[[dict[str, Any]], bool], *, within_s: float) -> dict[str, Any]:
        """The coordinator's view of the fleet, once it meets the condition."""
        coordinator = Api(self.stack.coordinator_url)
        self.apis.append(coordinator)
        return await coordinator.wait("/v1/fleet", condition, within_s=within_s)

    async def stop(self) -> None:
        for api in self.apis:
            await api.close()
        for child in self.children:
            await child.stop()
        for stack in self.stacks:
            await stack.stop()


def _ready_engines(fleet: dict[str, Any]) -> list[str]:
    members = (member for member in fleet["members"] if member["kind"] == "engine")
    return [member["id"] for member in members if (member["state"], member["health"]) == ("ready", "alive")]
