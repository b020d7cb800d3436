"""The Helm chart as a cluster would see it: rendered manifests, their pods, and what a container's process is told."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "infinilora"
HELM = Path(sys.prefix) / "bin" / "helm"
RELEASE, NAMESPACE = "r", "serving"
POD_IP = "127.0.0.1"
PREFIX = "INFINILORA_"
Manifest = dict[str, Any]


def example() -> Manifest:
    """The values that docs/kubernetes.md shows."""
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    values: Manifest = yaml.safe_load(block)
    return values


def helm(values: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    """`helm template` with these values, which come by standard input."""
    command = [str(HELM), "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Pod:
    """One pod of a workload, and its single container. `ordinal`: of a StatefulSet's."""

    workload: Manifest
    name: str

    @property
    def spec(self) -> Manifest:
        spec: Manifest = self.workload["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> Manifest:
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def service(self) -> str:
        """`engine`, `lora-server`, ..."""
        return str(self.container["name"])

    @property
    def module(self) -> str:
        """What the container runs in the end: `python -m` this."""
        told = self.container.get("args", [" ".join(self.container["command"])])[-1]
        *_, module = told.strip().splitlines()[-1].removeprefix("exec ").partition("python -m ")
        return str(module)

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    def environment(self, secrets: Mapping[str, str]) -> dict[str, str]:
        """What the process is told in the end: references followed, and the container's shell run.

        `secrets`: values by key; the Secrets' names do not matter.
        """
        found: dict[str, str] = {}
        for variable in self.container["env"]:
            found[variable["name"]] = self._value(variable, found, secrets)
        if self.container["command"][0] == "sh":
            found |= self._after_shell(found)
        return found

    def _value(self, variable: Manifest, before: Mapping[str, str], secrets: Mapping[str, str]) -> str:
        if "value" in variable:
            return expand(str(variable["value"]), before)
        source = variable["valueFrom"]
        if "secretKeyRef" in source:
            return secrets[source["secretKeyRef"]["key"]]
        return {"metadata.name": self.name, "status.podIP": POD_IP}[source["fieldRef"]["fieldPath"]]

    def _after_shell(self, before: Mapping[str, str]) -> dict[str, str]:
        """Runs the container's script to where it would become the process, which shows its environment instead."""
        (script,) = self.container["args"]
        *lines, last = script.strip().splitlines()
        assert last == f"exec python -m {self.module}"
        shown = "\n".join([*lines, "exec env -0"])
        command = [*self.container["command"], expand(shown, before)]
        done = subprocess.run(command, env={"PATH": os.defpath, **before}, capture_output=True, text=True, check=True)
        pairs = (pair.partition("=") for pair in done.stdout.split("\0") if pair)
        return {name: value for name, _, value in pairs if name.startswith(PREFIX)}


class Rendered:
    """All that one set of values makes. Raises where Helm refuses them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        done = helm(values)
        if done.returncode:
            raise ValueError(done.stderr)
        self.text = done.stdout
        self.manifests: list[Manifest] = [each for each in yaml.safe_load_all(done.stdout) if each]

    def of(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    @property
    def workloads(self) -> list[Manifest]:
        return [*self.of("Deployment"), *self.of("StatefulSet")]

    def pods(self, service: str = "") -> Iterator[Pod]:
        """Every pod of a StatefulSet, in order, and one of each Deployment."""
        for workload in self.workloads:
            name, is_numbered = workload["metadata"]["name"], workload["kind"] == "StatefulSet"
            numbers = range(workload["spec"].get("replicas", 1)) if is_numbered else ("7d4-x",)
            pods = (Pod(workload, f"{name}-{number}") for number in numbers)
            yield from (pod for pod in pods if service in ("", pod.service))


def expand(text: str, environment: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes has it: what is not known stays as it is."""
    return re.sub(r"\$\(([^)]*)\)", lambda found: environment.get(found[1], found[0]), text)


def merged(values: Manifest, more: Mapping[str, Any]) -> Manifest:
    """As Helm merges a second file over the first."""
    found = dict(values)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if both else value
    return found
