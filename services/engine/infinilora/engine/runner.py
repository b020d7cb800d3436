"""One step: rows of sequences become tensors, go through the model, come back as tokens and scores.

Knows the model, the LoRA interface and the sampler; decides nothing about who runs. Rows of one adapter are
neighbours and base rows come last. When the deltas of some rows are lost, those rows are dropped and the step
is run again without them: what they wrote into the cache is overwritten when they are run again. Where deltas are added
by a device that is still at it, their loss is known when the step is through: then only those rows are dropped.

Rows whose adapter still loads go through the model apart, in a `Pass` that stops where a layer is missing.

Logits are of a few of a step's rows, so adapters of lm_head have a plan of their own, made only if there are any.
"""

import logging
import math
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from infinilora.engine.batching import BatchBuilder
from infinilora.engine.lora.interface import AdapterRows, Lease, LeaseStatus, LeaseView, LoraBackend, StepLost, StepPlan
from infinilora.engine.model.batch import Batch
from infinilora.engine.model.decoder import Decoder, Flow
from infinilora.engine.sampler import Sampled, TokenScore, sample, score
from infinilora.engine.sched.pingpong import PingPong
from infinilora.engine.sched.scheduler import Rows
from infinilora.engine.sequence import Sequence
from infinilora.kernels.allocation import is_out_of_memory
from infinilora.protocol.adapter import Site
from infinilora.protocol.ids import Digest

logger = logging.getLogger(__name__)

_SCORED_ROWS = 128
"""Prompt positions scored at once: bounds the memory of their logits."""


class Placed(NamedTuple):
    """Rows of a sequence with the lease they run under (None: base)."""

    rows: Rows
    lease: Lease | None


@dataclass(slots=True)
class Outcome:
    """What a step produced. `done` were computed; of these, some have a token or prompt scores."""

    done: list[Rows] = field(default_factory=list)
    sampled: dict[Sequence, Sampled] = field(default_factory=dict)
    prompt_scores: dict[Sequence, dict[int, TokenScore]] = field(default_factory=dict)
    """Scores of prompt tokens by position; position 0 has none."""
    overflowed: list[Rows] = field(default_factory=list)
    """Computed, and no number came out: neither a token nor a score of them means anything."""
    lost: list[Rows] = field(default_factory=list)
    too_large: Rows | None = None
    """There was no memory, and nothing was computed: the rows that asked for the most of it."""
    waits: dict[Site, float] = field(default_factory=dict)
    """Exposed wait by site: seconds in which the step had to wait for a delta."""
    trace: bytes = b""
    """Of one traced request with an adapter; empty where there is none."""


@dataclass(slots=True)
class Pass:
    """Rows of one adapter that still loads, on their way through the model: as far as it has layers, then parked."""

    rows: list[Rows]
    lease: Lease | None
    flow: Flow
    seconds: float = 0.0
    waits: dict[Site, float] = field(default_factory=dict)


