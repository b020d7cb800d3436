"""Which tokens run next: one rule without phases. A sequence's computed tokens catch up with its known tokens.

    add -> waiting --(lease ready, blocks free)--> running --> finished
               ^                                     |
               +------------- preempted -------------+        last due first, recomputed later

Each step has a token budget (budget.py). Running sequences that miss one token go first, then the others, then waiting
ones; each in the order in which they are due (urgency.py), then of arrival. Three rules about waiting:

1. A lease comes before blocks. A sequence whose adapter is not resident is passed over and delays nobody.
2. Among those whose adapter is resident nobody passes anybody: the first that finds no blocks ends admission.
3. A sequence without even a slot that was passed `max_bypass` times by sequences with adapters builds a fence:
   adapters behind it give their leases up and wait, so that a slot comes free. Base sequences go on.
   Hence nobody is passed more than `max_bypass` times plus the sequences admitted in that very step.

Rows of an adapter that is only admissible, its first layers being there, are never of a step with others: they are
planned apart (`Plan.loading`), one adapter at a time, and are *parked* in the model where it has no layer yet.

Pure: leases are asked through the `Leases` given, time and memory are nobody's business here.
"""

import itertools
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Protocol

import msgspec

from infinilora.engine.sched.blocks import BlockPool, chain_next, chain_root
from infinilora.engine.sched.budget import BudgetLimits, StepCost, step_budget
from infinilora.engine.sequence import Phase, Sequence
from infinilora.protocol.ids import Digest


class LeaseState(Enum):
    """What a sequence may do now. NO_SLOT: nothing is on its way; LOADING: a slot is being filled.

    ADMISSIBLE: it has its first layer, and the others are on their way.
    """

    NO_SLOT = "no slot"
    LOADING = "loading"
    ADMISSIBLE = "admissible"
    READY = "ready"
    FAILED = "failed"


class Leases(Protocol):
    """The engine's holds on adapters, counted by holder."""

    def want(self, digest: Digest) -> None: ...

    def drop(self, digest: Digest) -> None: ...

    def state(self, digest: Digest) -> LeaseState: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Plain numbers that bound a step. With `tpot_s`, its rows follow what that leaves room for: see budget.py."""

    max_running: int
    step_tokens: int
    max_bypass: int = 256
    max_parked: int = 4
    """Adapters that may have rows parked in the model at one time."""
    tpot_s: float = 0.0
    min_step_tokens: int = 64


class Rows(msgspec.Struct, frozen=True):
    """Tokens [start, start + count) of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def reaches_end(self) -> bool:
        """Whether the last known token is computed: then a next one can be sampled."""
        return self.start + self.count == self.sequence.num_known


@dataclass(slots=True)
class Plan:
    """What one call of `schedule` decided."""

    rows: list[Rows] = field(default_factory=list)
    loading: list[Rows] = field(default_factory=list)
    """Rows of one adapter that is still loading, now parked before layer 0: `unpark` them when they are through."""
    preempted: list[Sequence] = field(default_factory=list)
    failed: list[Sequence] = field(default_factory=list)
    """Their lease failed: the owner ends or degrades them."""


