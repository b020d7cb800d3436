"""Some adapters here and all others there: who holds what, and that moving is never seen."""

import random
from pathlib import Path
from typing import cast

import pytest

from infinilora.engine.assemble import LoadedModel
from infinilora.engine.lora.hybrid import HybridLora
from infinilora.engine.lora.interface import LeaseStatus, LoraBackend
from infinilora.engine.lora.local import GROUP
from infinilora.engine.sched.scheduler import Limits
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.ids import Digest
from support.engines import Heard, TestEngine, load_tiny
from support.oracle import ATTENTION, MLP, Oracle, write_adapter
from support.plain_lora import PlainLora
from support.tiny_models import TinyModel, make_tiny_model

SHORTFALL = 2e-3


class Sizes:
    """A pool with room for so many adapters of one byte."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes

    def size_of(self, digest: Digest) -> int | None:
        return 1


class Pair:
    """A hybrid back-end over two plain ones, whose states the test sets; room for one adapter here."""

    def __init__(self, card: BaseCard, files: list[Path], *, room: int = 1) -> None:
        self.here, self.there = PlainLora(card, group=GROUP), PlainLora(card)
        self.digests = [self.there.register(path) for path in files]
        for path, digest in zip(files, self.digests, strict=True):
            self.here.register(path)
            self.here.status[digest] = LeaseStatus.WAITING
        self.now = 0.0
        there, here = cast("LoraBackend", self.there), cast("LoraBackend", self.here)
        self.lora = HybridLora(there, here, Sizes(room), clock=lambda: self.now)

    def holds(self, digest: Digest) -> tuple[int, int]:
        return self.here.holders[digest], self.there.holders[digest]

    def group(self, digest: Digest) -> str | None:
        lease = self.lora.view(digest).lease
        return lease.group if lease else None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def loaded(tiny: TinyModel) -> LoadedModel:
    return load_tiny(tiny.directory)


@pytest.fixture(scope="module")
def files(tiny: TinyModel) -> list[Path]:
    shapes = [(4, ATTENTION), (16, MLP), (8, ATTENTION)]
    return [
        write_adapter(tiny.directory.parent / f"a{i}", tiny.directory, rank=rank, targets=targets, seed=i, std=0.25)
        for i, (rank, targets) in enumerate(shapes)
    ]


@pytest.fixture
def pair(loaded: LoadedModel, files: list[Path]) -> Pair:
    return Pair(loaded.card, files)


def test_an_adapter_asked_for_once_is_the_lora_servers(pair: Pair) -> None:
    pair.lora.want(pair.digests[0])
    assert pair.holds(pair.digests[0]) == (0, 1)
    pair.lora.drop(pair.digests[0])
    assert pair.holds(pair.digests[0]) == (0, 0)
    pair.lora.check()


def test_a_hot_one_is_held_there_until_it_is_here(pair: Pair) -> None:
    hot = pair.digests[0]
    pair.lora.want(hot)
    pair.lora.want(hot)
    assert (pair.holds(hot), pair.group(hot)) == ((1, 1), "plain")
    pair.here.status[hot] = LeaseStatus.RESIDENT
    assert pair.group(hot) == GROUP
    pair.lora.want(hot)
    assert pair.holds(hot) == (1, 1), "rows of the step that runs may have it there"
    pair.lora.drop(hot)
    assert pair.holds(hot) == (1, 0)
    for _ in range(2):
        pair.lora.drop(hot)
    assert pair.holds(hot) == (0, 0)


def test_one_that_has_cooled_is_held_here_until_it_is_there(pair: Pair) -> None:
    cools, warms, _ = pair.digests
    pair.here.status.update(dict.fromkeys(pair.digests, LeaseStatus.RESIDENT))
    pair.lora.want(cools)
    pair.lora.want(cools)
    pair.lora.want(cools)
    pair.lora.drop(cools)
    assert (pair.holds(cools), pair.group(cools)) == ((1, 0), GROUP)
    pair.there.status[cools] = LeaseStatus.WAITING
    pair.now = 600.0
    for _ in range(3):
        pair.lora.want(warms)
    pair.lora.drop(warms)
    assert (pair.holds(cools), pair.group(cools)) == ((1, 1), GROUP), "it is not there yet"
    assert pair.group(warms) == GROUP
    pair.there.status[cools] = LeaseStatus.RESIDENT
    pair.lora.drop(warms)
    assert (pair.holds(cools), pair.group(cools)) == ((0, 1), "plain")


@pytest.mark.parametrize("when", ["while it loads", "in use"])
def test_one_that_fails_here_is_served_there_and_not_tried_again(pair: Pair, when: str) -> None:
    hot = pair.digests[0]
    if when == "in use":
        pair.here.status[hot] = LeaseStatus.RESIDENT
    pair.lora.want(hot)
    pair.lora.want(hot)
    pair.here.status[hot] = LeaseStatus.FAILED
    assert (pair.lora.view(hot).status, pair.group(hot)) == (LeaseStatus.RESIDENT, "plain")
    pair.lora.drop(hot)
    pair.here.status[hot] = LeaseStatus.RESIDENT
    pair.lora.want(hot)
    assert (pair.holds(hot), pair.group(hot)) == ((0, 1), "plain")


def test_what_is_computed_here_after_narrow_rows_says_so_too(pair: Pair) -> None:
    """Its keys and values may come of them; before there was such a link nothing did."""
    hot = pair.digests[0]
    pair.here.status[hot] = LeaseStatus.RESIDENT

    def narrows() -> bool:
        lease = pair.lora.view(hot).lease
        assert lease is not None
        assert lease.group == GROUP
        return lease.may_narrow

    pair.lora.want(hot)
    pair.lora.want(hot)
    assert not narrows()
    pair.there.narrows = True
    other = pair.digests[1]
    pair.lora.want(other)
    assert pair.group(other) == "plain"
    assert narrows()


def test_a_step_without_adapters_begins_with_neither(pair: Pair) -> None:
    assert pair.lora.begin([]) is None
    assert (pair.here.begun, pair.there.begun) == (0, 0)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_token_is_wrong_while_adapters_move(
    seed: int,
    tiny: TinyModel,
    loaded: LoadedModel,
    files: list[Path],
) -> None:
    dice, pair = random.Random(seed), Pair(loaded.card, files)
    engine = TestEngine(loaded, pair.lora, limits=Limits(max_running=6, step_tokens=24))
    asked: list[tuple[list[int], int, Heard]] = []
    computed: dict[str, int] = dict.fromkeys([GROUP, "plain"], 0)
    while len(asked) < 60 or engine.loop._jobs:
        pair.now += dice.random() * 20
        favourite = len(asked) // 20 % 3
        if len(asked) < 60:
            which = favourite if dice.random() < 0.7 else dice.randrange(3)
            prompt = [dice.randrange(3, 120) for _ in range(dice.randrange(2, 12))]
            heard = engine.ask(prompt, digest=pair.digests[which], max_tokens=dice.randrange(1, 9))
            asked.append((prompt, which, heard))
        move(dice, pair)
        engine.turn()
        for digest in pair.digests:
            group = pair.group(digest) if pair.lora.view(digest).status is LeaseStatus.RESIDENT else None
            if group:
                computed[group] += 1
    pair.lora.check()
    assert min(computed.values()) > 20, "both were used"
    oracle = Oracle(tiny.directory)
    for prompt, which, heard in asked:
        assert heard.ended.reason == "length"
        assert oracle.shortfall(prompt, heard.tokens, files[which]) < SHORTFALL


def move(dice: random.Random, pair: Pair) -> None:
    """Leases come and go on both sides, as pools decide; what is held here stays resident while it is held."""
    digest = dice.choice(pair.digests)
    if dice.random() < 0.6:
        pair.here.status[digest] = LeaseStatus.RESIDENT
    elif not pair.here.holders[digest]:
        pair.here.status[digest] = LeaseStatus.WAITING
    pair.there.status[digest] = dice.choice([LeaseStatus.RESIDENT, LeaseStatus.RESIDENT, LeaseStatus.WAITING])
    if all(pair.there.status[d] is LeaseStatus.WAITING for d in pair.digests):
        pair.there.status[digest] = LeaseStatus.RESIDENT


def test_rows_of_one_step_are_computed_here_and_there(loaded: LoadedModel, files: list[Path], tiny: TinyModel) -> None:
    pair = Pair(loaded.card, files)
    ours, theirs, _ = pair.digests
    pair.here.status[ours] = LeaseStatus.RESIDENT
    engine = TestEngine(loaded, pair.lora, limits=Limits(max_running=8, step_tokens=64))
    prompt = [5, 9, 33, 70, 12, 8]
    told = [engine.ask(prompt, digest=d, max_tokens=6) for d in (ours, ours, theirs, None)]
    engine.run()
    truth = Oracle(tiny.directory)
    for heard, path in zip(told, [files[0], files[0], files[1], None], strict=True):
        assert truth.shortfall(prompt, heard.tokens, path) < SHORTFALL
    assert pair.here.submits > 0
    assert pair.there.submits > 0
