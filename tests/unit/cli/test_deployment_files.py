"""What lies beside the code and names parts of it: compose, .env, dashboards, and the local system's environment."""

import json
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from infinilora.cli.services import Plan, services
from infinilora.coordinator.settings import Settings as CoordinatorSettings
from infinilora.engine.settings import Settings as EngineSettings
from infinilora.gateway.settings import Settings as GatewaySettings
from infinilora.lora_server.settings import Settings as LoraServerSettings
from infinilora.runtime import metrics
from infinilora.runtime.settings import Common

ROOT = Path(__file__).parents[3]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
SETTINGS: dict[str, type[Common]] = {
    "coordinator": CoordinatorSettings,
    "engine": EngineSettings,
    "gateway": GatewaySettings,
    "lora-server": LoraServerSettings,
}
OPEN_ON_PURPOSE = {"OTLP_ENDPOINT"}


def compose_services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE)["services"]
    return found


def example() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def fields_of(service: str) -> set[str]:
    return {f"INFINILORA_{name.upper()}" for name in SETTINGS[service].model_fields}


@pytest.mark.parametrize("service", SETTINGS)
def test_compose_names_settings_that_the_service_has(service: str) -> None:
    assert set(compose_services()[service]["environment"]) <= fields_of(service)


def test_links_of_composes_lora_server_are_reached_from_other_containers_where_memory_is_not_shared() -> None:
    told = compose_services()["lora-server"]["environment"]
    assert (told["INFINILORA_LINK_HOST"], told["INFINILORA_ADVERTISE"]) == ("0.0.0.0", "lora-server:7100")


@pytest.mark.parametrize("lora", ["remote", "local"])
def test_the_local_system_names_settings_that_the_service_has(lora: str, tmp_path: Path) -> None:
    shared = {
        "INFINILORA_NATS_URL": "nats://x",
        "INFINILORA_REDIS_URL": "redis://x",
        "INFINILORA_STORE_URL": "file:///x",
    }
    plan = Plan(
        model=tmp_path,
        served_name="tiny",
        lora=lora,
        threads=2,
        link_dir=tmp_path,
        var_dir=tmp_path,
        gateway_port=1,
        coordinator_port=2,
        engine_ports=(3,),
        group_ports=((4, 5),) if lora == "remote" else (),
        lora_shape="2x1",
        shared=shared,
    )
    programs = services(plan)
    shards = [p.name for p in programs if p.name.startswith("lora-server")]
    assert shards == (["lora-server", "lora-server.1"] if lora == "remote" else [])
    for program in programs:
        service = program.name.partition(".")[0]
        ours = {name for name in program.env if name.startswith("INFINILORA_")}
        required = {f"INFINILORA_{n.upper()}" for n, f in SETTINGS[service].model_fields.items() if f.is_required()}
        assert required <= ours <= fields_of(service)


def test_every_variable_of_compose_is_in_the_example_and_the_other_way_round() -> None:
    asked = set(re.findall(r"\$\{([A-Z0-9_]+)", COMPOSE))
    ports_with_defaults = {"JAEGER_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT"}
    assert asked - ports_with_defaults == set(example())


def test_the_example_holds_no_secret() -> None:
    secrets = {name for name in example() if name.endswith(("PASSWORD", "KEY", "TOKEN"))}
    assert len(secrets) == 7
    assert {example()[name] for name in secrets} == {""}


def test_every_published_port_is_bound_to_this_machine_alone() -> None:
    published = [port for service in compose_services().values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_every_long_lived_service_that_others_wait_for_says_when_it_is_healthy() -> None:
    found = compose_services()
    waited_for = {
        name
        for service in found.values()
        if isinstance(service.get("depends_on"), dict)
        for name, how in service["depends_on"].items()
        if how["condition"] == "service_healthy"
    }
    assert {"nats", "redis", "minio", "coordinator", "engine", "lora-server", "gateway"} == waited_for
    assert all("test" in found[name]["healthcheck"] for name in waited_for)


@pytest.mark.parametrize("service", ["engine", "gateway", "lora-server"])
def test_what_a_service_writes_is_on_a_volume_for_its_container_is_read_only(service: str) -> None:
    image = (ROOT / "Dockerfile").read_text()
    (var_dir,) = re.findall(r"INFINILORA_VAR_DIR=(\S+)", image)
    found = compose_services()[service]
    assert found["read_only"]
    assert "INFINILORA_VAR_DIR" not in found["environment"]
    assert var_dir in [volume.partition(":")[2] for volume in found["volumes"]]


def test_make_env_writes_a_private_file_with_fresh_secrets_and_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "make-env.sh", tmp_path / "deploy")
    shutil.copy(ROOT / ".env.example", tmp_path)
    for _ in range(2):
        subprocess.run(["sh", "deploy/make-env.sh"], cwd=tmp_path, check=True, capture_output=True)
    written = (tmp_path / ".env").read_text()
    made = dict(line.split("=", 1) for line in written.splitlines() if line and not line.startswith("#"))
    assert {name for name, value in made.items() if not value} == OPEN_ON_PURPOSE
    secrets = [made[name] for name, value in example().items() if not value and name not in OPEN_ON_PURPOSE]
    assert len(set(secrets)) == len(secrets) == 7
    assert all(re.fullmatch(r"[a-z][a-z0-9]{32}", secret) for secret in secrets)
    assert stat.S_IMODE((tmp_path / ".env").stat().st_mode) == 0o600


