"""Who goes first, and how long anybody can be passed: by table, and on the scheduler under random arrivals."""

from collections.abc import Callable
from typing import NamedTuple, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinilora.engine.sched.blocks import BlockPool
from infinilora.engine.sched.scheduler import LeaseState, Limits, Scheduler
from infinilora.engine.sched.urgency import ALLOWANCE_S, QUEUE_SHARE, SOON_S, due_s
from infinilora.engine.sequence import Phase, SamplingParams, Sequence
from infinilora.protocol.ids import Digest, SloClass

CLASSES: tuple[SloClass, ...] = get_args(SloClass)


def test_every_class_has_an_allowance_and_a_share_of_the_queue() -> None:
    assert set(ALLOWANCE_S) == set(QUEUE_SHARE) == set(CLASSES)
    assert ALLOWANCE_S["interactive"] < ALLOWANCE_S["standard"] < ALLOWANCE_S["batch"]


@pytest.mark.parametrize(
    ("slo_class", "deadline_s", "is_continued", "wanted"),
    [
        ("interactive", None, False, 100.25),
        ("standard", None, False, 102.0),
        ("batch", None, False, 160.0),
        ("batch", 130.0, False, 130.0),
        ("batch", 100.1, False, 100.25),
        ("standard", 700.0, False, 102.0),
        ("batch", None, True, 100.25),
    ],
)
def test_when_a_sequence_is_due(
    slo_class: SloClass, deadline_s: float | None, is_continued: bool, wanted: float
) -> None:
    assert due_s(slo_class, 100.0, deadline_s, is_continued=is_continued) == wanted


class NoLeases:
    """Every adapter is there."""

    def want(self, digest: Digest) -> None: ...

    def drop(self, digest: Digest) -> None: ...

    def state(self, digest: Digest) -> LeaseState:
        del digest
        return LeaseState.READY


class Arrival(NamedTuple):
    """A request of the property: seconds after the one before, class, sizes, and seconds until its deadline."""

    after_s: float
    slo_class: SloClass
    prompt: int
    max_tokens: int
    deadline_s: float | None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.floats(0, 5),
        st.sampled_from(CLASSES),
        st.integers(1, 9),
        st.integers(1, 6),
        st.none() | st.floats(0, 100),
    ),
    min_size=2,
    max_size=30,
)


class Bench:
    """A scheduler of two places whose steps take a second; notes when each sequence came."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(Limits(max_running=2, step_tokens=6), BlockPool(12, 2), NoLeases())
        self.now_s = 0.0
        self.arrived_s: dict[Sequence, float] = {}

    def add(self, arrival: Arrival) -> None:
        tokens = [len(self.arrived_s)] * arrival.prompt
        params = SamplingParams(max_tokens=arrival.max_tokens)
        sequence = Sequence("s", tokens, len(tokens), None, params, slo_class=arrival.slo_class)
        deadline_s = None if arrival.deadline_s is None else self.now_s + arrival.deadline_s
        sequence.due_s = due_s(arrival.slo_class, self.now_s, deadline_s)
        self.arrived_s[sequence] = self.now_s
        self.scheduler.add(sequence)

    def step(self, check: Callable[[Sequence, Sequence], None]) -> None:
        before = list(self.scheduler.waiting)
        plan = self.scheduler.schedule()
        for taken in [s for s in before if s.phase is Phase.RUNNING]:
            for left in [s for s in before if s.phase is Phase.WAITING]:
                check(taken, left)
        for rows in plan.rows:
            self.scheduler.complete(rows)
            if rows.reaches_end:
                rows.sequence.tokens.append(1)
                if rows.sequence.num_produced >= rows.sequence.params.max_tokens:
                    self.scheduler.remove(rows.sequence)
        self.scheduler.check()
        self.now_s += 1.0


@given(ARRIVALS)
@settings(max_examples=150, deadline=None)
def test_nobody_is_passed_by_one_that_came_later_than_the_bound_and_everybody_ends(arrivals: list[Arrival]) -> None:
    bench = Bench()

    def check(taken: Sequence, left: Sequence) -> None:
        later_s = bench.arrived_s[taken] - bench.arrived_s[left]
        assert later_s <= ALLOWANCE_S[left.slo_class] - SOON_S
        assert taken.due_s <= left.due_s

    for arrival in arrivals:
        until_s = bench.now_s + arrival.after_s
        while bench.now_s + 1.0 <= until_s:
            bench.step(check)
        bench.add(arrival)
    for _ in range(400):
        if not (bench.scheduler.running or bench.scheduler.waiting):
            break
        bench.step(check)
    bench.scheduler.check_idle()
    assert all(sequence.phase is Phase.FINISHED for sequence in bench.arrived_s)


def test_an_interactive_request_goes_before_batch_that_waits_and_batch_is_the_first_to_be_put_back() -> None:
    bench = Bench()
    sizes: dict[SloClass, int] = {"batch": 4, "standard": 5, "interactive": 6}
    for slo_class, prompt in sizes.items():
        bench.add(Arrival(0, slo_class, prompt, 1, None))
    assert [s.slo_class for s in bench.scheduler.waiting] == ["interactive", "standard", "batch"]
    batch = bench.scheduler.waiting[-1]
    bench.now_s = 59.8
    bench.add(Arrival(0, "interactive", 3, 1, None))
    assert bench.scheduler.waiting[-2] is batch, "it has aged past all that come now"


def test_the_last_due_is_preempted_and_comes_back_to_its_place() -> None:
    scheduler = Scheduler(Limits(max_running=8, step_tokens=64), BlockPool(6, 4), NoLeases())
    batch = Sequence("batch", list(range(7)), 7, None, SamplingParams(max_tokens=9), due_s=60.0)
    late = Sequence("late", list(range(50, 58)), 8, None, SamplingParams(max_tokens=12), due_s=1.0)
    scheduler.add(batch)
    scheduler.add(late)
    preempted: list[Sequence] = []
    for _ in range(12):
        plan = scheduler.schedule()
        preempted += plan.preempted
        for rows in plan.rows:
            scheduler.complete(rows)
            rows.sequence.tokens.append(7)
    assert batch in preempted
    assert late not in preempted