class Scheduler:
    """Waiting and running sequences and their blocks. Every sequence added is in exactly one of the lists."""

    def __init__(self, limits: Limits, pool: BlockPool, leases: Leases) -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._leases = leases
        self._budget_limits = BudgetLimits(limits.step_tokens, limits.min_step_tokens, limits.tpot_s)
        self._cost = StepCost()
        self._arrivals = itertools.count(1)

    def ask(self, sequence: Sequence) -> None:
        """Ask for its lease before it is added: from any thread, as far as `Leases` may be asked."""
        self._want(sequence)

    def add(self, sequence: Sequence) -> None:
        """Queue it, and ask for its lease unless that was done."""
        sequence.arrival = next(self._arrivals)
        insort(self.waiting, sequence, key=_rank)
        self._want(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Finished, aborted or failed: blocks, lease and place are free at once. Idempotent."""
        if sequence.phase is Phase.FINISHED:
            return
        (self.running if sequence.phase is Phase.RUNNING else self.waiting).remove(sequence)
        self._give_up(sequence)
        sequence.phase = Phase.FINISHED

    def degrade(self, sequence: Sequence) -> None:
        """Let a sequence without a token go on as base, from nothing, at its old place in the queue."""
        if sequence.phase is Phase.RUNNING:
            self._requeue(sequence)
        self._drop(sequence)
        sequence.degrade()

    def schedule(self) -> Plan:
        plan = Plan()
        budget = self._continue_running(plan)
        if not plan.preempted:
            self._admit(plan, budget)
        return plan

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        if self.limits.tpot_s:
            self._cost = self._cost.after(num_rows, seconds)

    def complete(self, rows: Rows) -> None:
        """These rows were computed: their full blocks can be found from now on. Call before appending a token."""
        sequence = rows.sequence
        if sequence.phase is not Phase.RUNNING:
            return
        sequence.num_computed = rows.start + rows.count
        full = sequence.num_computed // self.pool.block_size
        self._grow_chain(sequence, full)
        for index in range(sequence.num_committed, full):
            self.pool.commit(sequence.blocks[index], sequence.chain[index])
        sequence.num_committed = max(sequence.num_committed, full)

    def unpark(self, sequences: Iterable[Sequence]) -> None:
        """Their rows are through the model, or given up."""
        for sequence in sequences:
            sequence.is_parked = False

    def check(self) -> None:
        """Raise AssertionError unless lists, phases, blocks and the pool agree."""
        self.pool.check()
        held = sum(len(s.blocks) for s in self.running)
        shared = self.pool.num_blocks - self.pool.num_free
        assert shared <= held, f"{shared} blocks are held, sequences know of {held}"
        for s in self.waiting:
            assert s.phase is Phase.WAITING, f"{s.request_id} waits in phase {s.phase}"
            assert not s.blocks, f"{s.request_id} waits and has blocks"
            assert not s.is_parked, f"{s.request_id} waits and is parked in the model"
        for s in self.running:
            assert s.phase is Phase.RUNNING, f"{s.request_id} runs in phase {s.phase}"
            assert s.num_computed <= len(s.blocks) * self.pool.block_size, f"{s.request_id} outgrew its blocks"
            assert s.digest is None or s.holds_lease, f"{s.request_id} runs without a lease"

    def check_idle(self) -> None:
        self.check()
        assert not self.waiting, f"{len(self.waiting)} sequences wait"
        assert not self.running, f"{len(self.running)} sequences run"
        self.pool.check_idle()

    # Running sequences ------------------------------------------------------------------------------

    def _continue_running(self, plan: Plan) -> int:
        """Give running sequences their missing tokens, those that miss one first. The budget left."""
        running = [(sequence, sequence.num_missing) for sequence in sorted(self.running, key=_rank)]
        budget = self._budget([missing for _, missing in running])
        size = self.pool.block_size
        for sequence, missing in self._runnable(running, plan):
            if budget == 0:
                break
            if sequence.phase is not Phase.RUNNING:
                continue
            start = sequence.num_computed
            count = missing if missing < budget else budget
            if start + count <= len(sequence.blocks) * size or self._cover(sequence, count, plan):
                plan.rows.append(Rows(sequence, start, count))
                budget -= count
        return budget

    def _budget(self, missing: list[int]) -> int:
        """Rows of this step, where running sequences miss so many tokens each."""
        if not self.limits.tpot_s:
            return self.limits.step_tokens
        decoding = missing.count(1)
        others = sum(missing) - decoding + sum([s.num_missing for s in self.waiting])
        return step_budget(self._budget_limits, self._cost, decoding=decoding, missing=others)

    def _runnable(self, running: list[tuple[Sequence, int]], plan: Plan) -> list[tuple[Sequence, int]]:
        """Those of `running` with a ready lease, each with the tokens it misses: who misses one, then the others.

        One whose lease is lost pauses and keeps its blocks. Parked ones wait for their own pass.
        """
        decoding, others = list[tuple[Sequence, int]](), list[tuple[Sequence, int]]()
        state_of, ready, failed = self._leases.state, LeaseState.READY, LeaseState.FAILED
        for each in running:
            sequence, missing = each
            state = ready if sequence.digest is None else state_of(sequence.digest)
            if state is ready:
                if not sequence.is_parked:
                    (decoding if missing == 1 else others).append(each)
            elif state is failed:
                plan.failed.append(sequence)
        return decoding + others

    def _cover(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Blocks for `count` more tokens, at the expense of sequences that are due later if need be."""
        wanted = self.pool.blocks_for(sequence.num_computed + count) - len(sequence.blocks)
        while wanted > 0:
            taken = self.pool.take(wanted)
            if taken is not None:
                sequence.blocks += taken
                break
            victim = self._victim(sequence, plan)
            if victim is None:
                return False
            self._preempt(victim, plan)
        return True

    def _victim(self, sequence: Sequence, plan: Plan) -> Sequence | None:
        """The last due that pauses, else the last due not in this step and due later than `sequence`."""
        busy = {id(rows.sequence) for rows in plan.rows} | {id(sequence)}
        idle = [s for s in self.running if id(s) not in busy]
        paused = [s for s in idle if self._state(s) is not LeaseState.READY]
        later = [s for s in idle if _rank(s) > _rank(sequence)]
        return max(paused or later, key=_rank, default=None)

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Back to the queue; the lease is asked for again at once."""
        self._requeue(sequence)
        sequence.num_preemptions += 1
        self._want(sequence)
        plan.preempted.append(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """From running to waiting, at its old place; blocks and lease are free."""
        self.running.remove(sequence)
        self._give_up(sequence)
        sequence.phase = Phase.WAITING
        insort(self.waiting, sequence, key=_rank)

    # Waiting sequences ------------------------------------------------------------------------------

    def _admit(self, plan: Plan, budget: int) -> None:
        fence, passed = False, list[Sequence]()
        for sequence in list(self.waiting):
            if budget == 0 or len(self.running) >= self.limits.max_running:
                break
            if fence and sequence.digest is not None:
                self._drop(sequence)
                continue
            self._want(sequence)
            match self._state(sequence):
                case LeaseState.FAILED:
                    plan.failed.append(sequence)
                case LeaseState.READY:
                    if not self._start(sequence):
                        break
                    count = min(sequence.num_missing, budget)
                    plan.rows.append(Rows(sequence, sequence.num_computed, count))
                    budget -= count
                    if sequence.digest is not None:
                        _count_bypass(passed)
                case LeaseState.ADMISSIBLE if self._may_park(sequence, plan):
                    if not self._start(sequence):
                        break
                    self._park(sequence, plan)
                case state:
                    passed.append(sequence)
                    fence |= state is LeaseState.NO_SLOT and sequence.times_bypassed >= self.limits.max_bypass

    def _may_park(self, sequence: Sequence, plan: Plan) -> bool:
        """Whether a pass of its adapter can begin now, or has just been planned and has room."""
        if plan.loading:
            room = self.limits.step_tokens - sum(rows.count for rows in plan.loading)
            return room > 0 and plan.loading[0].sequence.digest == sequence.digest
        parked = {s.digest for s in self.running if s.is_parked}
        return sequence.digest not in parked and len(parked) < self.limits.max_parked

    def _park(self, sequence: Sequence, plan: Plan) -> None:
        room = self.limits.step_tokens - sum(rows.count for rows in plan.loading)
        plan.loading.append(Rows(sequence, sequence.num_computed, min(sequence.num_missing, room)))
        sequence.is_parked = True

    def _start(self, sequence: Sequence) -> bool:
        """Hold blocks for every known token, remembered ones first. False, and nothing changed, if too few are free.

        A block for each running sequence's next token stays free, so that admission does not cause preemption.
        """
        cached = self._find_prefix(sequence)
        wanted = self.pool.blocks_for(sequence.num_known) - len(cached)
        spare = self.pool.num_free - (len(cached) - self.pool.num_held(cached)) - wanted
        if spare < (len(self.running) if self.running else 0):
            return False
        self.pool.hold(cached)
        taken = self.pool.take(wanted)
        assert taken is not None, "free blocks were counted just now"
        sequence.blocks = cached + taken
        sequence.num_committed = len(cached)
        sequence.num_computed = len(cached) * self.pool.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.phase = Phase.RUNNING
        return True

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Remembered blocks of this digest and these tokens; at least one token is left to compute."""
        if not sequence.reads_prefix_cache:
            return []
        usable = (sequence.num_known - 1) // self.pool.block_size
        self._grow_chain(sequence, usable)
        return self.pool.find(sequence.chain[:usable])

    def _grow_chain(self, sequence: Sequence, length: int) -> None:
        size, chain = self.pool.block_size, sequence.chain
        while len(chain) < length:
            parent = chain[-1] if chain else chain_root(sequence.digest)
            at = len(chain) * size
            chain.append(chain_next(parent, sequence.tokens[at : at + size]))

    # Leases -----------------------------------------------------------------------------------------

    def _state(self, sequence: Sequence) -> LeaseState:
        return LeaseState.READY if sequence.digest is None else self._leases.state(sequence.digest)

    def _want(self, sequence: Sequence) -> None:
        if sequence.digest is not None and not sequence.holds_lease:
            self._leases.want(sequence.digest)
            sequence.holds_lease = True

    def _drop(self, sequence: Sequence) -> None:
        if sequence.digest is not None and sequence.holds_lease:
            self._leases.drop(sequence.digest)
            sequence.holds_lease = False

    def _give_up(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_committed = 0
        sequence.is_parked = False
        self._drop(sequence)


def _count_bypass(passed: list[Sequence]) -> None:
    for sequence in passed:
        sequence.times_bypassed += 1


_rank = attrgetter("due_s", "arrival")
"""Who goes first: a total order that never changes, so the first of all is never preempted."""