def make_shards(directory: Path, shape: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "deploy/make-shards.sh", shape]
    return subprocess.run(command, cwd=directory, check=False, capture_output=True, text=True)


@pytest.fixture
def deployment(tmp_path: Path) -> Path:
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "make-shards.sh", tmp_path / "deploy")
    return tmp_path


@pytest.mark.parametrize(("shape", "num_shards"), [("2x1", 2), ("1x2", 2), ("2x3", 6)])
def test_make_shards_writes_one_service_for_each_shard(deployment: Path, shape: str, num_shards: int) -> None:
    assert make_shards(deployment, shape).returncode == 0
    found = yaml.safe_load((deployment / "docker-compose.override.yml").read_text())["services"]
    assert list(found) == ["lora-server", *(f"lora-server-{shard}" for shard in range(1, num_shards))]
    whole = compose_services()["lora-server"]["environment"]
    hosts = set()
    for shard, (name, service) in enumerate(found.items()):
        if shard:
            assert service["extends"] == {"file": "docker-compose.yml", "service": "lora-server"}
        environment = whole | service["environment"]
        assert set(environment) <= fields_of("lora-server")
        read = {key.removeprefix("INFINILORA_").lower(): value for key, value in environment.items()}
        settings = LoraServerSettings(**read | {"base": "tiny", "threads": 1})
        assert (str(settings.shape), settings.shard) == (shape, shard)
        assert settings.head == (whole["INFINILORA_ADVERTISE"] if shard else "")
        assert settings.advertise.partition(":")[0] == name
        hosts.add(settings.advertise)
    assert len(hosts) == num_shards


@pytest.mark.parametrize("shape", ["", "2", "2x", "0x1", "2x2x2", "ax1", "65x1", "08x1", "2x1; touch x"])
def test_make_shards_refuses_what_is_no_shape(deployment: Path, shape: str) -> None:
    refused = make_shards(deployment, shape)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"found shape '{shape}'; wanted ExL")
    assert [path.name for path in deployment.iterdir()] == ["deploy"]


def test_make_shards_takes_its_own_file_away_and_leaves_others(deployment: Path) -> None:
    override = deployment / "docker-compose.override.yml"
    make_shards(deployment, "2x1")
    assert make_shards(deployment, "1x1").returncode == 0
    assert not override.exists()
    override.write_text("services: {}\n")
    assert make_shards(deployment, "2x1").returncode == 1
    assert override.read_text() == "services: {}\n"


def test_dashboards_show_metrics_that_exist() -> None:
    registry = metrics.new_registry()
    for group in (
        metrics.ProcessMetrics,
        metrics.ObjectStoreMetrics,
        metrics.GatewayMetrics,
        metrics.EngineMetrics,
        metrics.LoraServerMetrics,
        metrics.CoordinatorMetrics,
    ):
        group(registry)
    known = {suffixed for family in registry.collect() for suffixed in _sample_names(family.name, family.type)}
    for file in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"):
        panels = json.loads(file.read_text())["panels"]
        shown = {n for p in panels for t in p["targets"] for n in re.findall(r"(?:infinilora|gen_ai)_\w+", t["expr"])}
        assert shown
        assert shown <= known


def _sample_names(family: str, kind: str) -> set[str]:
    match kind:
        case "counter":
            return {f"{family}_total"}
        case "histogram":
            return {f"{family}_{part}" for part in ("bucket", "sum", "count")}
        case _:
            return {family}


def test_every_scraped_address_is_one_that_compose_opens() -> None:
    jobs = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in jobs for config in job["static_configs"] for target in config["targets"]}
    found = compose_services()
    for target in targets:
        service, port = target.split(":")
        environment = found[service]["environment"]
        opened = {environment.get("INFINILORA_LISTEN"), environment.get("INFINILORA_METRICS_LISTEN")}
        assert f"0.0.0.0:{port}" in opened
