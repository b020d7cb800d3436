"""A whole local system as a value: real servers and the four services, started, watched and stopped together.

    stack = Stack(Path(".var"), model="smollm2-135m", port=8000)
    await stack.start()
    ...  stack.url, stack.coordinator_url, stack.pids(), stack.kill("engine"), await stack.outage("nats", for_s=10)
    await stack.stop()

Used by `infinilora up`, by tests and by benchmarks. Says nothing on a terminal: `on_event` hears what happens.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from infinilora.cli import servers
from infinilora.cli.child import Child, Program
from infinilora.cli.home import Home, Running
from infinilora.cli.models import find_model
from infinilora.cli.ports import free_ports, kept_ports, want
from infinilora.cli.services import (
    Plan,
    engine,
    engine_name,
    lora_server,
    lora_server_name,
    lora_threads,
    services,
    stopping,
)
from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.shards import ONE, Shape

AUTO = "auto"

OnEvent = Callable[[str, str], None]
"""Called with a program's name and what happened to it: "ready", a death, a forced stop."""


def _unheard(name: str, event: str) -> None:
    """Nobody listens."""


class Urls(NamedTuple):
    """Servers of one's own; empty: one is started here."""

    nats: str = ""
    redis: str = ""
    store: str = ""


class Stack:
    """One local system. Between `start` and `stop` every program runs, or is about to run again."""

    def __init__(  # noqa: PLR0913 - each is an option of `infinilora up`
        self,
        var_dir: Path,
        *,
        model: str,
        served_name: str = "",
        port: int = 0,
        lora: str = "remote",
        lora_shape: str = "1x1",
        engines: int = 1,
        engine_shards: str = "1",
        threads: int | None = None,
        urls: Urls | None = None,
        extra_env: Mapping[str, str] | None = None,
        on_event: OnEvent = _unheard,
    ) -> None:
        self._shape, self._engine_shards = check_layout(lora=lora, lora_shape=lora_shape, engine_shards=engine_shards)
        self.home = Home(var_dir)
        self.model = find_model(model, self.home.directory)
        self.served_name = served_name or self.model.name
        self._port = port
        self._lora = lora
        if engines < 1:
            raise InvalidRequest(f"engines is {engines}; wanted at least one", param="engines")
        self._num_engines = engines
        self._threads = threads or os.cpu_count() or 1
        self._urls = (urls or Urls())._asdict()
        self._extra_env = dict(extra_env or {})
        self._on_event = on_event
        self._children: dict[str, Child] = {}
        self._plan: Plan | None = None

    @property
    def url(self) -> str:
        """Of the gateway: the OpenAI API is below `/v1`."""
        return self._started().url

    @property
    def coordinator_url(self) -> str:
        return self._started().coordinator_url

    def names(self) -> tuple[str, ...]:
        """The programs of this system, in the order in which they start."""
        return tuple(self._children)

    def pids(self) -> dict[str, int | None]:
        """The process of each program; None in the pause after a death."""
        return {name: child.pid for name, child in self._children.items()}

    def pid(self, name: str) -> int | None:
        return self._child(name).pid

    def log(self, name: str) -> Path:
        return self._child(name).log

    async def start(self) -> None:
        """Return when the system serves. On failure nothing is left running, and the error says why."""
        self.home.lock()
        try:
            port = await want(self._port)
            shape = self._shape if self._shape is not None else await asyncio.to_thread(self._auto_shape)
            shared = await self._start_servers()
            self._plan = self._plan_services(port, shape, shared)
            await self._run(services(self._plan))
            self.home.say_running(Running(pid=os.getpid(), url=self.url, coordinator_url=self.coordinator_url))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop all: the services in their order, the servers last. Harmless when repeated."""
        try:
            for names in stopping(self.names()):
                await asyncio.gather(*(self._children[name].stop() for name in names))
            await asyncio.gather(*(child.stop() for child in self._children.values()))
        finally:
            self._children.clear()
            self._plan = None
            self.home.unlock()

    def kill(self, name: str) -> None:
        """Kill -9; the supervisor starts the program again."""
        self._child(name).kill()

    def end(self) -> None:
        """Kill -9 everything, for good; what a `stop` under way was still waiting for."""
        for child in self._children.values():
            child.end()

    async def outage(self, name: str, *, for_s: float) -> None:
        """Kill -9 a program, keep it away, and return once it is back and ready."""
        await self._child(name).outage(for_s)

    async def set_engines(self, count: int) -> None:
        """Have so many. Those that are new start and are supervised from now on; the last go, and are given time."""
        plan = self._started()
        for number in range(len(plan.engine_ports), count):
            self._plan = plan = replace(plan, engine_ports=(*plan.engine_ports, *free_ports(1)))
            self._add(engine(plan, number))
        for number in reversed(range(count, len(plan.engine_ports))):
            self._plan = replace(plan, engine_ports=plan.engine_ports[:number])
            await self._remove(engine_name(number))

    async def set_groups(self, count: int) -> None:
        """Have so many groups of LoRA servers, as `set_engines`; without LoRA servers there are none to have."""
        plan = self._started()
        if plan.lora != "remote":
            return
        shards = range(Shape.parse(plan.lora_shape).num_shards)
        for group in range(len(plan.group_ports), count):
            self._plan = plan = replace(plan, group_ports=(*plan.group_ports, tuple(free_ports(len(shards)))))
            for shard in shards:
                self._add(lora_server(plan, shard, group))
        for group in reversed(range(count, len(plan.group_ports))):
            self._plan = replace(plan, group_ports=plan.group_ports[:group])
            await asyncio.gather(*(self._remove(lora_server_name(shard, group)) for shard in shards))

    def _add(self, program: Program) -> None:
        child = Child(program, self.home.new_log(program.name), self._on_event)
        self._children[program.name] = child
        child.start()
        self._on_event(program.name, "starts: there are to be more")

    async def _remove(self, name: str) -> None:
        self._on_event(name, "stops: there are to be fewer")
        await self._children[name].stop()
        self._children.pop(name, None)

    async def until_ready(self, name: str) -> None:
        await self._child(name).until_ready()

    async def _start_servers(self) -> dict[str, str]:
        """Start those servers for which no URL was given. Returns addresses and secrets as settings."""
        urls, credentials, programs = dict(self._urls), dict[str, str](), list[Program]()
        for name, make in (("nats", servers.nats), ("redis", servers.redis)):
            if not urls[name]:
                program, urls[name] = make(self.home)
                programs.append(program)
        if not urls["store"]:
            program, urls["store"], credentials = servers.store(self.home)
            programs.append(program)
        await self._run(programs)
        addresses = {f"INFINILORA_{name.upper()}_URL": url for name, url in urls.items()}
        return {"INFINILORA_RPC_TOKEN": self.home.secrets().rpc_token, **addresses, **credentials}

    def _auto_shape(self) -> Shape:
        """By the cost model; measures this machine first, where that was never done here."""
        from infinilora.cli.lora_shape import choose, constants_of, shape_of  # numpy, which others need not load

        constants = constants_of(self.home.directory, threads=self._threads)
        own = lora_threads(self._threads)
        choice = choose(self.model, constants, engines=self._num_engines, lora_threads=own)
        shape = shape_of(choice)
        told = f"shape {shape} of at most {own} shards: a step in {choice.step_s * 1e3:.1f} ms by the cost model"
        self._on_event("lora-server", told)
        return shape

    def _plan_services(self, gateway_port: int, shape: Shape, shared: dict[str, str]) -> Plan:
        ports = kept_ports(self.home.ports_file, "services", 1 + shape.num_shards + self._num_engines)
        coordinator, *others = ports
        engine_ports, head_first = others[: self._num_engines], others[self._num_engines :]
        return Plan(
            model=self.model,
            served_name=self.served_name,
            lora=self._lora,
            threads=self._threads,
            link_dir=self.home.link_dir,
            var_dir=self.home.directory,
            gateway_port=gateway_port,
            coordinator_port=coordinator,
            engine_ports=tuple(engine_ports),
            group_ports=(tuple(head_first),) if self._lora == "remote" else (),
            lora_shape=str(shape),
            engine_shards=self._engine_shards,
            admin_key=self.home.secrets().admin_key,
            shared={**shared, **self._extra_env},
        )

    async def _run(self, programs: list[Program]) -> None:
        """Start programs together and wait until each is ready. Raises what the first failure says."""
        children = [Child(p, self.home.new_log(p.name), self._on_event) for p in programs]
        for child in children:
            self._children[child.program.name] = child
            child.start()
        waiting = [self._ready(child) for child in children]
        try:
            async with asyncio.TaskGroup() as tasks:
                for one in waiting:
                    tasks.create_task(one)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _ready(self, child: Child) -> None:
        await child.until_ready()
        self._on_event(child.program.name, "ready")

    def _child(self, name: str) -> Child:
        if name not in self._children:
            raise InvalidRequest(f"no program {name!r} here; wanted one of {', '.join(self._children) or '(none)'}")
        return self._children[name]

    def _started(self) -> Plan:
        if self._plan is None:
            raise InvalidRequest("the system is not started")
        return self._plan


def check_layout(*, lora: str, lora_shape: str, engine_shards: str) -> tuple[Shape | None, str]:
    """The shape of the LoRA server (None: to be chosen), and how many shards an engine has. InvalidRequest for others.

    Needs no model: to be asked before one is prepared.
    """
    if lora not in ("remote", "local", "none"):
        raise InvalidRequest(f"lora is {lora!r}; wanted 'remote', 'local' or 'none'", param="lora")
    shape = None if lora_shape == AUTO else Shape.parse(lora_shape)
    if lora != "remote" and shape != ONE:
        raise InvalidRequest(f"lora is {lora!r}: there is no LoRA server of shape {lora_shape}", param="lora_shape")
    return shape, _num_shards(engine_shards)


def _num_shards(asked: str) -> str:
    """What an engine takes for a number of shards: a number of at least 1, or `auto`."""
    if asked != "auto" and not (asked.isascii() and asked.isdigit() and int(asked)):
        raise InvalidRequest(f"shards is {asked!r}; wanted a whole number of at least 1, or 'auto'", param="shards")
    return asked
