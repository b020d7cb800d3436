from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.stacks import StackFactory


@pytest.fixture
async def stacks(tmp_path: Path) -> AsyncIterator[StackFactory]:
    factory = StackFactory(tmp_path)
    yield factory
    await factory.stop()
