"""The road of facts: from a gateway over gRPC to an engine's desk, with a real model behind it, and back."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typing_extensions import override

from infinilora.engine import factsdesk
from infinilora.engine.facts import Facts
from infinilora.engine.factsdesk import FactsDesk
from infinilora.engine.model.checkpoint import Checkpoint
from infinilora.engine.model.spec import read_spec
from infinilora.engine.prepare import base_card
from infinilora.gateway.facts import FactsRoad
from infinilora.gateway.fleet import Fleet
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.control import Beat
from infinilora.protocol.errors import DeadlineExceeded, TooLarge, Unavailable
from infinilora.protocol.generate_pb2 import FilePiece
from infinilora.runtime.membership import Member
from infinilora.runtime.rpc import Channels, serving
from infinilora.weights.facts import Facts as Asking
from infinilora.weights.facts import FactsWanted
from infinilora.weights.factsfile import Question, write_request
from infinilora.weights.tensorfile import Array
from support import gateway_house
from support.cards import make_card
from support.gateway_house import error_of, open_house
from support.scripted_engine import ScriptedEngine
from support.tiny_models import TinyModel, make_tiny_model
from support.waiting import eventually

pytestmark = pytest.mark.integration
TOKEN = "a token of the test"
EMBED = "model.embed_tokens"
INDICES = np.array([3, 99])


class WatchedFacts(Facts):
    """Notes which thread answers; stops for as long as it is told to."""

    niceness = -1
    go: threading.Event

    @override
    def answer(self, question: Question) -> Mapping[str, Array]:
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        assert self.go.wait(30)
        return super().answer(question)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


class Place:
    """A gateway's road and the members it knows; a model, a request about it, and room for the answer."""

    def __init__(self, model: TinyModel, root: Path, channels: Channels) -> None:
        spec = read_spec(model.directory)
        source = Checkpoint(model.directory, spec)
        self.root, self.model = root, model
        self.card: BaseCard = base_card(spec, source, directory=model.directory, name="tiny", max_len=64)
        self.facts = WatchedFacts(spec, source, self.card.fingerprint)
        self.facts.go = threading.Event()
        self.facts.go.set()
        self.members: list[Member] = []
        self.road = FactsRoad(Fleet(lambda: self.members, channels), timeout_s=30.0)

    def add(self, name: str, address: str) -> None:
        beat = Beat(
            kind="engine", id=name, incarnation="1", seq=1, state="ready", address=address,
            base=self.card.fingerprint, model="tiny",
        )  # fmt: skip
        self.members.append(Member(beat, time.monotonic(), health="alive"))

    @asynccontextmanager
    async def engine(self, name: str, *, max_bytes: int = 1 << 20) -> AsyncIterator[FactsDesk]:
        desk = FactsDesk(self.facts, max_bytes=max_bytes, directory=self.root / "facts")
        try:
            async with serving("127.0.0.1:0", [(factsdesk.SERVICE, desk)], token=TOKEN, grace_s=0) as server:
                self.add(name, server.address)
                yield desk
        finally:
            desk.close()

    async def ask(self, indices: Array = INDICES) -> Array:
        """The rows that come of asking for them."""
        asking = Asking(self.card)
        asking.rows(EMBED, indices)
        with pytest.raises(FactsWanted) as wanted:
            asking.check_answered()
        write_request(self.root / "request", self.card.fingerprint, wanted.value.questions)
        await self.road.ask(self.card, self.root / "request", self.root / "answer")
        rows = Asking(self.card, self.root / "answer").rows(EMBED, indices)
        assert rows is not None
        return rows

    @property
    def wanted(self) -> Array:
        rows: Array = self.model.hf.model.embed_tokens.weight.detach().numpy()[INDICES]
        return rows


@asynccontextmanager
async def place_of(model: TinyModel, root: Path) -> AsyncIterator[Place]:
    async with Channels(token=TOKEN) as channels:
        yield Place(model, root, channels)


async def test_an_engine_answers_beside_its_serving(model: TinyModel, tmp_path: Path) -> None:
    async with place_of(model, tmp_path) as place, place.engine("e1"):
        assert np.array_equal(await place.ask(), place.wanted)
        assert place.facts.niceness == min(19, 10 + os.getpriority(os.PRIO_PROCESS, 0))
        assert not list((tmp_path / "facts").iterdir())


async def test_an_engine_that_is_gone_is_passed_over(model: TinyModel, tmp_path: Path) -> None:
    async with place_of(model, tmp_path) as place:
        place.add("e0", "127.0.0.1:1")
        async with place.engine("e1"):
            assert np.array_equal(await place.ask(), place.wanted)


