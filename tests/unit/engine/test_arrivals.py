"""Requests that arrive while a step runs: their leases are asked for then, and are all given back."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from infinilora.engine.assemble import make_loop
from infinilora.engine.events import Ended, Failed
from infinilora.engine.lora.interface import LeaseStatus, LoraBackend
from infinilora.engine.runner import Outcome
from infinilora.engine.sched.scheduler import Limits
from infinilora.engine.sequence import SamplingParams, Sequence
from infinilora.protocol.errors import Overloaded
from infinilora.protocol.ids import Digest
from support.engines import Heard, TestEngine, load_tiny
from support.oracle import ATTENTION, MLP
from support.plain_lora import PlainLora
from support.tiny_models import TinyModel

PROMPT = [5, 9, 33, 70]


class Moments:
    """An engine with room for all, and a list of what happens while its next step runs."""

    def __init__(self, model: TinyModel, adapters: list[Path]) -> None:
        loaded = load_tiny(model.directory, kv_bytes=1 << 20, max_model_len=64)
        self.lora = PlainLora(loaded.card)
        self.digests = [self.lora.register(path) for path in adapters]
        self.engine = TestEngine(loaded, self.lora, limits=Limits(max_running=99, step_tokens=999))
        self.meanwhile: list[Callable[[], object]] = []
        run = self.engine.loop._runner.run

        def run_and_more(rows: Any) -> Outcome:
            while self.meanwhile:
                self.meanwhile.pop(0)()
            return run(rows)

        self.engine.loop._runner.run = run_and_more  # type: ignore[method-assign]  # the step, and what comes during it

    def ask(self, digest: Digest | None, **params: Any) -> Heard:
        return self.engine.ask(PROMPT, digest=digest, **{"max_tokens": 8, **params})

    def answer(self, digest: Digest) -> None:
        """The LoRA server says that it is there, to whoever has asked by now."""
        if self.lora.holders[digest]:
            self.lora.status[digest] = LeaseStatus.RESIDENT


@pytest.fixture
def moments(tiny: Callable[[str], TinyModel], adapter: Callable[..., Path]) -> Moments:
    paths = [adapter("llama", 4, ATTENTION, 41), adapter("llama", 8, MLP, 42), adapter("llama", 8, ATTENTION, 43)]
    return Moments(tiny("llama"), paths)


def test_what_is_answered_while_the_step_of_its_arrival_runs_is_in_the_next_step(moments: Moments) -> None:
    digest, told = moments.digests[0], list[Heard]()
    moments.lora.status[digest] = LeaseStatus.WAITING
    base = moments.ask(None)
    moments.engine.turn()
    moments.meanwhile += [lambda: told.append(moments.ask(digest)), lambda: moments.answer(digest)]
    moments.engine.turn()
    assert (len(base.tokens), len(told[0].tokens)) == (2, 0)
    moments.engine.turn()
    assert (len(base.tokens), len(told[0].tokens)) == (3, 1)
    moments.engine.run()


def test_who_leaves_before_the_step_thread_has_heard_of_him_gives_his_lease_back(moments: Moments) -> None:
    digest = moments.digests[0]
    moments.lora.status[digest] = LeaseStatus.WAITING
    heard = moments.ask(digest)
    assert moments.lora.holders[digest] == 1
    assert heard.job is not None
    moments.engine.loop.abort(heard.job)
    moments.engine.turn()
    assert heard.ended.reason == "abort"
    moments.engine.loop.check_idle()


def test_a_lease_that_is_lost_before_the_step_thread_has_heard_of_it_is_seen(moments: Moments) -> None:
    digest = moments.digests[0]
    base, heard = moments.ask(None), moments.ask(digest)
    moments.lora.status[digest] = LeaseStatus.WAITING
    moments.engine.turn()
    assert (len(base.tokens), len(heard.tokens)) == (1, 0)
    moments.lora.status[digest] = LeaseStatus.FAILED
    moments.engine.turn()
    assert heard.failed.error.code == "adapter_failed"
    moments.engine.run()


def test_who_is_refused_asks_for_no_lease(moments: Moments) -> None:
    moments.engine.loop._max_waiting = 1
    moments.ask(moments.digests[0])
    with pytest.raises(Overloaded):
        moments.ask(moments.digests[1])
    assert moments.lora.ever_wanted == [moments.digests[0]]
    moments.engine.run()


@pytest.mark.parametrize("seed", range(12))
def test_in_any_order_of_arrivals_answers_ends_and_losses_every_row_runs_as_soon_as_it_can(
    seed: int, moments: Moments
) -> None:
    """After each step: who had its adapter when it began has one token more, and each who is there holds a lease."""
    dice, asked, left = random.Random(seed), list[tuple[Digest | None, Heard]](), set[int]()

    def arrive() -> None:
        digest = dice.choice([None, *moments.digests])
        asked.append((digest, moments.ask(digest, max_tokens=dice.randrange(1, 9))))

    def leave() -> None:
        number = dice.randrange(len(asked) + 1)
        job = asked[number][1].job if number < len(asked) else None
        if job is not None:
            left.add(number)
            moments.engine.loop.abort(job)

    def answer() -> None:
        moments.answer(dice.choice(moments.digests))

    def lose() -> None:
        moments.lora.status[dice.choice(moments.digests)] = LeaseStatus.WAITING

    for _ in range(60):
        for happens in dice.choices([arrive, answer, leave, lose], [4, 3, 1, 2], k=dice.randrange(4)):
            happens()
        moments.meanwhile = dice.choices([arrive, answer, leave], [4, 3, 1], k=dice.randrange(4))
        ready = {d for d in moments.digests if moments.lora.status[d] is LeaseStatus.RESIDENT} | {None}
        runs = [h for n, (d, h) in enumerate(asked) if d in ready and not h.is_over and n not in left]
        before = [len(heard.tokens) for heard in runs]
        moments.engine.turn()
        moments.meanwhile.clear()  # where no step ran
        assert [len(heard.tokens) for heard in runs] == [count + 1 for count in before]
        there = Counter(digest for digest, heard in asked if digest and not heard.is_over)
        assert +moments.lora.holders == there
    moments.lora.status.update(dict.fromkeys(moments.digests, LeaseStatus.RESIDENT))
    moments.engine.run()
    assert len(left) > 2
    assert all(heard.is_over for _, heard in asked)


@pytest.mark.parametrize("seed", range(4))
def test_leases_balance_whichever_threads_ask_and_leave(
    seed: int, tiny: Callable[[str], TinyModel], adapter: Callable[..., Path]
) -> None:
    """Three threads that submit and abort beside the step thread, and leases that come and go."""
    model = load_tiny(tiny("llama").directory, kv_bytes=1 << 20, max_model_len=64)
    lora = PlainLora(model.card)
    digests = [lora.register(adapter("llama", 4, ATTENTION, 41 + i)) for i in range(3)]
    loop = make_loop(model, cast("LoraBackend", lora), Limits(max_running=16, step_tokens=64))
    gone = threading.Semaphore(0)

    def clients(number: int) -> None:
        dice = random.Random(100 * seed + number)
        for _ in range(20):
            sequence = Sequence("r", list(PROMPT), 4, dice.choice(digests), SamplingParams(max_tokens=3))
            job = loop.submit(sequence, lambda event: gone.release() if isinstance(event, Ended | Failed) else None)
            if dice.random() < 0.5:
                loop.abort(job)
            news = {dice.choice(digests): dice.choice([LeaseStatus.WAITING, LeaseStatus.RESIDENT])}
            loop.call(partial(lora.status.update, news))

    loop.start()
    threads = [threading.Thread(target=clients, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loop.call(lambda: lora.status.update(dict.fromkeys(digests, LeaseStatus.RESIDENT)))
    assert all(gone.acquire(timeout=30) for _ in range(60))
    loop.stop()
    loop.check_idle()