class Runner:
    """Runs steps, one at a time, in the engine's step thread."""

    def __init__(
        self, decoder: Decoder, lora: LoraBackend, *, block_size: int, pingpong: PingPong | None = None
    ) -> None:
        self._decoder = decoder
        self._lora = lora
        self._batches = BatchBuilder(block_size=block_size, device=decoder.ops.device)
        self._pingpong = pingpong or PingPong()

    @property
    def progress(self) -> int:
        """A number that changes while a step moves. Any thread."""
        return self._decoder.num_layers_run

    @torch.inference_mode()
    def run(self, rows: Many[Rows]) -> Outcome:
        try:
            return self._run(rows)
        except (MemoryError, RuntimeError) as error:
            return _without_memory(rows, error)

    def _run(self, rows: Many[Rows]) -> Outcome:
        outcome = Outcome()
        placed = self._place(rows, outcome)
        while placed:
            batch = self._batches.build([p.rows for p in placed])
            hidden = self._forward(batch, placed, outcome)
            if hidden is not None:
                self._read(hidden, placed, outcome)
                break
            placed = [p for p in placed if p.rows not in outcome.lost]
        self._note_waits(outcome.waits)
        return outcome

    def open(self, rows: Many[Rows]) -> Pass:
        """Begin a pass of rows of one adapter; `advance` takes it through."""
        digest = rows[0].sequence.digest
        assert digest is not None
        return Pass(list(rows), self._lora.view(digest).lease, Flow(self._batches.build(rows)))

    def can_advance(self, part: Pass) -> bool:
        """Whether `advance` has something to do now."""
        view = self._view(part)
        return view is None or view.status is LeaseStatus.RESIDENT or self._until(part, view) > part.flow.layer

    @torch.inference_mode()
    def advance(self, part: Pass) -> Outcome | None:
        """Run the layers that its adapter has by now; None: parked again. A tenancy that is over loses all rows."""
        try:
            return self._advance(part)
        except (MemoryError, RuntimeError) as error:
            return _without_memory(part.rows, error)

    def _advance(self, part: Pass) -> Outcome | None:
        outcome, view, lease = Outcome(), self._view(part), part.lease
        if view is None or lease is None:
            outcome.lost += part.rows
            return outcome
        placed = [Placed(rows, lease) for rows in part.rows]
        until = self._until(part, view)
        if until > part.flow.layer and not self._proceed(part, placed, until, outcome):
            return outcome
        if view.status is not LeaseStatus.RESIDENT:
            return None
        self._read(self._decoder.finish(part.flow), placed, outcome)
        self._note_waits(part.waits)
        outcome.waits, outcome.trace = part.waits, _trace_of(placed)
        return outcome

    def _note_waits(self, waits: dict[Site, float]) -> float:
        """Add what was waited since the last time to `waits`; the seconds added."""
        news = self._lora.take_waits()
        for site, seconds in news.items():
            waits[site] = waits.get(site, 0.0) + seconds
        return sum(news.values())

    def _view(self, part: Pass) -> LeaseView | None:
        """What is known of the pass's tenancy; None when it is not the adapter's any more."""
        view = None if part.lease is None else self._lora.view(part.lease.digest)
        return view if view is not None and view.has_layers(1) and view.lease == part.lease else None

    def _until(self, part: Pass, view: LeaseView) -> int:
        num_layers = self._decoder.spec.num_layers
        return num_layers if view.has_layers(num_layers) else max(view.layers_ready, part.flow.layer)

    def _proceed(self, part: Pass, placed: list[Placed], until: int, outcome: Outcome) -> bool:
        plan = self._begin(placed, _trace_of(placed))
        try:
            self._decoder.proceed(part.flow, self._lora, plan, until=until)
            self._lora.verify()
        except StepLost as loss:
            _lose(loss, placed, outcome)
            return False
        finally:
            self._note_waits(part.waits)
            if plan is not None:
                self._lora.end(plan)
        return True

    def _begin(self, placed: list[Placed], trace: bytes) -> StepPlan | None:
        for each in placed:
            if each.lease is not None and each.lease.may_narrow:
                each.rows.sequence.may_narrow = True
        return self._lora.begin(list(_segments((p.lease, p.rows.count) for p in placed)), trace)

    def _place(self, rows: Many[Rows], outcome: Outcome) -> list[Placed]:
        """Order by group and slot, base last. Rows whose adapter is not resident any more are lost."""
        placed = []
        for item in rows:
            digest = item.sequence.digest
            lease = None if digest is None else self._resident(digest)
            if digest is not None and lease is None:
                outcome.lost.append(item)
            else:
                placed.append(Placed(item, lease))
        placed.sort(key=_by_slot)
        return placed

    def _resident(self, digest: Digest) -> Lease | None:
        """Its lease, if all layers are there: a new tenancy that still loads must not cost its neighbours the step."""
        view = self._lora.view(digest)
        return view.lease if view.status is LeaseStatus.RESIDENT else None

    def _forward(self, batch: Batch, placed: list[Placed], outcome: Outcome) -> Tensor | None:
        """Hidden states, or None when rows were lost on the way (they are in `outcome.lost` then)."""
        outcome.trace = _trace_of(placed)
        plan = self._begin(placed, outcome.trace)
        if plan is None:
            return self._decoder.forward(batch, self._lora, plan)
        lens, started = batch.paging.query_lens, time.perf_counter()
        try:
            hidden = self._decoder.forward(batch, self._lora, plan, cut=self._pingpong.cut(lens))
        except StepLost as loss:
            _lose(loss, placed, outcome)
            return None
        finally:
            waited_s = self._note_waits(outcome.waits)
            self._lora.end(plan)
        self._pingpong.observe(lens, time.perf_counter() - started, waited_s)
        return hidden

    def _read(self, hidden: Tensor, placed: list[Placed], outcome: Outcome) -> None:
        heads: list[_Head] = []
        at = 0
        for each in placed:
            item, sequence = each.rows, each.rows.sequence
            if sequence.params.prompt_logprobs is not None:
                self._score_prompt(hidden[at : at + item.count], each, outcome)
            at += item.count
            if item.reaches_end and sequence.num_produced < sequence.params.max_tokens:
                heads.append(_Head(at - 1, each))
        self._sample(hidden, heads, outcome)
        self._verify(placed, outcome)
        outcome.overflowed = [rows for rows in outcome.overflowed if rows not in outcome.lost]
        outcome.done = [p.rows for p in placed if p.rows not in outcome.lost and p.rows not in outcome.overflowed]

    def _verify(self, placed: list[Placed], outcome: Outcome) -> None:
        """Nothing of rows whose deltas did not come leaves the step; the others have all that they need."""
        try:
            self._lora.verify()
        except StepLost as loss:
            _lose(loss, [p for p in placed if p.rows not in outcome.lost], outcome)
            for rows in outcome.lost:
                outcome.sampled.pop(rows.sequence, None)
                outcome.prompt_scores.pop(rows.sequence, None)

    def _sample(self, hidden: Tensor, heads: list["_Head"], outcome: Outcome) -> None:
        """A token for each head, but for those whose deltas were lost."""
        while heads := [head for head in heads if head.placed.rows not in outcome.lost]:
            last = [head.row for head in heads]
            rows = hidden[last] if len(last) < hidden.shape[0] else hidden
            try:
                logits = self._logits(rows, [(head.placed.lease, 1) for head in heads])
            except StepLost as loss:
                _lose(loss, [head.placed for head in heads], outcome)
                continue
            each = [head.placed.rows for head in heads]
            sampled = sample(logits, [rows.sequence for rows in each])
            outcome.sampled = {rows.sequence: token for rows, token in zip(each, sampled, strict=True)}
            outcome.overflowed += [rows for rows in each if not outcome.sampled[rows.sequence].is_sound]
            return

    def _logits(self, hidden: Tensor, runs: list[tuple[Lease | None, int]]) -> Tensor:
        """fp32 [rows, vocab] of rows in runs of (lease, number), grouped by lease. Raises StepLost."""
        if not any(lease is not None and lease.layer_sites[-1] for lease, _ in runs):
            return self._decoder.logits(hidden, self._lora, None)
        plan = self._lora.begin(list(_segments(runs)))
        try:
            return self._decoder.logits(hidden, self._lora, plan)
        finally:
            if plan is not None:
                self._lora.end(plan)

    def _score_prompt(self, hidden: Tensor, placed: Placed, outcome: Outcome) -> None:
        """Row p predicts token p + 1: score those that are prompt tokens."""
        item, sequence = placed.rows, placed.rows.sequence
        scores: dict[int, TokenScore] = {}
        end = min(item.start + item.count, sequence.num_prompt - 1)
        for start in range(item.start, end, _SCORED_ROWS):
            stop = min(start + _SCORED_ROWS, end)
            rows = hidden[start - item.start : stop - item.start]
            try:
                logprobs = self._logits(rows, [(placed.lease, len(rows))]).log_softmax(-1)
            except StepLost as loss:
                _lose(loss, [placed], outcome)
                return
            num_top = sequence.params.prompt_logprobs or 0
            tokens = sequence.tokens[start + 1 : stop + 1]
            scored = score(logprobs, tokens, [num_top] * len(tokens))
            if any(math.isnan(each.logprob) for each in scored):
                outcome.overflowed.append(item)
                return
            scores.update(zip(range(start + 1, stop + 1), scored, strict=True))
        outcome.prompt_scores[sequence] = scores


