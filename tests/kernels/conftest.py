"""Triton runs in its interpreter where there is no GPU. It reads the switch when it is imported, so it is set here.

A test marked `interp` needs the interpreter and one marked `gpu` a device; one whose parameter is an instruction set
needs a processor that has it. Those that this machine cannot run are deselected, and counted as such.
"""

import os
import sys
from pathlib import Path

import pytest

HAS_GPU = Path("/dev/nvidia0").exists()

if not HAS_GPU and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from infinilora.kernels.settings import LEVELS  # nothing of ours is imported before the switch is set
    from support.instruction_sets import levels_here

    needless = "interp" if HAS_GPU else "gpu"
    here = Path(__file__).parent
    missing = set(LEVELS) - set(levels_here())
    ours = (item for item in items if here in item.path.parents)
    dropped = [item for item in ours if item.get_closest_marker(needless) or missing & _parameters(item)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def _parameters(item: pytest.Item) -> set[object]:
    """Those that are words."""
    values = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    return {value for value in values if isinstance(value, str)}


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a Triton test runs: interpreted on the CPU, or compiled on a GPU."""
    import triton

    if request.param == "cpu":
        assert triton.knobs.runtime.interpret, (
            "triton was imported before tests/kernels/conftest.py: run tests/kernels alone"
        )
    return str(request.param)


@pytest.fixture(params=["grouped", "indexed"])
def path(request: pytest.FixtureRequest) -> str:
    """How the rows of a Triton launch find their weights."""
    return str(request.param)
