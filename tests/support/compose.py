"""Runs the repository's docker-compose.yml, unmodified, as a project of its own on free ports.

A machine whose containers need something else to be built (another network, another package index) says so in
the standard way, by `COMPOSE_FILE=docker-compose.yml:/path/of/override.yml` in the environment.
"""

import json
import os
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

from infinilora.cli.ports import free_ports

ROOT = Path(__file__).parents[2]


def engine_answers() -> bool:
    """Whether there is a Docker engine with compose here."""
    if not shutil.which("docker"):
        return False
    asked = [["docker", "info"], ["docker", "compose", "version"]]
    return all(subprocess.run(a, capture_output=True, check=False, timeout=60).returncode == 0 for a in asked)


class Compose:
    """One project: up, looked at, hurt, down."""

    def __init__(self, directory: Path) -> None:
        self.port, coordinator_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self._env_file = directory / "env"
        self._env_file.write_text(self._settings({"PORT": str(self.port), "COORDINATOR_PORT": str(coordinator_port)}))
        # What .env says; a variable of the caller's shell would win over it.
        names = {line.partition("=")[0] for line in self._env_file.read_text().splitlines()} - {"TORCH_INDEX"}
        self._environment = {name: value for name, value in os.environ.items() if name not in names}
        self._project = f"infinilora-test-{secrets.token_hex(3)}"

    def run(self, *arguments: str, timeout_s: float = 120) -> str:
        command = ["docker", "compose", "-p", self._project, "--env-file", str(self._env_file), *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(arguments)}: status {done.returncode}\n{done.stderr[-3000:]}"
        return done.stdout

    def up(self) -> None:
        """Build and start; returns once the gateway is healthy, because the seed job waits for that."""
        self.run("up", "--detach", "--build", timeout_s=1500)

    def down(self) -> None:
        self.run("down", "--volumes", "--timeout", "20", timeout_s=180)

    def services(self) -> dict[str, dict[str, Any]]:
        """Each service's container as `docker compose ps` tells it."""
        lines = self.run("ps", "--all", "--format", "json").splitlines()
        rows = [row for line in lines for row in _rows(json.loads(line))]
        return {row["Service"]: row for row in rows}

    def logs(self, service: str) -> str:
        return self.run("logs", "--no-log-prefix", "--no-color", service)

    def wait_for(self, service: str) -> int:
        """The exit status of a one-shot service, when it has ended."""
        return int(self._docker("wait", self.services()[service]["Name"], timeout_s=600))

    def inside(self, service: str, shell: str) -> str:
        """What a shell command says inside the container."""
        return self.run("exec", "-T", service, "sh", "-c", shell)

    def crash(self, service: str) -> None:
        """Kill -9 whatever runs in the container, from inside: a `docker kill` would count as a wish to stop it."""
        code = "import os, signal; os.kill(-1, signal.SIGKILL)"
        self._docker("exec", self.services()[service]["Name"], "python", "-c", code)

    def _docker(self, *arguments: str, timeout_s: float = 60) -> str:
        done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, timeout=timeout_s)
        return done.stdout

    def _settings(self, own: dict[str, str]) -> str:
        lines = []
        for line in (ROOT / ".env.example").read_text().splitlines():
            name, is_setting, value = line.partition("=")
            if not is_setting or line.startswith("#"):
                continue
            if name == "TORCH_INDEX":
                value = os.environ.get("TORCH_INDEX", value)
            if not value and name != "OTLP_ENDPOINT" and name != "TORCH_INDEX":
                value = f"s{secrets.token_hex(12)}"
            lines.append(f"{name}={own.get(name, value)}")
        return "\n".join(lines) + "\n"


def _rows(found: Any) -> list[dict[str, Any]]:
    """One object a line, or (older releases) one list."""
    return found if isinstance(found, list) else [found]