async def test_an_engine_that_is_older_than_the_call_is_passed_over(model: TinyModel, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(place_of(model, tmp_path))
        older = await stack.enter_async_context(ScriptedEngine(place.card.fingerprint, "tiny", 128, 2).served(TOKEN))
        place.add("e0", older.address)
        with pytest.raises(Unavailable, match=r"base model 'tiny' .*e0: .*unimplemented"):
            await place.ask()
        await stack.enter_async_context(place.engine("e1"))
        assert np.array_equal(await place.ask(), place.wanted)


async def test_without_an_engine_of_the_base_it_is_unavailable(model: TinyModel, tmp_path: Path) -> None:
    async with place_of(model, tmp_path) as place:
        with pytest.raises(Unavailable, match=r"base model 'tiny' .*none is alive.*try again") as raised:
            await place.ask()
        assert raised.value.retry_after_s


async def test_registration_waits_for_an_engine_and_keeps_nothing_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The house's engines are older than the call: they serve, and know no facts."""
    card = msgspec.structs.replace(make_card("llama", outer=True), name="tiny")
    monkeypatch.setattr(gateway_house, "bare_card", lambda: card)
    async with open_house(tmp_path, with_text=False) as house:
        source = house.adapter_dir("a1", config={"trainable_token_indices": [3]})
        path = source / "adapter_model.safetensors"
        rows = {f"base_model.model.{EMBED}.token_adapter.trainable_tokens_delta": np.ones((1, 32), np.float32)}
        save_file(load_file(path) | rows, path)
        answer = await house.http.post("/v1/adapters", json={"name": "a1", "source": f"file://{source}"})
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "unavailable"
        assert "facts of base model 'tiny'" in error_of(answer)["message"]
        assert answer.headers["retry-after"]
        assert house.gateway.registry.get("default", "a1") is None
        assert not list((tmp_path / "store").glob("adapters/*"))
        assert [model["id"] for model in (await house.http.get("/v1/models")).json()["data"]] == ["tiny"]


async def test_a_request_larger_than_an_engine_takes_is_told_with_the_setting(model: TinyModel, tmp_path: Path) -> None:
    async with place_of(model, tmp_path) as place, place.engine("e1", max_bytes=100):
        with pytest.raises(TooLarge, match=r"engine of 'tiny' .*asked .*100 bytes \(INFINILORA_FACTS_MB\)") as raised:
            await place.ask()
        assert raised.value.http_status == 413
        async with place.engine("e2"):
            assert np.array_equal(await place.ask(), place.wanted)


async def test_an_answer_larger_than_an_engine_gives_is_told_with_the_setting(model: TinyModel, tmp_path: Path) -> None:
    """A question of a kilobyte about twelve kilobytes of rows."""
    async with place_of(model, tmp_path) as place, place.engine("e1", max_bytes=4000):
        with pytest.raises(TooLarge, match=r"answered .*\(INFINILORA_FACTS_MB\)"):
            await place.ask(np.arange(100))


async def test_an_engine_without_a_disk_is_passed_over(model: TinyModel, tmp_path: Path) -> None:
    async with place_of(model, tmp_path) as place, place.engine("e1"):
        (tmp_path / "facts").write_bytes(b"no directory")
        with pytest.raises(Unavailable, match="e1: this engine's disk"):
            await place.ask()


async def test_a_caller_who_never_ends_is_ended(
    model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factsdesk, "LONGEST_S", 0.3)
    async with place_of(model, tmp_path) as place, place.engine("e1") as desk:
        async with Channels(token=TOKEN) as channels:
            client = channels.client(factsdesk.SERVICE, place.members[0].beat.address)
            async with client.duplex("Answer", timeout_s=20) as call:
                await call.send(FilePiece(data=b"half a"))
                with pytest.raises(DeadlineExceeded, match="in time"):
                    await anext(aiter(call))
        assert desk._num_here == 0


async def test_one_is_answered_at_a_time_and_few_may_wait(
    model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factsdesk, "MAX_WAITING", 1)
    async with place_of(model, tmp_path) as place, place.engine("e1") as desk:
        place.facts.go.clear()
        asked = [asyncio.create_task(place.ask()) for _ in range(2)]
        await eventually(lambda: desk._num_here == 2, "both are here")
        with pytest.raises(Unavailable, match="too many wait"):
            await place.ask()
        place.facts.go.set()
        for rows in await asyncio.gather(*asked):
            assert np.array_equal(rows, place.wanted)
        assert desk._num_here == 0


async def test_a_caller_who_goes_away_leaves_nothing(model: TinyModel, tmp_path: Path) -> None:
    async with place_of(model, tmp_path) as place, place.engine("e1") as desk:
        place.facts.go.clear()
        asking = asyncio.create_task(place.ask())
        await eventually(lambda: place.facts.niceness > 0, "the question is looked at")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await eventually(lambda: desk._num_here == 0, "the caller is forgotten")
        place.facts.go.set()
        assert np.array_equal(await place.ask(), place.wanted)
