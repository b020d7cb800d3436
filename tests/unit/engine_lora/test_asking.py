"""Leases are asked for by any thread and given up by one: in every back-end they balance."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import cast

import pytest
from typing_extensions import override

from infinilora.engine.leases import BackendLeases
from infinilora.engine.lora.hybrid import HybridLora
from infinilora.engine.lora.interface import LeaseStatus, LeaseView, LoraBackend
from infinilora.engine.lora.local import GROUP, LocalLora
from infinilora.engine.lora.none import NoLora
from infinilora.engine.shards.head import HeadLora
from infinilora.engine.shards.heard import HeardFollower
from infinilora.engine.shards.messages import Drop, Want
from infinilora.pool.pool import AdapterPool
from infinilora.protocol.ids import Digest, digest_of
from support.cards import make_card
from support.plain_lora import PlainLora

CARD = make_card("llama", num_layers=2)


class SlowDigest(str):
    """Another thread may run whenever it is looked up."""

    __slots__ = ()

    @override
    def __hash__(self) -> int:
        time.sleep(0)
        return super().__hash__()

    @override
    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


DIGESTS = [Digest(SlowDigest(digest_of(bytes([n])))) for n in range(3)]
STATES = [LeaseStatus.WAITING, LeaseStatus.RESIDENT]


class StrictPool:
    """The part of AdapterPool that asks and gives up: a lease is given up once, and never before it was asked for."""

    def __init__(self) -> None:
        self.held: set[Digest] = set()
        self.on_release: Callable[[Digest], None] = lambda _: None

    def grants(self, holder: str) -> None:
        """Nothing is executed here."""

    def lease(self, holder: str, digest: Digest, on_change: object) -> None:
        assert digest not in self.held
        self.held.add(digest)

    def release(self, holder: str, digest: Digest) -> None:
        self.on_release(digest)
        self.held.remove(digest)

    def check(self) -> None:
        assert not self.held


class StrictFollower:
    """The part of HeardFollower that is told of leases, in an order that makes sense."""

    def __init__(self) -> None:
        self.wants: dict[Digest, int] = {}

    def wanted(self, digest: Digest, number: int) -> None:
        """What it is told, `send` has."""

    def dropped(self, digest: Digest) -> None:
        """What it is told, `send` has."""

    def news(self, digest: Digest) -> None:
        """None."""

    def send(self, order: Want | Drop) -> None:
        if isinstance(order, Want):
            assert order.digest not in self.wants
            self.wants[order.digest] = order.number
        else:
            del self.wants[order.digest]


class OneByte:
    capacity_bytes = 1

    def size_of(self, digest: Digest) -> int:
        return 1


def local() -> LoraBackend:
    return LocalLora(cast("AdapterPool", StrictPool()), lambda: None)


def hybrid() -> LoraBackend:
    here, there = PlainLora(CARD, group=GROUP), PlainLora(CARD)
    dice = random.Random(1)
    here.view = lambda digest: LeaseView(dice.choice(STATES))  # type: ignore[method-assign]  # it comes and goes
    return HybridLora(cast("LoraBackend", there), cast("LoraBackend", here), OneByte())


def head() -> LoraBackend:
    return HeadLora(cast("LoraBackend", PlainLora(CARD)), [cast("HeardFollower", StrictFollower())])


@pytest.fixture
def quick_switches() -> Iterator[None]:
    was = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(was)


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("make", [NoLora, local, hybrid, head])
def test_holders_balance_whichever_thread_asks(make: Callable[[], LoraBackend]) -> None:
    backend = make()
    leases = BackendLeases(backend)
    asked, wrong = SimpleQueue[Digest | None](), list[BaseException]()

    def ask(number: int) -> None:
        dice = random.Random(number)
        try:
            for _ in range(300):
                digest = dice.choice(DIGESTS)
                leases.want(digest)
                asked.put(digest)
        except BaseException as error:  # noqa: BLE001 - told by the test
            wrong.append(error)
        asked.put(None)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    ended = 0
    while ended < len(threads):
        digest = asked.get(timeout=30)
        if digest is None:
            ended += 1
        else:
            leases.held()
            backend.view(digest)
            leases.drop(digest)
    assert not wrong
    leases.check_idle()
    backend.check()


def test_who_asks_while_the_last_holder_gives_up_is_asked_for_after_it() -> None:
    pool = StrictPool()
    lora = LocalLora(cast("AdapterPool", pool), lambda: None)
    lora.want(DIGESTS[0])
    asking = threading.Thread(target=lora.want, args=(DIGESTS[0],))

    def meanwhile(_: Digest) -> None:
        asking.start()
        asking.join(0.1)  # it cannot end as long as it waits for us

    pool.on_release = meanwhile
    lora.drop(DIGESTS[0])
    asking.join()
    assert pool.held == {DIGESTS[0]}


def test_a_hybrid_takes_nothing_from_a_step_when_it_is_asked() -> None:
    """Whoever comes may change where an adapter belongs; rows of the step that runs are still computed where it was."""
    here, there = PlainLora(CARD, group=GROUP), PlainLora(CARD)
    lora = HybridLora(cast("LoraBackend", there), cast("LoraBackend", here), OneByte())
    first, second = DIGESTS[:2]
    resident = set[Digest]()
    here.view = lambda digest: LeaseView(STATES[digest in resident])  # type: ignore[method-assign]
    for _ in range(2):
        lora.want(first)
    assert (here.holders[first], there.holders[first]) == (1, 1)
    resident.add(first)
    lora.want(first)
    lora.want(second)
    assert (here.holders[first], there.holders[first]) == (1, 1)
    lora.drop(second)
    assert (here.holders[first], there.holders[first]) == (1, 0)
