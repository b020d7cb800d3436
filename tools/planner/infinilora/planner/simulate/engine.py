"""An engine in virtual time: the real scheduler plans its steps, the costs say how long they take.

Steps that only decode are not planned one by one: as long as nobody waits for a change and blocks are free, the plan of
the next step is that of the last. They run as a *stretch*, which ends with the first sequence that finishes, or at the
step boundary after something has happened:

    wake -> finish what ended, hear who came -> something changed? -- yes --> schedule, one step -----> wake
                                                       |
                                                       no --> a stretch of k decoding steps ----------> wake
                                                                                        (earlier, if disturbed)

Who comes during a step is heard after it, as in the engine; its lease is asked for at once.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple, Protocol, cast

from infinilora.engine.sched.blocks import BlockPool
from infinilora.engine.sched.scheduler import LeaseState, Limits, Rows, Scheduler
from infinilora.engine.sequence import Phase, Sequence
from infinilora.planner.simulate.sequence import CountedSequence, StepClock
from infinilora.planner.simulate.timeline import Timeline
from infinilora.protocol.ids import Digest


class EngineSize(NamedTuple):
    """What an engine is given: the scheduler's limits, and blocks for keys and values."""

    limits: Limits
    num_blocks: int
    block_tokens: int = 16


class Work(NamedTuple):
    """A step to be priced: tokens computed, tokens that come of it, tokens of context, and the adapters."""

    rows: int
    tokens: int
    context: int
    digests: Mapping[Digest, int]
    """With the tokens computed of each."""
    is_joined: bool = False
    """Whether there are prompts and others that decode."""


class StepTime(Protocol):
    """How long steps take. `is_over`: the engine has nothing to do now."""

    def step_s(self, engine: str, work: Work) -> float: ...

    def context_s(self) -> float: ...

    def is_over(self, engine: str) -> None: ...


class EngineLeases:
    """The scheduler's view: how often each digest is wanted here, and what the pool said last."""

    def __init__(self, ask: Callable[[Digest], None], give_up: Callable[[Digest], None]) -> None:
        self.views: dict[Digest, LeaseState] = {}
        self.wanted: Counter[Digest] = Counter()
        self._ask, self._give_up = ask, give_up

    def want(self, digest: Digest) -> None:
        self.wanted[digest] += 1
        if self.wanted[digest] == 1:
            self._ask(digest)

    def drop(self, digest: Digest) -> None:
        self.wanted[digest] -= 1
        if not self.wanted[digest]:
            del self.wanted[digest]
            self.views.pop(digest, None)
            self._give_up(digest)

    def state(self, digest: Digest) -> LeaseState:
        return self.views.get(digest, LeaseState.NO_SLOT)


class Stretch(NamedTuple):
    """Decoding steps in one piece: step j (from 0) takes first_s + j * more_s."""

    start_s: float
    steps: int
    first_s: float
    more_s: float

    def after_s(self, steps: int) -> float:
        """When so many are done."""
        return self.start_s + steps * self.first_s + self.more_s * (steps * (steps - 1) / 2)

    def steps_at(self, when_s: float) -> int:
        """Those that have begun by then, one at least."""
        passed = max(when_s - self.start_s, 0.0)
        if self.more_s:
            b = self.first_s - self.more_s / 2
            guess = (math.sqrt(b * b + 2 * self.more_s * passed) - b) / self.more_s
        else:
            guess = passed / self.first_s
        steps = min(max(int(guess), 1), self.steps)
        while steps < self.steps and self.after_s(steps) < when_s:
            steps += 1
        while steps > 1 and self.after_s(steps - 1) >= when_s:
            steps -= 1
        return steps


