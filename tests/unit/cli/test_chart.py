"""The Helm chart: manifests that Kubernetes takes, settings that the services have, names that scaling understands."""

import json
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from infinilora.coordinator.kubernetes import Cluster, KubernetesScaler, parse_targets
from infinilora.coordinator.settings import Settings as CoordinatorSettings
from infinilora.coordinator.victims import number_of
from infinilora.engine.settings import Settings as EngineSettings
from infinilora.gateway.settings import Settings as GatewaySettings
from infinilora.lora_server.settings import Settings as LoraServerSettings
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.protocol.scale import Desired
from infinilora.protocol.shards import Shape
from infinilora.runtime.settings import Common
from support.chart import CHART, HELM, NAMESPACE, PREFIX, ROOT, Manifest, Pod, Rendered, example, helm, merged
from support.kube_api import NAMESPACE as API_NAMESPACE
from support.kube_api import TOKEN, a_kube_api

KUBERNETES = "1.34"
SETTINGS: dict[str, type[Common]] = {
    "coordinator": CoordinatorSettings,
    "engine": EngineSettings,
    "gateway": GatewaySettings,
    "lora-server": LoraServerSettings,
}
SECRETS = {
    "nats-url": "nats://u:p@nats:4222",
    "redis-url": "redis://:p@redis:6379/0",
    "rpc-token": "token",
    "access-key": "access",
    "secret-key": "secret",
    "api-keys": "key:tenant",
    "admin-keys": "key:operator",
}
OTHER = {"path": "moe", "volume": {"hostPath": {"path": "/models"}}}
TWO = {"bases": {"moe-8x7b": {"servedName": "Org/Moe", "model": OTHER, "engine": {"replicas": 3}}}}
VARIANTS: dict[str, Manifest] = {
    "example": {},
    "two bases": TWO,
    "scaled": merged(TWO, {"scaling": "kubernetes", "coordinator": {"settings": {"MAX_ENGINES": "16"}}}),
    "external": {"scaling": "external"},
    "shards": {"bases": {"smollm2-135m": {"loraServer": {"shape": "2x3", "groups": 2}}}},
    "gpus": {"engine": {"gpus": 2, "nodeSelector": {"gpu": "h200"}}, "loraServer": {"gpus": 1}},
    "everything": {
        "image": {"tag": "2", "pullSecrets": ["registry"]},
        "store": {"credentials": "role", "secrets": {"engine": "engines-own"}},
        "otlpEndpoint": "http://otel:4317",
        "settings": {"BEAT_MS": "1000", "LOG_LEVEL": "debug"},
        "gateway": {
            "settings": {"MAX_RANK": "64"},
            "autoscaling": {"enabled": True},
            "ingress": {"enabled": True, "host": "lora.example", "className": "nginx", "tlsSecret": "tls"},
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "podAnnotations": {"a": "b"},
        },
        "coordinator": {"serviceAccountAnnotations": {"role": "arn"}},
        "loraServer": {"affinity": {"nodeAffinity": {}}, "settings": {"POOL_BYTES": "4294967296"}},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {"enabled": True, "operators": [{"namespaceSelector": {}}], "clients": [{"podSelector": {}}]},
    },
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@cache
def rendered(variant: str) -> Rendered:
    return Rendered(merged(example(), VARIANTS[variant]))


def settings_of(pod: Pod) -> Common:
    """The process's own settings, as they would be read from this pod's environment."""
    told = {name: value for name, value in pod.environment(SECRETS).items() if name.startswith(PREFIX)}
    read = {name.removeprefix(PREFIX).lower(): value for name, value in told.items()}
    return SETTINGS[pod.service].model_validate(read)


@every_variant
def test_kubernetes_takes_what_is_rendered(variant: str) -> None:
    for manifest in rendered(variant).manifests:
        if manifest["kind"] != "PodMonitor":  # of the Prometheus operator
            _validate(json.dumps(manifest))


@cache
def _validate(manifest: str) -> None:
    """Once each: most are the same in all variants."""
    kubernetes_validate.validate(json.loads(manifest), KUBERNETES, strict=True)


@every_variant
def test_every_variable_is_a_setting_that_the_service_reads_and_none_is_missing(variant: str) -> None:
    for pod in rendered(variant).pods():
        names = [variable["name"] for variable in pod.container["env"]]
        assert len(names) == len(set(names))
        fields = SETTINGS[pod.service].model_fields
        told = {name.removeprefix(PREFIX).lower() for name in pod.environment(SECRETS) if name.startswith(PREFIX)}
        assert {name for name, field in fields.items() if field.is_required()} <= told <= set(fields)
        assert settings_of(pod).nats_url == SECRETS["nats-url"]


@every_variant
def test_every_service_has_all_that_a_cluster_needs(variant: str) -> None:
    """An address by which others reach it, a name of its own, its port for probes, and time to drain."""
    found = rendered(variant)
    assert {pod.service for pod in found.pods()} == set(SETTINGS)
    for pod in found.pods():
        settings: Any = settings_of(pod)
        door = pod.ports.get("http", pod.ports.get("grpc"))
        assert (settings.listen, settings.advertise) == (f"0.0.0.0:{door}", f"127.0.0.1:{door}")
        grace_s = pod.spec["terminationGracePeriodSeconds"]
        stop_first = pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0])[-1]
        assert grace_s >= settings.drain_s + int(stop_first) + 10
        if "metrics" in pod.ports:
            assert settings.metrics_listen == f"0.0.0.0:{pod.ports['metrics']}"


