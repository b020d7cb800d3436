"""The step thread: schedule, run, sample, tell. One step at a time, asleep when there is nothing to do.

Other threads talk to it through an inbox (`submit`, `abort`) and hear from it through each sequence's sink.
Everything that goes wrong with one sequence ends that sequence alone; anything else ends the thread, and
a hook hears of it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from infinilora.engine.events import Ended, Event, Failed, FinishReason, Hooks, Produced, PromptScored, Sink, StepReport
from infinilora.engine.job import Job, Patience
from infinilora.engine.leases import BackendLeases
from infinilora.engine.loading import LoadingPasses
from infinilora.engine.lora.interface import LoraBackend
from infinilora.engine.runner import Outcome, Runner
from infinilora.engine.sampler import Sampled
from infinilora.engine.sched.blocks import BlockPool
from infinilora.engine.sched.scheduler import LeaseState, Limits, Plan, Rows, Scheduler
from infinilora.engine.sched.urgency import QUEUE_SHARE, due_s
from infinilora.engine.sequence import Phase, Sequence
from infinilora.protocol.control import EngineLoad
from infinilora.protocol.errors import (
    AdapterFailed,
    AdapterInvalid,
    AdapterLoading,
    DeadlineExceeded,
    InfiniLoraError,
    Internal,
    Overloaded,
)
from infinilora.protocol.ids import Digest

logger = logging.getLogger(__name__)

_MAX_LOSSES = 4
"""Steps in a row that a sequence may lose its deltas before it fails."""


class EngineLoop:
    """Owns scheduler, runner and the LoRA backend from `start` to `stop`; only its thread touches them, but to ask."""

    def __init__(
        self,
        runner: Runner,
        lora: LoraBackend,
        limits: Limits,
        pool: BlockPool,
        *,
        max_waiting: int = 256,
        patience: Patience | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self._runner = runner
        self._lora = lora
        self._leases = BackendLeases(lora)
        self._scheduler = Scheduler(limits, pool, self._leases)
        self._loading = LoadingPasses(runner, self._scheduler)
        self._max_waiting = max_waiting
        self._patience = patience or Patience()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._num_turns = 0
        self._is_idle = True
        self._jobs: dict[Sequence, Job] = {}
        self._queued = 0
        self._queue_lock = threading.Lock()
        self._load = EngineLoad(kv_blocks_free=pool.num_free, kv_blocks_total=pool.num_blocks)
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)
        self._hooks = hooks or Hooks()

    # Other threads ----------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after its step; sequences that still run get an `Ended` with reason abort."""
        self._stopping = True
        self.wake()
        self._thread.join(timeout_s)

    def wake(self) -> None:
        """Something changed: an adapter's state, the inbox. Cheap, from any thread."""
        self._wake.set()

    def submit(self, sequence: Sequence, sink: Sink, *, deadline_s: float | None = None) -> Job:
        """Ask for its lease and queue it; its events go to `sink`. Overloaded, and neither, when the queue is full."""
        room = max(1, int(self._max_waiting * QUEUE_SHARE[sequence.slo_class]))
        with self._queue_lock:
            if self._queued + self._load.waiting >= room:
                raise Overloaded(
                    f"the engine's queue of {room} for {sequence.slo_class} requests is full; try again later",
                    retry_after_s=1.0,
                )
            self._queued += 1
        now = time.perf_counter()
        deadline = None if deadline_s is None else now + deadline_s
        sequence.due_s = due_s(sequence.slo_class, now, deadline, is_continued=sequence.num_produced > 0)
        job = Job(sequence, sink, deadline=deadline)
        self._scheduler.ask(sequence)  # the answer may be here when the step that runs now is over
        self._post(lambda: self._add(job))
        return job

    def abort(self, job: Job) -> None:
        """The client left: free its blocks, lease and place before the next step. Idempotent."""
        self._post(lambda: self._end(job, "abort"))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function between two steps, in the step thread."""
        self._post(function)

    @property
    def load(self) -> EngineLoad:
        """As of the last step."""
        return self._load

    @property
    def name(self) -> str:
        """Of the step thread."""
        return self._thread.name

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def progress(self) -> int | None:
        """A number that changes while the step thread gets on; None while it has nothing to do."""
        return None if self._is_idle else self._num_turns + self._runner.progress

    def check_idle(self) -> None:
        """AssertionError unless nothing is left: no job, block, lease, ticket. Only when idle, or after `stop`."""
        assert not self._jobs, f"{len(self._jobs)} jobs are left"
        self._scheduler.check_idle()
        self._loading.check_idle()
        self._leases.check_idle()
        self._lora.check()

    def _post(self, function: Callable[[], None]) -> None:
        self._inbox.append(function)
        self._wake.set()

    # The step thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._is_idle = False
                has_run = self._turn()
                self._is_idle = True
                if not has_run:
                    self._wake.wait(timeout=self._next_alarm())
            self._drain_inbox()
            for job in list(self._jobs.values()):
                self._end(job, "abort")
            self._hooks.flush()
        except BaseException as error:  # noqa: BLE001 - handed over: it ends the process
            self._hooks.on_crash(error)

    def _turn(self) -> bool:
        """One round: hear, expire, schedule, run, tell. False if there was nothing to run."""
        self._num_turns += 1
        self._wake.clear()
        self._drain_inbox()
        self._expire(time.perf_counter())
        plan = self._scheduler.schedule()
        for sequence in plan.failed:
            self._adapter_failed(self._jobs[sequence])
        rows = [r for r in plan.rows if r.sequence.phase is Phase.RUNNING]
        if rows:
            self._step(rows, plan)
        has_moved = self._advance_loading(plan.loading)
        self._publish_load()
        self._hooks.flush()
        return bool(rows or plan.preempted or plan.failed or has_moved)

    def _drain_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _add(self, job: Job) -> None:
        with self._queue_lock:
            self._queued -= 1
        self._jobs[job.sequence] = job
        self._scheduler.add(job.sequence)
        self._publish_load()

    def _step(self, rows: list[Rows], plan: Plan) -> None:
        started = time.perf_counter()
        cached = self._begin(rows, started)
        outcome = self._runner.run(rows)
        self._settle(outcome)
        seconds = time.perf_counter() - started
        if not outcome.lost and outcome.too_large is None:
            self._scheduler.observe(sum(item.count for item in rows), seconds)
        self._hooks.on_step(_report(outcome, plan, cached, started, seconds))

    def _begin(self, rows: list[Rows], now: float) -> int:
        """Note whose first step this is; how many cached tokens they bring."""
        cached = 0
        for item in rows:
            job = self._jobs[item.sequence]
            if job.first_step_at is None:
                job.first_step_at = now
                cached += item.sequence.num_cached
        return cached

    def _advance_loading(self, planned: list[Rows]) -> bool:
        """Begin what was planned for an adapter that still loads, and move one such pass. False: none could."""
        if planned:
            self._begin([item for item in planned if item.sequence in self._jobs], time.perf_counter())
            self._loading.open(planned)
        has_moved, outcome, seconds = self._loading.advance()
        if outcome is not None:
            self._settle(outcome)
            self._hooks.on_step(_report(outcome, Plan(), 0, time.perf_counter() - seconds, seconds))
        return has_moved

    def _settle(self, outcome: Outcome) -> None:
        if outcome.too_large is not None:  # the others' rows are planned again
            words = f"this engine had no memory for {outcome.too_large.count} tokens of the request in one step"
            self._fail(self._jobs[outcome.too_large.sequence], Overloaded(words, retry_after_s=1.0))
        for rows in outcome.lost:
            self._lost(self._jobs[rows.sequence])
        for sequence in dict.fromkeys(rows.sequence for rows in outcome.overflowed):
            self._overflowed(self._jobs[sequence])
        for rows in outcome.done:
            job = self._jobs[rows.sequence]
            job.times_lost = 0
            self._scheduler.complete(rows)
            job.prompt_scores.update(outcome.prompt_scores.get(rows.sequence, {}))
            if rows.reaches_end:
                self._advance(job, outcome.sampled.get(rows.sequence))

    def _advance(self, job: Job, sampled: Sampled | None) -> None:
        """All known tokens are computed: tell the prompt's scores, then the next token or the end."""
        sequence, params = job.sequence, job.sequence.params
        if params.prompt_logprobs is not None and not job.scores_sent:
            job.scores_sent = True
            job.sink(PromptScored(tuple(score for _, score in sorted(job.prompt_scores.items()))))
            job.prompt_scores.clear()
        if sampled is None:
            self._end(job, "length")
        elif sampled.token_id in params.stop_token_ids:
            self._end(job, "stop", stop_token_id=sampled.token_id)
        else:
            sequence.tokens.append(sampled.token_id)
            job.sink(Produced(sampled.token_id, sampled.score))
            if sequence.num_produced >= params.max_tokens:
                self._end(job, "length")

    def _lost(self, job: Job) -> None:
        """Its rows are run again whole, a bounded number of times."""
        job.times_lost += 1
        job.paused_since = None
        if job.times_lost > _MAX_LOSSES:
            message = f"the deltas of adapter {job.sequence.digest} were lost {job.times_lost} times in a row"
            self._fail(job, AdapterFailed(message, retry_after_s=1.0))

    def _overflowed(self, job: Job) -> None:
        """Its logits are no numbers, and would not be another time: an adapter's weights may be too large for that."""
        digest = job.sequence.digest
        if digest is None:
            self._fail(job, Internal("the base model's logits for this request are not finite numbers"))
        else:
            words = f"the logits for this request are not finite numbers: the weights of adapter {digest} are too large"
            self._without_adapter(job, AdapterInvalid(words))

    # Ends -------------------------------------------------------------------------------------------

    def _end(self, job: Job, reason: FinishReason, *, stop_token_id: int | None = None) -> None:
        sequence = job.sequence
        self._close(
            job,
            Ended(
                reason=reason,
                prompt_tokens=sequence.num_prompt,
                completion_tokens=sequence.num_produced,
                cached_tokens=sequence.num_cached,
                degraded=sequence.degraded,
                stop_token_id=stop_token_id,
                num_preemptions=sequence.num_preemptions,
            ),
        )

    def _fail(self, job: Job, error: InfiniLoraError) -> None:
        self._close(job, Failed(error))

    def _close(self, job: Job, event: Event) -> None:
        if self._jobs.pop(job.sequence, None) is None:
            return
        self._scheduler.remove(job.sequence)
        job.sink(event)

    def _adapter_failed(self, job: Job) -> None:
        digest = job.sequence.digest
        error = None if digest is None else self._leases.error(digest)
        self._without_adapter(job, error or AdapterFailed(f"adapter {digest} cannot be served now"))

    def _without_adapter(self, job: Job, error: InfiniLoraError) -> None:
        """Fail closed; go on as base only if the caller accepted that and has seen no token (law 2)."""
        sequence = job.sequence
        if sequence.fallback_base and not sequence.num_produced:
            logger.info("sequence degrades to base", extra={"request_id": sequence.request_id, "code": error.code})
            self._scheduler.degrade(sequence)
        else:
            self._fail(job, error)

    # Time -------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        for job in list(self._jobs.values()):
            if job.deadline is not None and now >= job.deadline:
                self._fail(job, DeadlineExceeded("the request's deadline passed"))
            elif job.sequence.digest is not None:
                self._expire_lease(job, job.sequence.digest, now)

    def _expire_lease(self, job: Job, digest: Digest, now: float) -> None:
        if self._leases.state(digest) is LeaseState.READY:
            job.paused_since = None
            return
        job.paused_since = job.paused_since or now
        limit_s = self._patience.limit_s(job)
        if now - job.paused_since < limit_s:
            return
        if job.lost_adapter:
            lost = f"adapter {digest} was lost in use and did not come back within {limit_s:.1f} s"
            self._without_adapter(job, AdapterFailed(lost, retry_after_s=1.0))
        else:
            waited = f"adapter {digest} was not ready within {limit_s:.0f} s"
            self._without_adapter(job, AdapterLoading(waited, retry_after_s=1.0))

    def _next_alarm(self) -> float | None:
        """Seconds until something may expire; None: sleep until woken."""
        if not self._jobs:
            return None
        now = time.perf_counter()
        due = [job.deadline for job in self._jobs.values() if job.deadline is not None]
        due += [
            job.paused_since + self._patience.limit_s(job)
            for job in self._jobs.values()
            if job.paused_since is not None
        ]
        return max(0.0, min(due) - now) if due else None

    def _publish_load(self) -> None:
        scheduler = self._scheduler
        self._load = EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_blocks_free=scheduler.pool.num_free,
            kv_blocks_total=scheduler.pool.num_blocks,
            digests=self._leases.held(),
        )


def _report(outcome: Outcome, plan: Plan, cached: int, started_s: float, seconds: float) -> StepReport:
    decode = sum(1 for rows in outcome.done if rows.count == 1)
    return StepReport(
        started_s=started_s,
        seconds=seconds,
        decode_rows=decode,
        prefill_rows=sum(rows.count for rows in outcome.done) - decode,
        cached_tokens=cached,
        num_preempted=len(plan.preempted),
        num_lost=len(outcome.lost),
        waits=outcome.waits,
        trace=outcome.trace,
    )
