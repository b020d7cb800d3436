"""The step loop: what it tells, what it frees, and that trouble stays with the sequence that has it."""

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from infinilora.engine.assemble import LoadedModel, make_loop
from infinilora.engine.events import Ended, Event, Hooks
from infinilora.engine.job import Patience
from infinilora.engine.lora.interface import LeaseStatus, LoraBackend, StepPlan
from infinilora.engine.lora.none import NoLora
from infinilora.engine.model.batch import Batch
from infinilora.engine.model.decoder import Decoder
from infinilora.engine.runner import Runner
from infinilora.engine.sched.scheduler import Limits, Rows
from infinilora.engine.sequence import SamplingParams, Sequence
from infinilora.protocol.errors import AdapterFailed, AdapterInvalid, AdapterLoading, DeadlineExceeded, Overloaded
from support.engines import Heard, TestEngine, load_tiny
from support.oracle import ATTENTION, MLP, Oracle
from support.plain_lora import PlainLora
from support.procs import wait_until
from support.tiny_models import TinyModel

LIMITS = Limits(max_running=8, step_tokens=16)
PROMPT = [5, 9, 33, 70, 12, 8]

Loaded = Callable[[str], LoadedModel]
MakeAdapter = Callable[..., Path]


@pytest.fixture
def lora(loaded: Loaded) -> PlainLora:
    return PlainLora(loaded("llama").card)


@pytest.fixture
def engine(loaded: Loaded, lora: PlainLora) -> TestEngine:
    return TestEngine(loaded("llama"), lora, limits=LIMITS)


def alone(loaded: Loaded, prompt: list[int], **params: Any) -> list[int]:
    """What the base says with nobody else around."""
    engine = TestEngine(loaded("llama"), NoLora(), limits=LIMITS)
    heard = engine.ask(prompt, **params)
    engine.run()
    return heard.tokens


def test_a_stop_id_ends_a_sequence_and_is_not_a_token(engine: TestEngine, loaded: Loaded) -> None:
    tokens = alone(loaded, PROMPT, max_tokens=6)
    heard = engine.ask(PROMPT, max_tokens=6, stop_token_ids=frozenset({tokens[3]}))
    engine.run()
    cut = tokens.index(tokens[3])
    assert heard.tokens == tokens[:cut]
    assert (heard.ended.reason, heard.ended.stop_token_id) == ("stop", tokens[3])
    assert heard.ended.completion_tokens == cut


def test_a_continuation_goes_on_exactly_greedy_and_seeded(engine: TestEngine, loaded: Loaded) -> None:
    seeded: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "seed": 3, "repetition_penalty": 1.2}
    greedy: dict[str, Any] = {"max_tokens": 8}
    for params in (greedy, seeded):
        whole = alone(loaded, PROMPT, **params)
        heard = engine.ask(PROMPT, produced=whole[:3], **params)
        engine.run()
        assert heard.tokens == whole[3:]
        assert heard.ended.completion_tokens == 8


def test_scoring_a_prompt_produces_nothing(engine: TestEngine) -> None:
    heard = engine.ask(PROMPT, max_tokens=0, prompt_logprobs=1)
    engine.run()
    assert heard.tokens == []
    assert len(heard.prompt_scores) == len(PROMPT) - 1
    assert heard.ended.reason == "length"


def test_preempted_chunked_and_cached_sequences_say_the_same(loaded: Loaded, tiny: Callable[[str], TinyModel]) -> None:
    prompts = [[(7 * i + j) % 120 + 3 for j in range(4 + 5 * i)] for i in range(5)]
    expected = [alone(loaded, p, max_tokens=16, temperature=0.9, seed=i) for i, p in enumerate(prompts)]
    small = load_tiny(tiny("llama").directory, kv_bytes=26 * 1024, max_model_len=64)
    engine = TestEngine(small, NoLora(), limits=Limits(max_running=8, step_tokens=6))
    heard: list[Heard] = []
    for _ in range(2):
        heard = [engine.ask(p, max_tokens=16, temperature=0.9, seed=i) for i, p in enumerate(prompts)]
        engine.run()
        assert [h.tokens for h in heard] == expected
    assert max(h.ended.num_preemptions for h in heard) > 0
    assert max(h.ended.cached_tokens for h in heard) > 0