@every_variant
def test_names_are_each_ones_own_and_end_in_the_pods_number_where_counts_are_scaled(variant: str) -> None:
    found = rendered(variant)
    engines = [pod.environment(SECRETS)["INFINILORA_ENGINE_ID"] for pod in found.pods("engine")]
    assert len(engines) == len(set(engines))
    for workload in found.of("StatefulSet"):
        ours = [pod for pod in found.pods() if pod.workload is workload]
        if ours[0].service == "engine":
            numbers = [number_of(pod.environment(SECRETS)["INFINILORA_ENGINE_ID"]) for pod in ours]
            assert numbers == list(range(len(ours)))


@every_variant
def test_groups_are_numbered_and_each_shard_finds_its_head(variant: str) -> None:
    found = rendered(variant)
    groups: dict[str, list[LoraServerSettings]] = {}
    for pod in found.pods("lora-server"):
        settings = settings_of(pod)
        assert isinstance(settings, LoraServerSettings)
        groups.setdefault(settings.group, []).append(settings)
        num_shards = Shape.parse(settings.shape).num_shards
        ordinal = number_of(pod.name)
        assert (number_of(settings.group), settings.shard) == divmod(ordinal, num_shards)
        service = pod.workload["spec"]["serviceName"]
        head = f"{service}-{ordinal - settings.shard}.{service}:{pod.ports['grpc']}"
        assert settings.head == ("" if settings.shard == 0 else head)
        assert (settings.link_host, settings.link_port) == ("0.0.0.0", pod.ports["link"])
        assert settings.link_backends == ("tcp",)
    for shards in groups.values():
        assert [one.shard for one in shards] == list(range(Shape.parse(shards[0].shape).num_shards))


@every_variant
def test_services_and_budgets_select_the_pods_of_one_workload(variant: str) -> None:
    found = rendered(variant)
    labels = {each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"] for each in found.workloads}
    for workload in found.workloads:
        assert workload["spec"]["selector"]["matchLabels"] == labels[workload["metadata"]["name"]]
    selectors = [each["spec"]["selector"] for each in found.of("Service")]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in found.of("PodDisruptionBudget")]
    assert len(selectors) == 2 * len(found.workloads)
    for selector in selectors:
        assert sum(selector.items() <= own.items() for own in labels.values()) == 1
    headless = {each["metadata"]["name"]: each["spec"] for each in found.of("Service") if "clusterIP" in each["spec"]}
    assert {each["spec"]["serviceName"] for each in found.of("StatefulSet")} == set(headless)
    assert all(spec["publishNotReadyAddresses"] for spec in headless.values())


