"""The four services as programs of a local system: their arguments are settings in the environment.

What each setting means is said in the `settings.py` of its service.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from infinilora.cli.child import Probe, Program
from infinilora.cli.ports import HOST
from infinilora.cli.servers import answers
from infinilora.cli.settings import child_env

MODEL_READY_S = 300.0
"""A large model takes its time to be read from a disk, and the gateway is ready once an engine is."""
READY_S = 60.0
STOPPING = ("gateway", "lora-server", "engine", "coordinator")
"""The gateway first, so that streams may finish."""
OPERATOR = "local"
"""How the audit names whoever may read the directory of a local system."""


@dataclass(frozen=True)
class Plan:
    """What the services of one local system are told. `shared` holds addresses and secrets, for all of them."""

    model: Path
    served_name: str
    lora: str
    threads: int
    link_dir: Path
    var_dir: Path
    gateway_port: int
    coordinator_port: int
    engine_ports: tuple[int, ...]
    """One for each engine."""
    group_ports: tuple[tuple[int, ...], ...]
    """Of each group of LoRA servers: its shards' ports, the head's first. None without remote LoRA."""
    engine_shards: str = "1"
    lora_shape: str = "1x1"
    admin_key: str = field(default="", repr=False)
    """With which an operator shows himself to the coordinator."""
    shared: Mapping[str, str] = field(repr=False, kw_only=True)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.gateway_port}"

    @property
    def coordinator_url(self) -> str:
        return f"http://{HOST}:{self.coordinator_port}"


def services(plan: Plan) -> list[Program]:
    """The programs, in the order in which they start."""
    engines = [engine(plan, number) for number in range(len(plan.engine_ports))]
    groups = [
        lora_server(plan, shard, group) for group, ports in enumerate(plan.group_ports) for shard in range(len(ports))
    ]
    return [coordinator(plan), *engines, *groups, gateway(plan)]


def stopping(programs: Iterable[str]) -> list[list[str]]:
    """The names of these programs in the order in which they stop, whenever they started: a service's together."""
    names = list(programs)
    together = ([name for name in names if name.partition(".")[0] == service] for service in STOPPING)
    return [some for some in together if some]


def coordinator(plan: Plan) -> Program:
    settings = {
        "COORDINATOR_ID": "coordinator-0",
        "LISTEN": f"{HOST}:{plan.coordinator_port}",
        "ADMIN_KEYS": f"{plan.admin_key}:{OPERATOR}" if plan.admin_key else "",
    }
    return _program(plan, "coordinator", settings, answers(f"{plan.coordinator_url}/readyz"), READY_S)


def engine(plan: Plan, number: int = 0) -> Program:
    """One of the engines, which share the threads."""
    engine_id = f"engine-{number}"
    settings = {
        "ENGINE_ID": engine_id,
        "LISTEN": f"{HOST}:{plan.engine_ports[number]}",
        "MODEL": str(plan.model),
        "SERVED_NAME": plan.served_name,
        "LORA": plan.lora,
        "THREADS": str(max(1, plan.threads // len(plan.engine_ports))),
        "ENGINE_SHARDS": plan.engine_shards,
        "LINK_DIR": str(plan.link_dir),
    }
    probe = _member(plan, "engine", engine_id)
    return _program(plan, "engine", settings, probe, MODEL_READY_S, name=engine_name(number))


def engine_name(number: int) -> str:
    """Of its program."""
    return f"engine.{number}" if number else "engine"


def lora_server(plan: Plan, shard: int = 0, group: int = 0) -> Program:
    """A shard of a group; the head where that is all there is."""
    ports = plan.group_ports[group]
    head, num_shards = f"{HOST}:{ports[0]}", len(ports)
    settings = {
        "GROUP": f"lora-{group}",
        "LISTEN": f"{HOST}:{ports[shard]}",
        "BASE": plan.served_name,
        "THREADS": str(max(1, lora_threads(plan.threads) // num_shards)),
        "LINK_DIR": str(plan.link_dir),
    }
    if num_shards > 1:
        settings |= {"SHAPE": plan.lora_shape, "SHARD": str(shard), "HEAD": head if shard else ""}
    probe = _member(plan, "lora-server")
    return _program(plan, "lora-server", settings, probe, MODEL_READY_S, name=lora_server_name(shard, group))


def lora_server_name(shard: int, group: int) -> str:
    """Of its program."""
    first = f"lora-server.lora-{group}" if group else "lora-server"
    return f"{first}.{shard}" if shard else first


def lora_threads(engine_threads: int) -> int:
    """Threads of a LoRA server on the engine's own cores: half, at least one.

    A delta is about a sixth of the base product, and runs beside it. More threads only wake more often, each time
    in the way of one of the engine's (docs/log.md, 2026-11-30).
    """
    return max(1, engine_threads // 2)


def gateway(plan: Plan) -> Program:
    settings = {"GATEWAY_ID": "gateway-0", "LISTEN": f"{HOST}:{plan.gateway_port}"}
    return _program(plan, "gateway", settings, answers(f"{plan.url}/readyz"), MODEL_READY_S)


def _program(
    plan: Plan, service: str, settings: dict[str, str], probe: Probe, ready_within_s: float, *, name: str = ""
) -> Program:
    """`name`: of one process of a service that has several."""
    own = {f"INFINILORA_{key}": value for key, value in settings.items()}
    return Program(
        name=name or service,
        argv=(sys.executable, "-m", f"infinilora.{service.replace('-', '_')}"),
        env=child_env(**{"INFINILORA_VAR_DIR": str(plan.var_dir), **own, **plan.shared}),
        is_ready=probe,
        ready_within_s=ready_within_s,
    )


def _member(plan: Plan, kind: str, member_id: str = "") -> Probe:
    """A probe: does the coordinator know a ready process of this kind (and of this id, where one is given)?"""

    async def probe() -> bool:
        try:
            async with httpx.AsyncClient(timeout=2, trust_env=False) as http:
                answer = await http.get(f"{plan.coordinator_url}/v1/fleet")
                members = answer.json()["members"] if answer.is_success else []
                return any(_is_ready(m, kind) for m in members if member_id in ("", m["id"]))
        except (httpx.HTTPError, ValueError):
            return False

    return probe


def _is_ready(member: dict[str, Any], kind: str) -> bool:
    return (member["kind"], member["state"], member["health"]) == (kind, "ready", "alive")
