from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SOURCES = sorted(p for room in ("libs", "kernels", "services", "tools") for p in (REPO / room).rglob("*.py"))


def test_the_namespace_has_no_init() -> None:
    assert not list(REPO.glob("**/infinilora/__init__.py"))


@pytest.mark.parametrize("name", ["utils.py", "helpers.py", "common.py", "misc.py"])
def test_no_file_is_named_for_nothing(name: str) -> None:
    assert name not in {p.name for p in SOURCES}