@every_variant
def test_nothing_runs_as_root_or_writes_beside_its_volumes_or_takes_services_for_settings(variant: str) -> None:
    for pod in rendered(variant).pods():
        assert pod.spec["securityContext"]["runAsNonRoot"]
        assert f"--uid {pod.spec['securityContext']['runAsUser']} " in (ROOT / "Dockerfile").read_text()
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["enableServiceLinks"] is False
        assert pod.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        kinds = {kind for volume in pod.spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"emptyDir", "persistentVolumeClaim"} | (
            {"hostPath"} if variant in ("two bases", "scaled") else set()
        )
        mounted = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"]}
        assert set(mounted.values()) == {volume["name"] for volume in pod.spec["volumes"]}
        assert str(settings_of(pod).var_dir) in mounted
        assert "/tmp" in mounted
        assert pod.container["resources"]["limits"]["memory"]


@every_variant
def test_no_secret_is_rendered_and_those_that_are_asked_for_are_in_the_docs(variant: str) -> None:
    found = rendered(variant)
    assert not found.of("Secret")
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    for pod in found.pods():
        for variable in pod.container["env"]:
            if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                (command,) = re.findall(rf"create secret generic {reference['name']} (?:\\\n|.)*", page)
                assert f"--from-literal={reference['key']}=" in command


def test_each_service_has_the_keys_of_the_object_store_that_are_its_own() -> None:
    values = {"store": {"secrets": {name: name.lower() for name in ("coordinator", "gateway", "engine", "loraServer")}}}
    for pod in Rendered(merged(example(), values)).pods():
        names = {
            variable["valueFrom"]["secretKeyRef"]["name"]
            for variable in pod.container["env"]
            if variable["name"] in ("INFINILORA_S3_ACCESS_KEY", "INFINILORA_S3_SECRET_KEY")
        }
        assert names == {pod.service.replace("-", "")}


@every_variant
def test_accounts_exist_and_have_a_token_only_where_the_api_is_asked(variant: str) -> None:
    found = rendered(variant)
    tokens = {each["metadata"]["name"]: each["automountServiceAccountToken"] for each in found.of("ServiceAccount")}
    assert {pod.spec["serviceAccountName"] for pod in found.pods()} == set(tokens)
    scales = {settings_of(pod).scaler for pod in found.pods("coordinator")} == {"kubernetes"}  # type: ignore[attr-defined]
    assert {name for name, has in tokens.items() if has} == ({"r-coordinator"} if scales else set())
    assert bool(found.of("Role")) == bool(found.of("RoleBinding")) == scales


async def test_a_coordinator_may_do_exactly_what_it_does(tmp_path: Path) -> None:
    """The real scaler against an API that writes down what it is asked for: neither less is allowed, nor more."""
    found = rendered("scaled")
    (coordinator,) = found.pods("coordinator")
    settings = settings_of(coordinator)
    assert isinstance(settings, CoordinatorSettings)
    assert (settings.kube_namespace, settings.max_engines) == (NAMESPACE, 16)
    targets = parse_targets(settings.kube_targets)
    names = {f"statefulsets/{each['metadata']['name']}" for each in found.of("StatefulSet")}
    assert {target for tiers in targets.values() for target in tiers.values()} == names
    assert set(targets) == {settings_of(pod).served_name for pod in found.pods("engine")}  # type: ignore[attr-defined]

    (tmp_path / "token").write_text(TOKEN)
    with a_kube_api(**{name.partition("/")[2]: 1 for name in names}) as api:
        scaler = KubernetesScaler(Cluster(api.url, API_NAMESPACE, tmp_path / "token", None), targets)
        for model in targets:
            base = Fingerprint(digest_of(model.encode()))
            await scaler.apply(Desired(base=base, model=model, epoch=1, engines=3, groups=2), lambda: True)
    asked = {(method.lower(), *path.split("/")[-3:]) for method, path in api.asked}
    (role,), (binding,) = found.of("Role"), found.of("RoleBinding")
    (rule,) = role["rules"]
    allowed = {
        (verb, resource.partition("/")[0], name, resource.partition("/")[2])
        for verb in rule["verbs"]
        for resource in rule["resources"]
        for name in rule["resourceNames"]
    }
    assert rule["apiGroups"] == ["apps"]
    assert allowed == asked
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "r-coordinator", "namespace": NAMESPACE}]