def test_prompt_scores_survive_a_preemption_in_their_middle(loaded: Loaded, tiny: Callable[[str], TinyModel]) -> None:
    small = load_tiny(tiny("llama").directory, kv_bytes=20 * 1024, max_model_len=64)
    engine = TestEngine(small, NoLora(), limits=Limits(max_running=8, step_tokens=2))
    old = engine.ask(list(range(10, 30)), max_tokens=30)
    scored = engine.ask(list(range(40, 80)), max_tokens=2, prompt_logprobs=0)
    engine.run()
    assert scored.ended.num_preemptions > 0
    assert [s.token_id for s in scored.prompt_scores] == list(range(41, 80))
    assert len(old.tokens) == 30


def test_one_digest_never_reads_what_another_cached(
    engine: TestEngine, lora: PlainLora, adapter: MakeAdapter, oracle: Callable[[str], Oracle]
) -> None:
    directories = [adapter("llama", 8, ATTENTION, 21), adapter("llama", 8, MLP, 22)]
    digests = [lora.register(d) for d in directories]
    cached = 0
    for digest, directory in [(None, None), *zip(digests, directories, strict=True), (digests[0], directories[0])]:
        heard = engine.ask(list(range(20, 43)), digest=digest, max_tokens=4)
        engine.run()
        assert oracle("llama").shortfall(list(range(20, 43)), heard.tokens, directory) < 1e-4
        cached = heard.ended.cached_tokens
    assert cached == 20


def test_lost_rows_are_run_again_whole_and_the_others_finish(
    engine: TestEngine, lora: PlainLora, adapter: MakeAdapter, oracle: Callable[[str], Oracle], loaded: Loaded
) -> None:
    directories = [adapter("llama", 8, ATTENTION, 21), adapter("llama", 8, MLP, 22)]
    first, second = (lora.register(d) for d in directories)
    told = [engine.ask(PROMPT, digest=d, max_tokens=6) for d in (first, second, None)]
    engine.turn()
    before = [len(t.tokens) for t in told]
    lora.lose[first] = 1
    engine.turn()
    assert [len(t.tokens) - b for t, b in zip(told, before, strict=True)] == [0, 1, 1]
    engine.run()
    for heard, directory in zip(told, [*directories, None], strict=True):
        assert len(heard.tokens) == 6
        assert oracle("llama").shortfall(PROMPT, heard.tokens, directory) < 1e-4


@pytest.mark.parametrize("calls", [1, 3])
def test_rows_whose_deltas_did_not_come_say_nothing_and_are_run_again_though_their_step_went_through(
    calls: int,
    lora: PlainLora,
    adapter: MakeAdapter,
    oracle: Callable[[str], Oracle],
    loaded: Loaded,
) -> None:
    """As of a device that still waits when the step has been launched: `verify` alone knows."""
    engine = TestEngine(loaded("llama"), lora, limits=Limits(max_running=8, step_tokens=32))
    directories = [adapter("llama", 8, ATTENTION, 21), adapter("llama", 8, MLP, 22)]
    first, second = (lora.register(d) for d in directories)
    told = [engine.ask(PROMPT, digest=d, max_tokens=6, prompt_logprobs=0) for d in (first, second, None)]
    lora.lose_late[first] = calls
    engine.turn()
    assert [len(t.tokens) for t in told] == [0, 1, 1]
    assert [t.has_prompt_scores for t in told] == [False, True, True]
    lora.lose_late[first] = 0
    engine.turn()
    before = [len(t.tokens) for t in told]
    assert before == [1, 2, 2]
    lora.lose_late[first] = calls
    engine.turn()
    assert [len(t.tokens) - b for t, b in zip(told, before, strict=True)] == [0, 1, 1]
    lora.lose_late[first] = 0
    engine.run()
    for heard, directory in zip(told, [*directories, None], strict=True):
        assert len(heard.tokens) == 6
        assert oracle("llama").shortfall(PROMPT, heard.tokens, directory) < 1e-4
        assert error_of_prompt(heard, oracle("llama"), directory) < 1e-3


def error_of_prompt(heard: Heard, oracle: Oracle, adapter: Path | None) -> float:
    logprobs = torch.log_softmax(oracle.logits(PROMPT, adapter), -1)
    return max(abs(float(logprobs[at, score.token_id]) - score.logprob) for at, score in enumerate(heard.prompt_scores))