class SimEngine:
    """One engine. Between events it is in a step or a stretch that ends at its wake, or idle."""

    def __init__(
        self,
        key: str,
        size: EngineSize,
        timeline: Timeline,
        cost: StepTime,
        leases: EngineLeases,
        *,
        on_end: Callable[[CountedSequence, bool], None],
        can_stretch: bool = True,
    ) -> None:
        self.key = key
        self.leases = leases
        self.scheduler = Scheduler(size.limits, BlockPool(size.num_blocks, size.block_tokens), leases)
        self.num_steps = self.num_preempted = 0
        self._size, self._timeline, self._cost = size, timeline, cost
        self._on_end, self._can_stretch = on_end, can_stretch
        self._clock = StepClock()
        self._ends: list[tuple[int, int, CountedSequence]] = []
        self._numbers = count()
        self._inbox: list[CountedSequence] = []
        self._parked: list[list[Rows]] = []
        self._through: list[list[Rows]] = []
        self._stretch: Stretch | None = None
        self._rows: list[Rows] = []
        self._is_busy = self._is_changed = False
        self._wake_number = 0
        self._uncovered = 0  # steps of stretches since blocks were last taken

    # What happens to it ----------------------------------------------------------------------------

    def add(self, sequence: CountedSequence) -> None:
        self.scheduler.ask(sequence)
        self._inbox.append(sequence)
        self.disturb()

    def disturb(self) -> None:
        """Something has changed that the next plan may depend on."""
        self._is_changed = True
        stretch, now = self._stretch, self._timeline.now
        if stretch is not None:
            steps = stretch.steps_at(now)
            if steps < stretch.steps:
                self._stretch = stretch._replace(steps=steps)
                self._wake_at(stretch.after_s(steps))
        elif not self._is_busy:
            self._is_busy = True
            self._wake_at(now)

    def die(self) -> list[CountedSequence]:
        """Everything it had, with what each has produced by now; steps under way are lost."""
        if self._stretch is not None:
            done = self._stretch.steps_at(self._timeline.now)
            self._clock.steps += done if self._stretch.after_s(done) <= self._timeline.now else done - 1
        self._hear()
        left = self._counted(self.scheduler.running) + self._counted(self.scheduler.waiting)
        for sequence in left:
            sequence.freeze()
            self.scheduler.remove(sequence)
        self._stretch, self._rows, self._ends, self._parked, self._through = None, [], [], [], []
        self._is_busy = self._is_changed = False
        self._wake_number += 1
        self._cost.is_over(self.key)
        return left

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self._inbox)

    @property
    def kv_free(self) -> float:
        """As if blocks had been taken step by step: a stretch takes them when it is over."""
        pool, stretch = self.scheduler.pool, self._stretch
        begun = stretch.steps_at(self._timeline.now) - 1 if stretch else 0
        owed = sum(max(pool.blocks_for(s.num_known + begun) - len(s.blocks), 0) for s in self.scheduler.running)
        return (pool.num_free - owed) / pool.num_blocks

    # What it does ----------------------------------------------------------------------------------

    def _wake_at(self, when_s: float) -> None:
        self._wake_number += 1
        number = self._wake_number
        self._timeline.at(when_s, lambda: self._wake(number))

    def _wake(self, number: int) -> None:
        if number != self._wake_number:
            return
        if self._stretch is not None:
            self._advance(self._stretch.steps)
            self._uncovered += self._stretch.steps
            self._stretch = None
        elif self._rows:
            self._settle(self._rows)
            self._rows = []
        self._settle_through()
        self._hear()
        if not self._begin_stretch() and not self._begin_step():
            self._is_busy = False
            self._cost.is_over(self.key)

    def _hear(self) -> None:
        """Who came since the last step."""
        arrived, self._inbox = self._inbox, []
        for sequence in arrived:
            self.scheduler.add(sequence)

    def _advance(self, steps: int) -> None:
        """All that decode have so many tokens more; end those that have all."""
        self._clock.steps += steps
        self.num_steps += steps
        while self._ends and self._ends[0][0] <= self._clock.steps:
            _, _, sequence = heappop(self._ends)
            if sequence.is_decoding and sequence.num_left == 0:
                self._end(sequence, is_done=True)

    def _end(self, sequence: CountedSequence, *, is_done: bool) -> None:
        sequence.freeze()
        self._on_end(sequence, is_done)
        self.scheduler.remove(sequence)
        self._is_changed |= bool(self.scheduler.waiting)

    # A stretch -------------------------------------------------------------------------------------

    def _begin_stretch(self) -> bool:
        running = self.scheduler.running
        if self._is_changed or not running or not self._can_stretch or len(running) > self._size.limits.step_tokens:
            return False
        if self._clock.num_decoding < len(running):
            return False
        per_sequence = self.scheduler.pool.num_free // len(running) - 1
        steps = min(self._ends[0][0] - self._clock.steps, per_sequence * self._size.block_tokens - self._uncovered)
        if steps < 1:
            return False
        work = self._work_of([], num_decoding=len(running))
        more_s = self._cost.context_s() * len(running)
        self._stretch = Stretch(self._timeline.now, steps, self._cost.step_s(self.key, work), more_s)
        self._wake_at(self._stretch.after_s(steps))
        return True

    # A step ----------------------------------------------------------------------------------------

    def _begin_step(self) -> bool:
        self._is_changed = False
        self._uncovered = 0
        plan = self.scheduler.schedule()
        self.num_preempted += len(plan.preempted)
        for failed in self._counted(plan.failed):
            self._end(failed, is_done=False)
        rows = [r for r in plan.rows if r.sequence.phase is Phase.RUNNING]
        seconds = 0.0
        if plan.loading:
            seconds += self._begin_pass(plan.loading)
        if rows:
            step_s = self._cost.step_s(self.key, self._work_of_step(rows))
            self.scheduler.observe(sum(r.count for r in rows), step_s)
            seconds += step_s
        if not rows and not plan.loading:
            return self._begin_step() if plan.preempted or plan.failed else False
        self._rows = rows
        self._wake_at(self._timeline.now + seconds)
        self._is_changed |= not rows
        return True

    def _settle(self, rows: list[Rows]) -> None:
        """A planned step is done. Who decodes and was not in it stands still."""
        others = self._not_decoding(rows)
        if len(rows) - len(others) < self._clock.num_decoding:
            taken = {id(r.sequence) for r in rows}
            for sequence in self._counted(self.scheduler.running):
                if id(sequence) not in taken:
                    sequence.freeze()
        self._advance(1)
        for item in others:
            self._settle_rows(item)
        self._is_changed |= bool(others and self.scheduler.waiting)

    def _settle_rows(self, item: Rows) -> None:
        sequence = cast("CountedSequence", item.sequence)
        if sequence.phase is not Phase.RUNNING:
            return
        sequence.num_computed = item.start + item.count
        if sequence.num_missing:
            self._is_changed = True
            return
        if sequence.first_s is None:
            sequence.first_s = self._timeline.now
        sequence.append()
        if sequence.num_left <= 0:
            self._end(sequence, is_done=True)
            return
        sequence.decode(self._clock)
        heappush(self._ends, (self._clock.steps + sequence.num_left, next(self._numbers), sequence))

    # Rows of an adapter that still loads -----------------------------------------------------------

    def _begin_pass(self, rows: list[Rows]) -> float:
        """Its seconds are paid for now; it ends once the adapter is there as a whole, or is given up."""
        seconds = self._cost.step_s(self.key, self._work_of(rows))
        done_s = self._timeline.now + seconds
        self._timeline.at(done_s, lambda: self._end_pass(rows))
        return seconds

    def _end_pass(self, rows: list[Rows]) -> None:
        """Through, if all layers are there; parked on while they arrive; else given up: planned anew."""
        there = [r for r in rows if r.sequence.phase is Phase.RUNNING and r.sequence.is_parked]
        if not there:
            return
        state = self.leases.state(there[0].sequence.digest or Digest(""))
        if state is LeaseState.ADMISSIBLE:
            self._parked.append(there)
            return
        if state is LeaseState.READY:
            self._through.append(there)
        else:
            self.scheduler.unpark(r.sequence for r in there)
        self.disturb()

    def _settle_through(self) -> None:
        """Between two steps: these decode with the others from now on."""
        passes, self._through = self._through, []
        for rows in passes:
            there = [r for r in rows if r.sequence.is_parked]
            self.scheduler.unpark(r.sequence for r in there)
            for item in there:
                self._settle_rows(item)

    def heard(self, digest: Digest) -> None:
        """The pool has said something new of this digest."""
        ended = [rows for rows in self._parked if rows[0].sequence.digest == digest]
        self._parked = [rows for rows in self._parked if rows[0].sequence.digest != digest]
        for rows in ended:
            self._end_pass(rows)
        self.disturb()

    def _work_of_step(self, rows: list[Rows]) -> Work:
        """Where all that decode take part, the clock knows what they are together."""
        others = self._not_decoding(rows)
        num_decoding = len(rows) - len(others)
        takes_all = num_decoding >= self._clock.num_decoding
        work = self._work_of(others, num_decoding=num_decoding) if takes_all else self._work_of(rows)
        return work._replace(is_joined=0 < num_decoding < len(rows))

    def _work_of(self, rows: list[Rows], *, num_decoding: int = 0) -> Work:
        """Of these, and of all that decode by the clock where there are any of those."""
        total = tokens = num_decoding
        context = self._clock.num_known if num_decoding else 0
        digests = dict(self._clock.digests) if num_decoding else {}
        for item in rows:
            digest = item.sequence.digest
            total += item.count
            tokens += item.reaches_end
            context += item.sequence.num_known
            if digest is not None:
                digests[digest] = digests.get(digest, 0) + item.count
        return Work(total, tokens, context, digests)

    @staticmethod
    def _not_decoding(rows: list[Rows]) -> list[Rows]:
        of_counted: Any = rows  # all sequences are: see `_counted`
        return [r for r in of_counted if not r.sequence.is_decoding]

    @staticmethod
    def _counted(sequences: Iterable[Sequence]) -> "list[CountedSequence]":
        """All sequences of a simulated engine are counted ones; its scheduler does not know."""
        return cast("list[CountedSequence]", list(sequences))