@every_variant
def test_counts_are_named_only_where_nobody_else_sets_them(variant: str) -> None:
    found = rendered(variant)
    is_fixed = VARIANTS[variant].get("scaling", "fixed") == "fixed"
    assert all(("replicas" in each["spec"]) == is_fixed for each in found.of("StatefulSet"))
    counts = {each["metadata"]["name"]: "replicas" in each["spec"] for each in found.of("Deployment")}
    assert counts == {"r-coordinator": True, "r-gateway": not found.of("HorizontalPodAutoscaler")}


def test_groups_of_several_shards_are_so_many_pods_and_are_never_ended_one_by_one() -> None:
    by_name = {each["metadata"]["name"]: each["spec"] for each in rendered("shards").of("StatefulSet")}
    sharded = by_name["r-smollm2-135m-lora-server"]
    assert (sharded["replicas"], sharded["updateStrategy"]) == (12, {"type": "OnDelete"})
    assert "updateStrategy" not in by_name["r-smollm2-135m-engine"]
    assert {each["podManagementPolicy"] for each in by_name.values()} == {"Parallel"}


def test_devices_are_asked_for_and_used() -> None:
    engine, lora = next(rendered("gpus").pods("engine")), next(rendered("gpus").pods("lora-server"))
    told: Any = settings_of(engine)
    assert (told.device, told.engine_shards) == ("cuda", 2)
    assert engine.container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert engine.spec["nodeSelector"] == {"gpu": "h200"}
    told = settings_of(lora)
    assert told.device == "cuda"
    assert lora.container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in str(rendered("example").manifests)


def test_a_base_has_what_it_says_and_else_what_all_have() -> None:
    values = merged(TWO, {"engine": {"threads": 4, "settings": {"MAX_RUNNING": "8"}}})
    values = merged(values, {"bases": {"moe-8x7b": {"engine": {"threads": 6, "settings": {"KV_BLOCK": "32"}}}}})
    found: dict[str, Any] = {}
    for pod in Rendered(merged(example(), values)).pods("engine"):
        told: Any = settings_of(pod)
        found[told.served_name] = told.threads, told.max_running, told.kv_block, told.model
    assert found == {
        "smollm2-135m": (4, 8, 16, Path("/models/smollm2-135m")),
        "Org/Moe": (6, 8, 32, Path("/models/moe")),
    }


def test_what_a_process_may_write_fits_its_volume_and_its_memory() -> None:
    """A container that goes past either is ended by the cluster."""
    gib = 1 << 30
    sizes = {"Mi": 1 << 20, "Gi": gib}

    def num_bytes(text: str) -> int:
        return int(text[:-2]) * sizes[text[-2:]]

    for pod in rendered("example").pods():
        told: Any = settings_of(pod)
        memory = num_bytes(pod.container["resources"]["limits"]["memory"])
        (var,) = [volume["emptyDir"] for volume in pod.spec["volumes"] if volume["name"] == "var"]
        match pod.service:
            case "lora-server":
                assert told.cache_bytes < num_bytes(var["sizeLimit"])
                assert told.pool_bytes < memory
            case "engine":
                assert told.facts_mb << 20 < num_bytes(var["sizeLimit"])
            case "gateway":
                assert told.max_ingests * told.ingest_memory_mb << 20 < memory
                assert 2 * told.max_ingests * told.max_upload_mb << 20 <= num_bytes(var["sizeLimit"])


def test_metrics_are_scraped_where_they_are_and_policies_open_ports_that_are_there() -> None:
    found = rendered("everything")
    (monitor,) = found.of("PodMonitor")
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    assert all(len(scraped & set(pod.ports)) == 1 for pod in found.pods())
    opened: dict[str, set[str]] = {}
    for policy in found.of("NetworkPolicy"):
        wanted = policy["spec"]["podSelector"]["matchLabels"]
        (workload,) = [
            each for each in found.workloads if wanted.items() <= each["spec"]["template"]["metadata"]["labels"].items()
        ]
        ports = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        opened[workload["metadata"]["name"]] = ports
    assert opened == {pod.workload["metadata"]["name"]: set(pod.ports) for pod in found.pods()}


