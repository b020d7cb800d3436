"""Starts whole systems for the tests: every process real, every port free, everything gone afterwards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from infinilora.cli.stack import Stack
from support.api import Api


class StackFactory:
    """Stacks of one test. `start` gives a client of a ready system; `stop` ends them all."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stacks: list[Stack] = []
        self.apis: list[Api] = []

    async def start(self, model: Path, *, backend: str = "shm", env: dict[str, str] | None = None, **more: Any) -> Api:
        """Serve `model` under the name `tiny`; backend is shm, tcp or local."""
        extra = {"INFINILORA_ADAPTER_ROOTS": str(self.root), **(env or {})}
        if backend == "tcp":
            extra["INFINILORA_LINK_BACKENDS"] = "tcp"
        stack = Stack(
            self.root / f"var{len(self.stacks)}",
            model=str(model),
            served_name="tiny",
            port=0,
            lora="local" if backend == "local" else "remote",
            extra_env=extra,
            **more,
        )
        self.stacks.append(stack)
        await stack.start()
        api = Api(stack.url)
        self.apis.append(api)
        return api

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
        for stack in self.stacks:
            await stack.stop()