class _Head(NamedTuple):
    """A row of a step's hidden states that a token is sampled from, and whose it is."""

    row: int
    placed: Placed


def _lose(loss: StepLost, placed: list[Placed], outcome: Outcome) -> None:
    """Note whose rows are lost: those of the digests that the loss names, else all that have an adapter."""
    lost = [p.rows for p in placed if p.lease and p.lease.digest in loss.digests]
    lost = lost or [p.rows for p in placed if p.lease]
    logger.warning("rows lost their adapter in a step", extra={"rows": len(lost), "reason": loss.reason})
    outcome.lost += lost


def _without_memory(rows: Many[Rows], error: BaseException) -> Outcome:
    """What comes of a step that found no memory; any other error goes on."""
    if not is_out_of_memory(error):
        raise error
    total = sum(each.count for each in rows)
    logger.warning("no memory for a step", extra={"rows": total, "sequences": len(rows), "reason": str(error)})
    return Outcome(too_large=max(rows, key=attrgetter("count")))


def _by_slot(placed: Placed) -> tuple[bool, str, int, int]:
    lease, order = placed.lease, placed.rows.sequence.arrival
    return (lease is None, "" if lease is None else lease.group, -1 if lease is None else lease.slot, order)


def _segments(runs: Iterable[tuple[Lease | None, int]]) -> Iterator[AdapterRows]:
    """One entry for each run of rows under one lease; `runs` are (lease, number of rows)."""
    at = 0
    for lease, neighbours in groupby(runs, key=itemgetter(0)):
        count = sum(number for _, number in neighbours)
        if lease is not None:
            yield AdapterRows(at, count, lease)
        at += count


def _trace_of(placed: list[Placed]) -> bytes:
    """The trace of the first row with an adapter that has one: a step belongs to one trace at most."""
    return next((p.rows.sequence.trace for p in placed if p.lease and any(p.rows.sequence.trace)), b"")