def test_rows_whose_adapter_loads_again_since_they_were_scheduled_share_no_step(
    loaded: Loaded, lora: PlainLora, adapter: MakeAdapter
) -> None:
    model, digest = loaded("llama"), lora.register(adapter("llama", 8, ATTENTION, 21))
    backend: Any = lora
    lora.want(digest)
    lora.status[digest] = LeaseStatus.ADMISSIBLE
    rows = [
        Rows(Sequence(name, list(PROMPT), len(PROMPT), digest=wanted, blocks=[2 * i, 2 * i + 1]), 0, len(PROMPT))
        for i, (name, wanted) in enumerate((("loads", digest), ("base", None)))
    ]
    outcome = Runner(model.decoder, backend, block_size=model.sizes.block_size).run(rows)
    assert (outcome.lost, outcome.done) == (rows[:1], rows[1:])
    assert lora.submits == 0


def test_rows_that_are_lost_again_and_again_fail_alone(
    engine: TestEngine, lora: PlainLora, adapter: MakeAdapter
) -> None:
    digest = lora.register(adapter("llama", 8, ATTENTION, 21))
    lora.lose[digest] = 1000
    told, base = engine.ask(PROMPT, digest=digest, max_tokens=6), engine.ask(PROMPT, max_tokens=6)
    engine.run()
    assert isinstance(told.failed.error, AdapterFailed)
    assert told.tokens == []
    assert len(base.tokens) == 6


def test_a_waiting_adapter_delays_nobody_and_fails_as_loading(
    loaded: Loaded, lora: PlainLora, adapter: MakeAdapter
) -> None:
    engine = TestEngine(loaded("llama"), lora, limits=LIMITS, patience=Patience(loading_s=0.0))
    digest = lora.register(adapter("llama", 8, ATTENTION, 21))
    lora.status[digest] = LeaseStatus.WAITING
    cold, base = engine.ask(PROMPT, digest=digest, max_tokens=4), engine.ask(PROMPT, max_tokens=4)
    engine.run()
    assert isinstance(cold.failed.error, AdapterLoading)
    assert cold.failed.error.retry_after_s is not None
    assert len(base.tokens) == 4


def test_a_running_sequence_that_loses_its_adapter_pauses_then_resumes(
    engine: TestEngine, lora: PlainLora, adapter: MakeAdapter, oracle: Callable[[str], Oracle]
) -> None:
    directory = adapter("llama", 8, ATTENTION, 21)
    digest = lora.register(directory)
    heard = engine.ask(PROMPT, digest=digest, max_tokens=5)
    engine.turn()
    lora.status[digest] = LeaseStatus.WAITING
    for _ in range(3):
        engine.turn()
    assert len(heard.tokens) == 1
    lora.status[digest] = LeaseStatus.RESIDENT
    engine.run()
    assert oracle("llama").shortfall(PROMPT, heard.tokens, directory) < 1e-4


def test_a_running_sequence_whose_adapter_stays_away_fails_without_a_base_token(
    loaded: Loaded, lora: PlainLora, adapter: MakeAdapter
) -> None:
    engine = TestEngine(loaded("llama"), lora, limits=LIMITS, patience=Patience(lost_s=0.0))
    digest = lora.register(adapter("llama", 8, ATTENTION, 21))
    heard = engine.ask(PROMPT, digest=digest, max_tokens=5, fallback_base=True)
    engine.turn()
    lora.status[digest] = LeaseStatus.WAITING
    engine.run()
    assert len(heard.tokens) == 1
    assert isinstance(heard.failed.error, AdapterFailed)


@pytest.mark.parametrize("accepts", [True, False])
def test_a_broken_adapter_gives_base_output_only_to_whom_accepted_it(
    engine: TestEngine, lora: PlainLora, adapter: MakeAdapter, loaded: Loaded, accepts: bool
) -> None:
    digest = lora.register(adapter("llama", 8, ATTENTION, 21))
    lora.status[digest] = LeaseStatus.FAILED
    heard = engine.ask(PROMPT, digest=digest, max_tokens=4, fallback_base=accepts)
    engine.run()
    if accepts:
        assert heard.ended.degraded
        assert heard.tokens == alone(loaded, PROMPT, max_tokens=4)
    else:
        assert isinstance(heard.failed.error, AdapterFailed)
        assert heard.tokens == []


