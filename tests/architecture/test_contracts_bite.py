"""Each import contract fails when it is broken: a forbidden import is planted in a copy of the tree."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
ROOMS = ("libs", "kernels", "services", "tools")
PLANTS = {
    "a service imports another": ("services/gateway/infinilora/gateway/planted.py", "import infinilora.engine"),
    "the gateway reaches torch": ("services/gateway/infinilora/gateway/planted.py", "import torch"),
    "a service speaks to the broker itself": ("services/gateway/infinilora/gateway/planted.py", "import nats"),
    "policy reads a clock": ("services/gateway/infinilora/gateway/scores.py", "import time"),
    "the planner runs a service": ("tools/planner/infinilora/planner/planted.py", "import infinilora.coordinator.app"),
    "a room nobody declared": ("libs/protocol/infinilora/attic/__init__.py", "import json"),
    "a floor imports upwards": ("libs/runtime/infinilora/runtime/planted.py", "import infinilora.pool"),
}


def rooms(root: Path) -> list[str]:
    return sorted(str(p.parent) for room in ROOMS for p in (root / room).glob("**/infinilora") if p.is_dir())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for room in ROOMS:
        shutil.copytree(REPO / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", PLANTS)
def test_a_planted_import_is_named(what: str, copy: Path) -> None:
    file, line = PLANTS[what]
    target = copy / file
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text((target.read_text() if target.exists() else '"""Planted."""\n') + f"\n{line}\n")
    # The checkout's own rooms leave the path: with two copies of a module in sight, either may be the one that is read.
    code = (
        f"import sys; sys.path[:] = {rooms(copy)!r} + [p for p in sys.path if p not in {rooms(REPO)!r}]\n"
        "from importlinter.cli import lint_imports_command\n"
        "lint_imports_command(['--no-cache'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "broken" in done.stdout