@pytest.mark.parametrize(
    ("more", "field", "words"),
    [
        ({"image": {"repository": ""}}, "/image/repository", "minLength"),
        ({"store": {"url": "file:///store"}}, "/store/url", "does not match pattern"),
        ({"bases": {"smollm2-135m": None}}, "/bases/smollm2-135m", "got null, want object"),
        ({"bases": {"Large_1": {"model": OTHER}}}, "/bases", "'Large_1' not allowed"),
        ({"bases": {"b": {"model": {"path": "b"}}}}, "/bases/b/model", "missing property 'volume'"),
        ({"bases": {"b": {"model": OTHER, "engine": {"gpus": -1}}}}, "/bases/b/engine/gpus", "got -1, want 0"),
        ({"loraServer": {"shape": "2by2"}}, "/loraServer/shape", "'2by2' does not match"),
        ({"loraServer": {"gpus": 2}}, "/loraServer/gpus", "got 2, want 1"),
        ({"scaling": "keda"}, "/scaling", "'fixed', 'kubernetes', 'external'"),
        ({"gateway": {"replica": 2}}, "/gateway", "'replica' not allowed"),
        ({"gateway": {"settings": {"MAX_RANK": 64}}}, "/gateway/settings/MAX_RANK", "got number, want string"),
        ({"gateway": {"settings": {"max_rank": "64"}}}, "/gateway/settings", "'max_rank' not allowed"),
        ({"settings": {"NATS_URL": "nats://x"}}, "/settings/NATS_URL", "false schema"),
        ({"gateway": {"ingress": {"enabled": True}}}, "/gateway/ingress/host", "minLength"),
        ({"engine": {"settings": None}}, "/engine", "missing property 'settings'"),
        ({"engine": {"scratch": "lots"}}, "/engine/scratch", "'lots' does not match"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(more: Manifest, field: str, words: str) -> None:
    done = helm(merged(example(), more))
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if f"at '{field}':" in line]
    assert words in line


def test_without_any_values_all_that_must_be_given_is_named() -> None:
    refused = helm({}).stderr
    assert set(re.findall(r"at '(.*?)'", refused)) == {"/image/repository", "/store/url", "/bases"}


def test_names_that_kubernetes_would_cut_are_refused() -> None:
    done = helm(merged(example(), {"bases": {"b" * 40: {"model": OTHER}}}))
    assert "has 54 letters; a StatefulSet may have 52" in done.stderr


def test_every_variable_that_the_chart_sets_is_refused_among_settings() -> None:
    """Else it would be there twice, and which of both holds is for nobody to guess."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    refused = {name for name, kind in schema["$defs"]["settings"]["properties"].items() if kind is False}
    given: set[str] = set()
    for variant, more in VARIANTS.items():
        given |= _settings_in(more)
        for pod in rendered(variant).pods():
            told = {name.removeprefix(PREFIX) for name in pod.environment(SECRETS) if name.startswith(PREFIX)}
            assert told - _settings_in(more) - {"INGEST_MEMORY_MB"} <= refused
    assert not given & refused
    everything = {name.upper() for settings in SETTINGS.values() for name in settings.model_fields}
    assert refused <= everything


def _settings_in(values: Mapping[str, Any]) -> set[str]:
    """The names under every `settings`, wherever it is."""
    found = set(values.get("settings", ()))
    for key, value in values.items():
        if isinstance(value, dict) and key != "settings":
            found |= _settings_in(value)
    return found


def test_settings_that_values_and_page_speak_of_are_there() -> None:
    words = (CHART / "values.yaml").read_text() + (ROOT / "docs" / "kubernetes.md").read_text()
    named = set(re.findall(r"(?<![A-Z_])[A-Z0-9]+(?:_[A-Z0-9]+)+(?![A-Z_])", words.replace(PREFIX, "")))
    everything = {name.upper() for settings in SETTINGS.values() for name in settings.model_fields}
    assert named - everything == {"TORCH_INDEX"}


def test_helm_finds_nothing_to_say_of_the_chart(tmp_path: Path) -> None:
    (tmp_path / "values.json").write_text(json.dumps(example()))
    command = [str(HELM), "lint", "--strict", str(CHART), "--values", str(tmp_path / "values.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout


def test_the_chart_is_of_this_version() -> None:
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f'appVersion: "{version}"' in (CHART / "Chart.yaml").read_text()
