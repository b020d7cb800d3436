"""What the Helm chart tells its containers makes one working system: the real processes, with their rendered settings.

Of the cluster there is what a process sees of it: its environment, and an API that counts replicas. Ports become free
ones of this machine, and paths a directory of the test.
"""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infinilora.cli.child import Child, Program
from infinilora.cli.ports import free_ports
from infinilora.cli.servers import answers
from infinilora.cli.settings import child_env
from support.api import Api
from support.chart import NAMESPACE, POD_IP, Pod, Rendered, example, merged
from support.kube_api import NAMESPACE as API_NAMESPACE
from support.kube_api import TOKEN, KubeApi, a_kube_api
from support.oracle import ATTENTION, MLP, Oracle, write_adapter
from support.procs import NatsServer, ValkeyServer, WeedServer
from support.tiny_models import make_tiny_model
from support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROMPT = [5, 9, 2, 44, 17]
ADMIN = "admin-key"


async def always() -> bool:
    return True


class Cluster:
    """Pods of this machine. A pod's ports are its own, and whoever names one of them finds it."""

    def __init__(self, root: Path, secrets: dict[str, str]) -> None:
        self.root = root
        self.secrets = secrets
        self.children: list[Child] = []
        self._ports: dict[str, dict[int, int]] = {}

    def start(self, pod: Pod) -> Child:
        told = pod.environment(self.secrets)
        home = self.root / pod.name
        home.mkdir()
        env = {name: self._here(value, pod) for name, value in told.items()}
        env |= {"INFINILORA_VAR_DIR": str(home)}
        argv = (sys.executable, "-m", pod.module)
        door = self.port(pod, "http" if "http" in pod.ports else "grpc")
        is_ready = answers(f"http://{POD_IP}:{door}/readyz") if "http" in pod.ports else always
        child = Child(Program(pod.name, argv, child_env(**env), is_ready), home / "log", lambda *_: None)
        self.children.append(child)
        child.start()
        return child

    def port(self, pod: Pod, name: str) -> int:
        return self._of(pod.name, pod)[pod.ports[name]]

    def _of(self, name: str, pod: Pod) -> dict[int, int]:
        """A pod's ports and those that stand for them; `pod` may be any of the same workload."""
        if name not in self._ports:
            self._ports[name] = dict(zip(pod.ports.values(), free_ports(len(pod.ports)), strict=True))
        return self._ports[name]

    def _here(self, value: str, pod: Pod) -> str:
        """A setting as it must be on this machine: a head's address is of another pod, all else of its own."""
        host, colon, port = value.rpartition(":")
        if value == "0.0.0.0":
            return POD_IP
        if colon and host in ("0.0.0.0", POD_IP):
            return f"{POD_IP}:{self._of(pod.name, pod)[int(port)]}"
        if colon and host.endswith(f".{pod.workload['spec'].get('serviceName')}"):
            return f"{POD_IP}:{self._of(host.partition('.')[0], pod)[int(port)]}"
        if value.isdecimal() and int(value) in pod.ports.values():
            return str(self._of(pod.name, pod)[int(value)])
        return value.replace("/models", str(self.root / "models"), 1) if value.startswith("/models/") else value


@pytest.fixture
async def cluster(
    tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer, s3_server: WeedServer
) -> AsyncIterator[Cluster]:
    secrets = {
        "nats-url": nats_server.url,
        "redis-url": redis_server.url,
        "rpc-token": "an-rpc-token",
        "access-key": s3_server.access_key,
        "secret-key": s3_server.secret_key,
        "api-keys": "an-api-key:tenant",
        "admin-keys": f"{ADMIN}:operator",
    }
    made = Cluster(tmp_path, secrets)
    yield made
    for child in reversed(made.children):
        await child.stop()


def scaled(s3: WeedServer, api: KubeApi, token: Path) -> Rendered:
    """One base whose groups have two shards, with counts that the coordinator sets at the API."""
    told = {"KUBE_URL": api.url, "KUBE_TOKEN_FILE": str(token)}
    base = {"model": {"path": "tiny", "volume": {"emptyDir": {}}}, "loraServer": {"shape": "1x2", "threads": 1}}
    values = merged(example(), {"scaling": "kubernetes", "coordinator": {"settings": told}})
    values |= {"bases": {"tiny": base}, "store": {"url": s3.url("chart")}}
    values["gateway"] = {"settings": {"ADAPTER_ROOTS": str(token.parent)}}
    return Rendered(values)


async def test_the_charts_settings_make_one_system_and_its_coordinator_asks_for_the_shards_of_a_group(
    cluster: Cluster, tmp_path: Path, s3_server: WeedServer
) -> None:
    assert API_NAMESPACE == NAMESPACE
    checkpoint = make_tiny_model("llama", tmp_path / "models" / "tiny").directory
    adapter = write_adapter(tmp_path / "a", checkpoint, rank=4, targets=ATTENTION + MLP, seed=1, std=0.2)
    (tmp_path / "token").write_text(TOKEN)
    with a_kube_api(**{"r-tiny-engine": 1, "r-tiny-lora-server": 1}) as api:
        rendered = scaled(s3_server, api, tmp_path / "token")
        first = {pod.service: pod for pod in rendered.pods()}
        for pod in first.values():
            cluster.start(pod)
        await eventually(
            lambda: api.replicas == {"statefulsets/r-tiny-engine": 1, "statefulsets/r-tiny-lora-server": 2},
            "the second shard of the group",
            timeout_s=120,
        )
        cluster.start(Pod(first["lora-server"].workload, "r-tiny-lora-server-1"))
        gateway = Api(f"http://{POD_IP}:{cluster.port(first['gateway'], 'http')}")
        gateway.http.headers["authorization"] = "Bearer an-api-key"
        try:
            await gateway.wait("/readyz", lambda body: body["status"] == "ready", within_s=120)
            await gateway.register("mine", adapter, patience_s=60)
            served = await gateway.score("mine", PROMPT, max_tokens=8)
        finally:
            await gateway.http.aclose()
    oracle = Oracle(checkpoint)
    assert oracle.effect(PROMPT, adapter) > 0.1
    assert oracle.shortfall(PROMPT, served.token_ids, adapter) <= 2e-3