@pytest.mark.parametrize("asked", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"logprobs": 2}])
def test_where_no_number_comes_out_no_token_does_and_neighbours_go_on(
    engine: TestEngine, lora: PlainLora, adapter: MakeAdapter, loaded: Loaded, asked: dict[str, Any]
) -> None:
    huge = lora.register(adapter("llama", 8, ATTENTION, 91, std=1e20))
    good = lora.register(adapter("llama", 8, ATTENTION, 22))
    broken, base, other, scored = (
        engine.ask(PROMPT, digest=huge, max_tokens=4, **asked),
        engine.ask(PROMPT, max_tokens=4),
        engine.ask(PROMPT, digest=good, max_tokens=4),
        engine.ask(PROMPT, digest=huge, max_tokens=0, prompt_logprobs=1),
    )
    accepting = engine.ask(PROMPT, digest=huge, max_tokens=4, fallback_base=True)
    engine.run()
    for heard in (broken, scored):
        assert isinstance(heard.failed.error, AdapterInvalid)
        assert [*heard.tokens, heard.has_prompt_scores] == [False]
    assert base.tokens == accepting.tokens == alone(loaded, PROMPT, max_tokens=4)
    assert (accepting.ended.degraded, len(other.tokens)) == (True, 4)
    engine.loop.check_idle()


def test_a_sequence_that_runs_without_a_token_can_still_degrade(
    loaded: Loaded, lora: PlainLora, adapter: MakeAdapter
) -> None:
    engine = TestEngine(loaded("llama"), lora, limits=Limits(8, 4), patience=Patience(lost_s=0.0))
    digest = lora.register(adapter("llama", 8, ATTENTION, 21))
    heard = engine.ask(PROMPT, digest=digest, max_tokens=4, fallback_base=True)
    engine.turn()
    lora.status[digest] = LeaseStatus.WAITING
    engine.run()
    assert heard.ended.degraded
    assert heard.tokens == alone(loaded, PROMPT, max_tokens=4)


def test_an_abort_frees_everything_at_once_whatever_the_sequence_does(
    engine: TestEngine, lora: PlainLora, adapter: MakeAdapter
) -> None:
    digest = lora.register(adapter("llama", 8, ATTENTION, 21))
    running = engine.ask(PROMPT, digest=digest, max_tokens=50)
    engine.turn()
    lora.status[digest] = LeaseStatus.WAITING
    waiting = engine.ask(PROMPT, digest=digest, max_tokens=50)
    fresh = engine.ask(PROMPT, max_tokens=50)
    for heard in (running, waiting, fresh, running):
        assert heard.job is not None
        engine.loop.abort(heard.job)
    engine.turn()
    engine.loop.check_idle()
    assert [h.ended.reason for h in (running, waiting, fresh)] == ["abort"] * 3


def test_a_deadline_ends_a_sequence_with_its_own_error(engine: TestEngine) -> None:
    late, other = engine.ask(PROMPT, max_tokens=50, deadline_s=0.0), engine.ask(PROMPT, max_tokens=3)
    engine.run()
    assert isinstance(late.failed.error, DeadlineExceeded)
    assert len(other.tokens) == 3


def test_a_full_queue_refuses_and_says_when_to_come_back(loaded: Loaded) -> None:
    loop = make_loop(loaded("llama"), NoLora(), LIMITS, max_waiting=2)
    for i in range(2):
        loop.submit(Sequence(f"s{i}", list(PROMPT), 6), lambda _: None)
    with pytest.raises(Overloaded) as refused:
        loop.submit(Sequence("s3", list(PROMPT), 6), lambda _: None)
    assert refused.value.retry_after_s


def test_batch_may_fill_half_of_the_queue_and_leaves_the_rest_to_others(loaded: Loaded) -> None:
    loop = make_loop(loaded("llama"), NoLora(), LIMITS, max_waiting=2)
    loop.submit(Sequence("b0", list(PROMPT), 6, slo_class="batch"), lambda _: None)
    with pytest.raises(Overloaded, match="queue of 1 for batch"):
        loop.submit(Sequence("b1", list(PROMPT), 6, slo_class="batch"), lambda _: None)
    loop.submit(Sequence("i0", list(PROMPT), 6, slo_class="interactive"), lambda _: None)


def test_a_continued_sequence_is_due_before_a_new_one_of_its_class(loaded: Loaded) -> None:
    loop = make_loop(loaded("llama"), NoLora(), LIMITS)
    new, continued = Sequence("new", list(PROMPT), 6), Sequence("continued", [*PROMPT, 9], 6)
    for sequence in (new, continued):
        loop.submit(sequence, lambda _: None)
    assert continued.due_s < new.due_s


