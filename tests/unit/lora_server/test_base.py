import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from infinilora.lora_server.base import find_card, pause_s, watch_base
from infinilora.protocol import keys, subjects
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.control import Beat
from infinilora.protocol.errors import Conflict
from infinilora.protocol.ids import Fingerprint
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.runtime.members import Members
from infinilora.runtime.memory import MemoryBus
from support.cards import make_card

CARD = make_card("llama")
OTHER = msgspec.structs.replace(CARD, fingerprint=Fingerprint("sha256:" + "2" * 64))
"""Another model under the same name."""


@asynccontextmanager
async def neighbours() -> AsyncIterator[tuple[MemoryBus, Members]]:
    async with MemoryBus() as bus, Members(bus, kinds=("engine",), interval_s=0.1) as members:
        yield bus, members


async def beat(bus: MemoryBus, card: BaseCard, *, seq: int = 1) -> None:
    engine = Beat(
        kind="engine", id="e", incarnation="1", seq=seq, state="ready", base=card.fingerprint, model=card.name
    )
    await bus.publish(subjects.heartbeat("engine", "e"), engine)


def publish(blobs: DirectoryBlobs, *cards: BaseCard) -> DirectoryBlobs:
    for card in cards:
        blobs.put(keys.base_card(card.fingerprint), msgspec.json.encode(card))
    return blobs


async def test_a_fingerprint_is_the_card_under_it(tmp_path: Path) -> None:
    blobs = publish(DirectoryBlobs(tmp_path), CARD, OTHER)
    async with neighbours() as (_, members), asyncio.timeout(5):
        assert await find_card(OTHER.fingerprint, blobs, members) == OTHER


async def test_a_name_is_what_a_living_engine_says_it_is(tmp_path: Path) -> None:
    blobs = publish(DirectoryBlobs(tmp_path), CARD, OTHER)
    async with neighbours() as (bus, members), asyncio.timeout(5):
        await beat(bus, OTHER)
        assert await find_card(CARD.name, blobs, members) == OTHER


async def test_without_an_engine_the_only_card_of_the_name_is_taken(tmp_path: Path) -> None:
    blobs = publish(DirectoryBlobs(tmp_path), CARD, make_card("mixtral", num_experts=4))
    blobs.put(keys.base_card(OTHER.fingerprint), b"{")  # another's card that nobody can read is in nobody's way
    async with neighbours() as (_, members), asyncio.timeout(5):
        assert await find_card(CARD.name, blobs, members) == CARD


async def test_two_cards_of_one_name_are_not_guessed_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinilora.lora_server.base.HEAR_ENGINES_S", 0.0)
    blobs = publish(DirectoryBlobs(tmp_path), CARD, OTHER)
    async with neighbours() as (bus, members):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.4):
                await find_card(CARD.name, blobs, members)
        await beat(bus, CARD)
        async with asyncio.timeout(5):
            assert await find_card(CARD.name, blobs, members) == CARD


async def test_a_card_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path)
    async with neighbours() as (_, members), asyncio.timeout(5), asyncio.TaskGroup() as group:
        finding = group.create_task(find_card(CARD.fingerprint, blobs, members))
        await asyncio.sleep(0)
        publish(blobs, CARD)
        assert await finding == CARD


@pytest.mark.parametrize(("waited_s", "wanted_s"), [(0, 0.1), (1, 0.1), (5, 0.5), (20, 2), (3600, 2)])
def test_who_has_waited_long_looks_less_often(waited_s: float, wanted_s: float) -> None:
    assert pause_s(waited_s) == pytest.approx(wanted_s)


async def test_a_group_whose_engines_moved_to_another_base_ends() -> None:
    conflict: Conflict | None = None
    async with neighbours() as (bus, members), asyncio.timeout(5):
        await beat(bus, OTHER)
        try:
            await watch_base(CARD.name, CARD, members)
        except Conflict as error:
            conflict = error
    assert conflict is not None
    assert OTHER.fingerprint in conflict.message


async def test_a_group_told_a_fingerprint_does_not_watch_names() -> None:
    async with neighbours() as (bus, members), asyncio.timeout(5):
        await beat(bus, OTHER)
        await watch_base(CARD.fingerprint, CARD, members)
