"""What the import contracts cannot say: names, the namespace, generated code, pure modules."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
ROOMS = ("libs", "kernels", "services", "tools")
SOURCES = sorted(p for room in ROOMS for p in (REPO / room).rglob("*.py"))

PURE = (
    "infinilora.protocol.adapter",
    "infinilora.protocol.control",
    "infinilora.protocol.errors",
    "infinilora.protocol.shards",
    "infinilora.pool.slots",
    "infinilora.pool.evict",
    "infinilora.engine.sched.scheduler",
    "infinilora.engine.sched.blocks",
    "infinilora.gateway.scores",
    "infinilora.coordinator.heat",
    "infinilora.coordinator.placement",
    "infinilora.coordinator.hints",
    "infinilora.coordinator.moves",
    "infinilora.coordinator.recovery",
    "infinilora.coordinator.provision.fleet",
    "infinilora.runtime.membership",
)


def test_the_namespace_has_no_init() -> None:
    assert not [p for room in ROOMS for p in (REPO / room).rglob("infinilora/__init__.py")]


def test_kernels_cannot_pass_for_another_package() -> None:
    assert not (REPO / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("name", ["utils", "helpers", "common", "misc"])
def test_no_file_is_named_for_nothing(name: str) -> None:
    assert name not in {p.stem for p in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(REPO)))
def test_every_file_says_why_it_exists(path: Path) -> None:
    if path.name.endswith("_pb2.py"):
        return
    assert path.read_text().lstrip().startswith(('"""', 'r"""')), f"{path} has no docstring"


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_loads_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_generated_messages_are_those_of_the_proto_files(tmp_path: Path) -> None:
    source = REPO / "libs" / "protocol"
    names = ["infinilora/protocol/generate.proto", "infinilora/protocol/lora.proto"]
    command = ["-m", "grpc_tools.protoc", "-I", str(source), f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([sys.executable, *command, *names], check=True, cwd=source)
    for made in tmp_path.rglob("*_pb2.py*"):
        assert made.read_text() == (source / made.relative_to(tmp_path)).read_text(), "run `make proto`"


def test_the_planner_imports_pure_modules_of_other_rooms_alone() -> None:
    """The list is the contract "Policy is pure": what the planner takes of services and pool is on it."""
    contracts = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    pure = next(c["source_modules"] for c in contracts if c["name"].startswith("Policy is pure"))
    for path in (REPO / "tools" / "planner").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith("infinilora.") and not name.startswith("infinilora.planner"):
                    assert any(name == p or name.startswith(p + ".") for p in pure), f"{path} imports {name}"