def test_the_thread_sleeps_when_idle_wakes_for_work_and_stops(loaded: Loaded) -> None:
    events: list[Event] = []
    over, flushed = threading.Event(), threading.Event()
    loop = make_loop(loaded("llama"), NoLora(), LIMITS, hooks=Hooks(flush=flushed.set))
    loop.start()

    def hear(event: Event) -> None:
        events.append(event)
        if isinstance(event, Ended):
            over.set()

    loop.submit(Sequence("s", list(PROMPT), 6, params=SamplingParams(max_tokens=4)), hear)
    assert over.wait(20)
    assert flushed.wait(5)
    unfinished = Heard()
    loop.submit(Sequence("t", list(PROMPT), 6, params=SamplingParams(max_tokens=200)), unfinished.events.append)
    loop.stop()
    assert not loop.is_alive
    assert len(events) == 5
    assert unfinished.ended.reason in ("abort", "length")
    loop.check_idle()


def test_a_dying_step_thread_is_heard(loaded: Loaded) -> None:
    heard: list[BaseException] = []
    died = threading.Event()

    def on_crash(error: BaseException) -> None:
        heard.append(error)
        died.set()

    def broken() -> None:
        raise SystemExit("the test says so")

    loop = make_loop(loaded("llama"), NoLora(), LIMITS, hooks=Hooks(on_crash=on_crash))
    loop.start()
    loop.call(broken)
    assert died.wait(20)
    assert isinstance(heard[0], SystemExit)


def test_progress_moves_with_every_layer_and_is_none_while_there_is_nothing_to_do(loaded: Loaded) -> None:
    model, seen, ended = loaded("llama"), list[int | None](), threading.Event()
    loop = make_loop(model, NoLora(), LIMITS, hooks=Hooks(on_step=lambda _: seen.append(loop.progress)))
    assert loop.progress is None
    loop.start()
    sequence = Sequence("r", list(PROMPT), len(PROMPT), None, SamplingParams(max_tokens=4))
    loop.submit(sequence, lambda event: ended.set() if isinstance(event, Ended) else None)
    assert ended.wait(30)
    wait_until(lambda: loop.progress is None, "the step thread to rest")
    loop.stop()
    steps = [count for count in seen if count is not None]
    assert len(steps) == len(seen) == 4
    assert all(after - before > model.spec.num_layers for before, after in pairwise(steps))


class Hungry(Decoder):
    """Finds no memory for steps of more rows than `most_rows`."""

    def __init__(self, own: Decoder, most_rows: int) -> None:
        super().__init__(own.spec, own.weights, own.ops, own.kv, own.shards)
        self.most_rows = most_rows

    @override
    def forward(self, batch: Batch, lora: LoraBackend, plan: StepPlan | None, *, cut: int = 0) -> Tensor:
        if batch.num_rows > self.most_rows:
            torch.empty(1 << 62, dtype=torch.uint8)
        return super().forward(batch, lora, plan, cut=cut)


def test_a_step_without_memory_ends_the_request_that_asked_for_most_and_no_other(
    loaded: Loaded, lora: PlainLora
) -> None:
    model, largest, prompts = loaded("llama"), list(range(3, 15)), [PROMPT, PROMPT[:4]]
    expected = [alone(loaded, prompt, max_tokens=6) for prompt in prompts]
    engine = TestEngine(replace(model, decoder=Hungry(model.decoder, 11)), lora, limits=LIMITS)
    victim, *others = [engine.ask(prompt, max_tokens=6) for prompt in (largest, *prompts)]
    engine.run()
    assert isinstance(victim.failed.error, Overloaded)
    assert "no memory for 12 tokens" in victim.failed.error.message
    assert [heard.tokens for heard in others] == expected


def test_an_error_that_is_not_of_memory_ends_the_thread(loaded: Loaded, lora: PlainLora) -> None:
    model = loaded("llama")
    engine = TestEngine(replace(model, decoder=Broken(model.decoder, 0)), lora, limits=LIMITS)
    engine.ask(PROMPT)
    with pytest.raises(RuntimeError, match="wrong shape"):
        engine.turn()


class Broken(Hungry):
    """Has a fault."""

    @override
    def forward(self, batch: Batch, lora: LoraBackend, plan: StepPlan | None, *, cut: int = 0) -> Tensor:
        raise RuntimeError("wrong shape")
