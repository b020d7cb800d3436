"""The head's decoder and LoRA back-end: each does its own part, and has the followers do theirs.

want, drop     own back-end, and every follower's; one lock, so that all hear of them in one order
view           the least that any shard has
proceed        Step to the followers -> own layers -> agreement on what was lost
lm_head        here alone
"""

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from infinilora.engine.lora.interface import (
    AdapterRows,
    LeaseStatus,
    LeaseView,
    LoraBackend,
    Routing,
    StepLost,
    StepPlan,
    Ticket,
)
from infinilora.engine.model.batch import Batch
from infinilora.engine.model.decoder import Decoder, Flow, halves_of, windows_of
from infinilora.engine.model.deltas import CarriedDeltas
from infinilora.engine.shards.agree import agree_on_lost, lost_by
from infinilora.engine.shards.collective import GroupShards
from infinilora.engine.shards.halves import run_halves
from infinilora.engine.shards.heard import HeardFollower
from infinilora.engine.shards.messages import Drop, LeaseNews, Rows, Segment, Step, TellAgain, Want
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import from_wire
from infinilora.protocol.ids import Digest

_NO_NEWS = LeaseView(LeaseStatus.WAITING)


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A step of the head's own back-end, with the rows that the followers are to be told."""

    own: StepPlan
    rows: tuple[AdapterRows, ...]

    @property
    def num_rows(self) -> int:
        return self.own.num_rows

    def adapts(self, layer: int, site: Site) -> bool:
        return self.own.adapts(layer, site)

    def window(self, start: int, stop: int) -> StepPlan | None:
        own = self.own.window(start, stop)
        return None if own is None else HeadPlan(own, self.rows)


class HeadLora:
    """The LoraBackend of an engine of several shards: a lease is held when every shard holds it."""

    def __init__(self, own: LoraBackend, followers: Sequence[HeardFollower]) -> None:
        self._own = own
        self._followers = followers
        self._lock = threading.Lock()
        self._holders: Counter[Digest] = Counter()
        self._numbers = itertools.count(1)

    def want(self, digest: Digest) -> None:
        with self._lock:
            self._holders[digest] += 1
            if self._holders[digest] == 1:
                number = next(self._numbers)
                for follower in self._followers:
                    follower.wanted(digest, number)
                    follower.send(Want(digest, number))
            self._own.want(digest)

    def drop(self, digest: Digest) -> None:
        with self._lock:
            self._own.drop(digest)
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest]
                for follower in self._followers:
                    follower.dropped(digest)
                    follower.send(Drop(digest))

    def view(self, digest: Digest) -> LeaseView:
        own = self._own.view(digest)
        told = [follower.news(digest) for follower in self._followers]
        failed = next((news.error for news in told if news and news.error), None)
        if own.status is LeaseStatus.FAILED or failed is None:
            return own if own.status is LeaseStatus.FAILED else _least(own, told)
        return LeaseView(LeaseStatus.FAILED, error=from_wire(failed))

    def begin(self, rows: Sequence[AdapterRows], trace: bytes = b"") -> StepPlan | None:
        own = self._own.begin(rows, trace)
        return None if own is None else HeadPlan(own, tuple(rows))

    def submit(
        self, plan: StepPlan, layer: int, site: Site, x: Tensor, routing: Routing | None = None
    ) -> Ticket | None:
        assert isinstance(plan, HeadPlan)
        return self._own.submit(plan.own, layer, site, x, routing)

    def add(self, ticket: Ticket | None, y: Tensor) -> None:
        self._own.add(ticket, y)

    def verify(self) -> None:
        """The head's own: a follower has verified its part before all agreed on what was lost."""
        self._own.verify()

    def end(self, plan: StepPlan) -> None:
        assert isinstance(plan, HeadPlan)
        self._own.end(plan.own)

    def take_waits(self) -> dict[Site, float]:
        """The head's own. Where another shard waits, the head waits for it in a sum."""
        return self._own.take_waits()

    def close(self) -> None:
        self._own.close()

    def check(self) -> None:
        assert not self._holders, f"adapters are still held: {dict(self._holders)}"
        self._own.check()


def _least(own: LeaseView, told: Sequence[LeaseNews | None]) -> LeaseView:
    """What all shards have of an adapter that none has failed."""
    if own.lease is None or not all(news and news.has_slot for news in told):
        return _NO_NEWS
    behind = [news.layers_ready for news in told if news and news.status != LeaseStatus.RESIDENT.value]
    if own.status is not LeaseStatus.RESIDENT:
        behind.append(own.layers_ready)
    if not behind:
        return own
    layers = min(behind)
    status = LeaseStatus.ADMISSIBLE if layers else LeaseStatus.WAITING
    return LeaseView(status, own.lease, layers_ready=layers)


class HeadDecoder(Decoder):
    """The head's part of a model, which has the followers run theirs with every step."""

    def __init__(self, own: Decoder, shards: GroupShards, followers: Sequence[HeardFollower]) -> None:
        super().__init__(own.spec, own.weights, own.ops, own.kv, shards)
        self._group = shards
        self._followers = followers
        self._numbers = itertools.count(1)
        self._flows: weakref.WeakKeyDictionary[Flow, int] = weakref.WeakKeyDictionary()
        """Those that may go on: whoever gave one up has let it go."""

    @override
    def proceed(self, flow: Flow, lora: LoraBackend, plan: StepPlan | None, *, until: int) -> None:
        assert plan is None or isinstance(plan, HeadPlan)
        number = self._flows.get(flow)
        new = None if number is not None else Rows.of(flow.batch)
        if number is None:
            number = self._flows[flow] = next(self._numbers)
        self._tell(Step(number, until, tuple(self._flows.values()), _segments(plan), new))
        deltas = CarriedDeltas(lora, plan)
        self.run(flow, deltas, until=until)
        if plan is not None:
            self._agree(plan, [deltas.loss])

    @override
    def _in_halves(self, batch: Batch, lora: LoraBackend, plan: StepPlan, cut: int) -> Tensor:
        assert isinstance(plan, HeadPlan)
        kept, until = tuple(self._flows.values()), self.spec.num_layers
        self._tell(Step(next(self._numbers), until, kept, _segments(plan), Rows.of(batch), cut))
        halves = halves_of(batch, cut)
        losses = run_halves(self, halves, lora, windows_of(plan, halves))
        self._agree(plan, losses)
        return torch.cat([self.finish(half) for half in halves])

    def _tell(self, step: Step) -> None:
        for follower in self._followers:
            follower.send(step)

    def _agree(self, plan: HeadPlan, losses: Sequence[StepLost | None]) -> None:
        """Raise StepLost for what any shard has lost."""
        digests = [row.lease.digest for row in plan.rows]
        own = frozenset[Digest]().union(*(lost_by(loss, digests) for loss in losses))
        lost = agree_on_lost(self._group, digests, own, self.ops.device)
        if not lost:
            return
        for follower in self._followers:
            follower.doubt(lost)
            follower.send(TellAgain(tuple(lost)))
        loss = next((loss for loss in losses if loss is not None), None)
        raise StepLost(lost, "another shard of this engine lost it" if loss is None else loss.reason) from loss


def _segments(plan: HeadPlan | None) -> tuple[Segment, ...]:
    rows = () if plan is None else plan.rows
    return tuple(Segment(row.row_start, row.rows, row.lease.digest) for row in rows)
