"""Whether a store answers is what the latest call found, and is found out again while nobody calls."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from typing_extensions import override

from infinilora.protocol.errors import StoreFull, StoreRefused, Unavailable
from infinilora.runtime.blob_store import Changed
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.runtime.watched_blobs import WatchedBlobs
from support.waiting import eventually


class Failing(DirectoryBlobs):
    """Raises `error` from every read while there is one."""

    error: Exception | None = None
    asked = 0

    @override
    def get_range(self, name: str, offset: int, num_bytes: int, *, etag: str | None = None) -> bytes:
        self.asked += 1
        if self.error:
            raise self.error
        return super().get_range(name, offset, num_bytes, etag=etag)


@pytest.fixture
def failing(tmp_path: Path) -> Failing:
    failing = Failing(tmp_path / "store")
    failing.put("x", b"data")
    return failing


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (Unavailable("away"), ("store",)),
        (StoreRefused("keys"), ("store",)),
        (StoreFull("no room"), ()),
        (Changed("replaced"), ()),
        (FileNotFoundError("no such object"), ()),
    ],
)
def test_a_store_is_away_when_a_call_finds_it_so(failing: Failing, error: Exception, away: tuple[str, ...]) -> None:
    watched = WatchedBlobs(failing)
    failing.error = error
    with pytest.raises(type(error)):
        watched.get_range("x", 0, 4)
    assert (watched.away, watched.answers) == (away, not away)
    failing.error = None
    assert watched.get_range("x", 0, 4) == b"data"
    assert (watched.away, watched.answers) == ((), True)


async def test_while_it_is_away_it_is_asked_and_not_before(failing: Failing) -> None:
    watched = WatchedBlobs(failing)
    asking = asyncio.create_task(watched.ask_while_away("nothing of this name", every_s=0.0))
    for _ in range(20):
        await asyncio.sleep(0.0)
    assert failing.asked == 0
    failing.error = Unavailable("away")
    with suppress(Unavailable):
        watched.get_range("x", 0, 4)
    await eventually(lambda: failing.asked > 2, "it is asked again")
    assert not watched.answers
    failing.error = None
    await eventually(lambda: watched.answers, "it answers again: it has nothing of this name")
    asking.cancel()
