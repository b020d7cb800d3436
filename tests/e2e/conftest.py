from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.compose import engine_answers
from support.stacks import StackFactory


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `compose` want a Docker engine; where none answers they are deselected, and counted as such."""
    wanting = [item for item in items if item.get_closest_marker("compose")]
    if wanting and not engine_answers():
        items[:] = [item for item in items if item not in wanting]
        config.hook.pytest_deselected(items=wanting)


@pytest.fixture
async def stacks(tmp_path: Path) -> AsyncIterator[StackFactory]:
    factory = StackFactory(tmp_path)
    yield factory
    await factory.stop()
