"""The scheduler alone: no model, leases by hand, a step is a list of rows."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from typing_extensions import override

from infinilora.engine.sched.blocks import BlockPool
from infinilora.engine.sched.scheduler import LeaseState, Limits, Plan, Rows, Scheduler
from infinilora.engine.sequence import Phase, SamplingParams, Sequence
from infinilora.protocol.ids import Digest, digest_of

ALPHA, BETA, GAMMA = (digest_of(name) for name in (b"alpha", b"beta", b"gamma"))


class HandLeases:
    """Leases whose states the test sets; READY unless set."""

    def __init__(self) -> None:
        self.holders: Counter[Digest] = Counter()
        self.states: dict[Digest, LeaseState] = {}

    def want(self, digest: Digest) -> None:
        self.holders[digest] += 1

    def drop(self, digest: Digest) -> None:
        assert self.holders[digest] > 0
        self.holders[digest] -= 1

    def state(self, digest: Digest) -> LeaseState:
        return self.states.get(digest, LeaseState.READY)


class Bench:
    """A scheduler, its leases, and `step`: schedule, complete all rows, append a token where one is due.

    Rows of an adapter that loads are complete when it is READY; `parked` are those on their way.
    """

    def __init__(
        self, *, blocks: int = 64, size: int = 4, running: int = 8, tokens: int = 16, bypass: int = 1000
    ) -> None:
        self.leases = HandLeases()
        self.pool = BlockPool(blocks, size)
        self.scheduler = Scheduler(Limits(running, tokens, bypass, max_parked=2), self.pool, self.leases)
        self.parked: list[list[Rows]] = []

    def add(
        self, prompt: int | list[int], *, digest: Digest | None = None, max_tokens: int = 4, asks: bool = False
    ) -> Sequence:
        """`asks`: its lease was asked for before."""
        tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
        params = SamplingParams(max_tokens=max_tokens)
        sequence = Sequence(f"s{len(tokens)}", list(tokens), len(tokens), digest, params)
        if asks:
            self.scheduler.ask(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Plan:
        plan = self.scheduler.schedule()
        assert sum(r.count for r in plan.rows) <= self.scheduler.limits.step_tokens
        assert sum(r.count for r in plan.loading) <= self.scheduler.limits.step_tokens
        assert not any(r.sequence.is_parked for r in plan.rows)
        self._complete(plan.rows)
        self._pass_through(plan.loading)
        self.scheduler.check()
        return plan

    def _complete(self, rows: list[Rows]) -> None:
        for each in rows:
            assert each.sequence.phase is Phase.RUNNING
            self.scheduler.complete(each)
            if each.reaches_end:
                each.sequence.tokens.append(7)
                if each.sequence.num_produced >= each.sequence.params.max_tokens:
                    self.scheduler.remove(each.sequence)

    def _pass_through(self, planned: list[Rows]) -> None:
        """What is through is complete; where a sequence has left, the pass is given up."""
        still = []
        for rows in [*self.parked, planned] if planned else self.parked:
            is_whole = all(r.sequence.is_parked for r in rows)
            is_through = all(self.scheduler._state(r.sequence) is LeaseState.READY for r in rows)
            if is_whole and not is_through:
                still.append(rows)
                continue
            self.scheduler.unpark(r.sequence for r in rows)
            if is_whole:
                self._complete(rows)
        self.parked = still

    def finish(self, max_steps: int = 500) -> int:
        for steps in range(max_steps):
            if not (self.scheduler.running or self.scheduler.waiting):
                self.scheduler.check_idle()
                assert not any(self.leases.holders.values())
                return steps
            self.step()
        raise AssertionError("sequences starve")


def rows(plan: Plan) -> list[tuple[int, int, int]]:
    return rows_of(plan.rows)


def rows_of(found: list[Rows]) -> list[tuple[int, int, int]]:
    return [(r.sequence.num_prompt, r.start, r.count) for r in found]


def test_beside_decoding_rows_a_prompt_gets_what_their_pace_leaves_room_for() -> None:
    bench = Bench(blocks=200, tokens=100)
    bench.scheduler = Scheduler(Limits(8, 100, tpot_s=0.1, min_step_tokens=5), bench.pool, bench.leases)
    first = bench.add(90, max_tokens=50)
    assert rows(bench.step()) == [(90, 0, 90)], "nobody decodes yet"
    for count in (1, 11) * 20:
        bench.scheduler.observe(count, 0.05 + count * 0.002)
    bench.add(list(range(1000, 1120)))
    assert rows(bench.step()) == [(90, 90, 1), (120, 0, 24)], "1 + (0.1 - 0.052) / 0.002"
    for _ in range(200):
        bench.scheduler.observe(11, 1.0)
    assert rows(bench.step()) == [(90, 91, 1), (120, 24, 5)], "and min_step_tokens however slow steps are"
    bench.scheduler.remove(first)
    assert rows(bench.step()) == [(120, 29, 91)]


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    bench = Bench(tokens=16)
    bench.add(40)
    assert [rows(bench.step()) for _ in range(4)] == [[(40, 0, 16)], [(40, 16, 16)], [(40, 32, 8)], [(40, 40, 1)]]


def test_decoding_goes_before_a_long_prompt() -> None:
    bench = Bench(tokens=16)
    bench.add(3, max_tokens=9)
    bench.step()
    bench.add(40)
    assert rows(bench.step()) == [(3, 3, 1), (40, 0, 15)]
    assert rows(bench.step()) == [(3, 4, 1), (40, 15, 15)]


def test_a_cold_adapter_delays_nobody_and_goes_first_when_it_is_ready() -> None:
    bench = Bench(tokens=16)
    bench.leases.states[ALPHA] = LeaseState.LOADING
    bench.add(5, digest=ALPHA)
    bench.add(6, digest=BETA)
    bench.add(7)
    assert [r[0] for r in rows(bench.step())] == [6, 7]

    bench.leases.states[ALPHA] = LeaseState.READY
    bench.add(8)
    assert [r[0] for r in rows(bench.step())] == [6, 7, 5, 8]


def test_a_lease_is_asked_for_at_once_and_given_up_with_the_last_holder() -> None:
    bench = Bench()
    first, second = bench.add(3, digest=ALPHA), bench.add(3, digest=ALPHA)
    assert bench.leases.holders[ALPHA] == 2
    bench.step()
    bench.scheduler.remove(first)
    bench.scheduler.remove(second)
    assert bench.leases.holders[ALPHA] == 0
    bench.scheduler.check_idle()


def test_nobody_with_a_ready_adapter_is_passed_for_want_of_blocks() -> None:
    bench = Bench(blocks=8, size=4, tokens=64)
    bench.add(20, max_tokens=2)
    bench.step()
    big, small = bench.add(list(range(100, 124))), bench.add(3)
    assert [r[0] for r in rows(bench.step())] == [20]
    assert big.phase is Phase.WAITING
    assert small.phase is Phase.WAITING
    bench.finish()


def test_a_failed_lease_is_reported_and_blocks_nobody() -> None:
    bench = Bench()
    bench.leases.states[ALPHA] = LeaseState.FAILED
    broken = bench.add(5, digest=ALPHA)
    bench.add(6)
    plan = bench.step()
    assert plan.failed == [broken]
    assert [r[0] for r in rows(plan)] == [6]


def test_the_youngest_is_preempted_and_returns_to_its_old_place() -> None:
    bench = Bench(blocks=6, size=4, tokens=64)
    old, young = bench.add(8, max_tokens=12), bench.add(7, max_tokens=9)
    bench.step()
    late = bench.add(2)
    preempted: list[Sequence] = []
    for _ in range(12):
        preempted += bench.step().preempted
    assert set(preempted) == {young}
    assert old.num_preemptions == 0
    assert bench.scheduler.waiting.index(young) == 0 if young in bench.scheduler.waiting else True
    assert late.num_preemptions == 0 or late in preempted
    bench.finish()


def test_a_preempted_sequence_gives_its_lease_up_and_asks_again() -> None:
    bench = Bench(blocks=5, size=4, tokens=64)
    bench.add(7, max_tokens=8)
    young = bench.add(7, digest=ALPHA, max_tokens=8)
    for _ in range(8):
        if bench.step().preempted:
            break
    assert young.num_preemptions == 1
    assert young.num_computed == 0
    assert bench.leases.holders[ALPHA] == 1
    bench.finish()


def test_a_sequence_that_lost_its_adapter_pauses_and_is_the_first_to_be_preempted() -> None:
    bench = Bench(blocks=6, size=4, tokens=64)
    paused = bench.add(7, digest=ALPHA, max_tokens=20)
    bench.add(7, max_tokens=12)
    bench.step()
    bench.leases.states[ALPHA] = LeaseState.LOADING
    plan = bench.step()
    assert [r.sequence.digest for r in plan.rows] == [None]
    assert paused.phase is Phase.RUNNING
    while not plan.preempted:
        plan = bench.step()
    assert plan.preempted == [paused]


def test_a_shared_prefix_is_computed_once_for_each_digest() -> None:
    bench = Bench(tokens=64)
    bench.add(list(range(17)), digest=ALPHA)
    bench.finish()
    same = bench.add(list(range(17)), digest=ALPHA)
    other = bench.add(list(range(17)), digest=BETA)
    base = bench.add(list(range(17)))
    bench.step()
    assert (same.num_cached, other.num_cached, base.num_cached) == (16, 0, 0)


def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token() -> None:
    bench = Bench(tokens=64)
    bench.add(16)
    bench.finish()
    again = bench.add(16)
    assert rows(bench.step()) == [(16, 12, 4)]
    assert again.num_cached == 12


def test_prompt_logprobs_write_the_cache_and_do_not_read_it() -> None:
    bench = Bench(tokens=64)
    for _ in range(2):
        scored = Sequence("scored", list(range(9)), 9, None, SamplingParams(max_tokens=1, prompt_logprobs=0))
        bench.scheduler.add(scored)
        assert rows(bench.step()) == [(9, 0, 9)]
    reader = bench.add(9)
    bench.step()
    assert reader.num_cached == 8


def test_rows_that_were_not_completed_are_scheduled_again_and_never_cached() -> None:
    bench = Bench(tokens=64)
    bench.add(9)
    first = bench.scheduler.schedule()
    second = bench.scheduler.schedule()
    assert rows(first) == rows(second) == [(9, 0, 9)]
    other = bench.add(9)
    bench.scheduler.schedule()
    assert other.num_cached == 0


def test_an_aged_sequence_without_a_slot_is_passed_no_more_than_the_bound() -> None:
    bench = Bench(blocks=256, running=4, tokens=64, bypass=10)
    bench.leases.states[ALPHA] = LeaseState.NO_SLOT
    starved = bench.add(5, digest=ALPHA)
    passed = 0
    for _ in range(200):
        bench.add(4, digest=BETA, max_tokens=2)
        bench.add(4, max_tokens=2)
        before = starved.times_bypassed
        bench.step()
        passed += starved.times_bypassed - before
        if not bench.leases.holders[BETA]:
            # Nobody holds BETA any more: its slot goes to ALPHA.
            bench.leases.states[ALPHA] = LeaseState.READY
            bench.leases.states[BETA] = LeaseState.NO_SLOT
            break
    assert 10 <= passed <= 10 + 4
    bench.step()
    assert starved.phase is Phase.RUNNING
    bench.leases.states.clear()
    bench.finish()


def test_a_slow_load_builds_no_fence() -> None:
    bench = Bench(blocks=256, running=4, tokens=64, bypass=3)
    bench.leases.states[ALPHA] = LeaseState.LOADING
    bench.add(5, digest=ALPHA)
    for _ in range(20):
        other = bench.add(4, digest=BETA, max_tokens=1)
        bench.step()
        assert other.phase is Phase.FINISHED


def test_rows_of_an_adapter_that_loads_are_planned_apart_one_adapter_at_a_time() -> None:
    bench = Bench(tokens=16)
    for digest in (ALPHA, BETA, GAMMA):
        bench.leases.states[digest] = LeaseState.ADMISSIBLE
    first, second, other, third = (bench.add(5, digest=d) for d in (ALPHA, ALPHA, BETA, GAMMA))
    base = bench.add(6)

    plan = bench.step()
    assert [r.sequence for r in plan.rows] == [base]
    assert [r.sequence for r in plan.loading] == [first, second]
    plan = bench.step()
    assert [r.sequence for r in plan.loading] == [other]
    late = bench.add(5, digest=ALPHA)
    assert bench.step().loading == [], "two adapters are parked, and the third waits"

    bench.leases.states[ALPHA] = LeaseState.READY
    assert [r.sequence for r in bench.step().rows] == [base, late], "those that are parked wait for their own pass"
    assert [first.num_computed, second.num_computed] == [5, 5]
    assert [r.sequence for r in bench.step().loading] == [third]
    bench.leases.states.clear()
    bench.finish()


def test_a_pass_has_at_most_the_tokens_of_a_step_and_the_rest_of_a_prompt_comes_when_all_layers_are_there() -> None:
    bench = Bench(tokens=16)
    bench.leases.states[ALPHA] = LeaseState.ADMISSIBLE
    long = bench.add(20, digest=ALPHA)
    short = bench.add(3, digest=ALPHA)
    assert rows_of(bench.step().loading) == [(20, 0, 16)]
    assert bench.step().loading == []
    assert (long.is_parked, short.phase) == (True, Phase.WAITING)
    bench.leases.states[ALPHA] = LeaseState.READY
    bench.step()
    assert (long.is_parked, long.num_computed) == (False, 16)
    bench.finish()


def test_a_parked_sequence_that_is_preempted_is_parked_no_more_and_keeps_no_block() -> None:
    bench = Bench(blocks=6, size=4, tokens=64)
    bench.leases.states[ALPHA] = LeaseState.ADMISSIBLE
    old = bench.add(7, max_tokens=12)
    parked = bench.add(7, digest=ALPHA, max_tokens=4)
    plan = bench.step()
    assert parked.is_parked
    bench.leases.states[ALPHA] = LeaseState.LOADING
    while not plan.preempted:
        plan = bench.step()
    assert plan.preempted == [parked]
    assert (parked.is_parked, parked.blocks, bench.parked) == (False, [], [])
    assert old.phase is Phase.RUNNING
    bench.leases.states.clear()
    bench.finish()


def test_degrading_keeps_the_place_and_forgets_the_adapter() -> None:
    bench = Bench()
    bench.leases.states[ALPHA] = LeaseState.FAILED
    sequence = bench.add(5, digest=ALPHA)
    bench.scheduler.degrade(sequence)
    assert (sequence.digest, sequence.degraded, bench.leases.holders[ALPHA]) == (None, True, 0)
    assert [r.sequence for r in bench.step().rows] == [sequence]


def test_degrading_after_the_first_token_is_a_fault() -> None:
    bench = Bench()
    sequence = bench.add(5, digest=ALPHA)
    bench.step()
    with pytest.raises(AssertionError, match="cannot degrade"):
        bench.scheduler.degrade(sequence)


class SchedulerMachine(RuleBasedStateMachine):
    """Anything may happen between two steps; every sequence must still end, and nothing may leak."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(blocks=10, size=2, running=4, tokens=5, bypass=6)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        digest=st.sampled_from([None, ALPHA, BETA, GAMMA]),
        max_tokens=st.integers(1, 6),
        asks=st.booleans(),
    )
    def arrive(self, prompt: list[int], digest: Digest | None, max_tokens: int, *, asks: bool) -> None:
        self.bench.add(prompt, digest=digest, max_tokens=max_tokens, asks=asks)

    @rule(digest=st.sampled_from([ALPHA, BETA, GAMMA]), state=st.sampled_from(list(LeaseState)[:4]))
    def lease_moves(self, digest: Digest, state: LeaseState) -> None:
        self.bench.leases.states[digest] = state

    @precondition(lambda self: self.bench.scheduler.running or self.bench.scheduler.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        scheduler = self.bench.scheduler
        scheduler.remove(data.draw(st.sampled_from(scheduler.running + scheduler.waiting)))

    @rule(data=st.data())
    def lose_a_step(self, data: st.DataObject) -> None:
        """Rows are scheduled, none completes."""
        plan = self.bench.scheduler.schedule()
        self.bench.scheduler.unpark(rows.sequence for rows in plan.loading)

    @rule()
    def step(self) -> None:
        self.bench.step()

    @invariant()
    def agrees(self) -> None:
        self.bench.scheduler.check()
        running = self.bench.scheduler.running
        held = Counter(s.digest for s in running + self.bench.scheduler.waiting if s.holds_lease)
        assert +self.bench.leases.holders == held

    @override
    def teardown(self) -> None:
        self.bench.leases.states.clear()
        self.bench.finish()


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
