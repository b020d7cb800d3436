"""A follower's step thread: does what the head says, and tells it how far its leases are.

One thread has the decoder, the LoRA back-end and the socket's reading; a back-end that has news rings.
"""

import contextlib
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch

from infinilora.engine.lora.interface import AdapterRows, LeaseStatus, LeaseView, LoraBackend, StepLost, StepPlan
from infinilora.engine.model.decoder import Decoder, Flow, halves_of, windows_of
from infinilora.engine.model.deltas import CarriedDeltas
from infinilora.engine.shards.agree import agree_on_lost, lost_by
from infinilora.engine.shards.channel import Channel
from infinilora.engine.shards.collective import GroupShards
from infinilora.engine.shards.halves import run_halves
from infinilora.engine.shards.messages import Drop, Forget, LeaseNews, Step, TellAgain, Want
from infinilora.protocol.errors import Internal
from infinilora.protocol.ids import Digest


@dataclass(slots=True)
class _Wanted:
    """The head's latest want of a digest, and what it was told of it."""

    number: int
    told: LeaseNews | None = None


class Follower:
    """`run` is the thread; it returns when the head is gone. `ring` may be called from any."""

    def __init__(
        self,
        channel: Channel,
        shards: GroupShards,
        decoder: Decoder,
        lora: LoraBackend,
        forget: Callable[[Digest], None],
    ) -> None:
        self._channel = channel
        self._shards = shards
        self._decoder = decoder
        self._lora = lora
        self._forget = forget
        self._wanted: dict[Digest, _Wanted] = {}
        self._flows: dict[int, Flow] = {}
        self._bell, self._hammer = socket.socketpair()
        for end in (self._bell, self._hammer):
            end.setblocking(False)  # noqa: FBT003 - socket's own signature

    def ring(self) -> None:
        """A lease may have changed."""
        with contextlib.suppress(OSError):  # rung often enough, or nobody is there to hear
            self._hammer.send(b"!")

    def run(self) -> None:
        with self._bell, self._hammer:
            self._listen()

    def _listen(self) -> None:
        while True:
            heard: list[Channel | socket.socket] = [self._channel, self._bell]
            ready, _, _ = select.select(heard, [], [])
            if self._bell in ready:
                self._bell.recv(4096)
                self._tell_news()
            if self._channel in ready:
                order = self._channel.recv()
                if order is None:
                    return
                self._do(order)

    def _do(self, order: object) -> None:
        match order:
            case Step():
                self._step(order)
            case Want(digest=digest, number=number):
                self._wanted[digest] = _Wanted(number)
                self._lora.want(digest)
                self._tell_news()
            case Drop(digest=digest):
                del self._wanted[digest]
                self._lora.drop(digest)
            case TellAgain(digests=digests):
                for digest in self._wanted.keys() & set(digests):
                    self._wanted[digest].told = None
                self._tell_news()
            case Forget(digest=digest):
                self._forget(digest)
            case other:
                raise Internal(f"the head of this engine sent {type(other).__name__} to a shard that is open")

    @torch.inference_mode()
    def _step(self, step: Step) -> None:
        flow = self._flow(step)
        rows = [self._lent(segment.row_start, segment.rows, segment.digest, step.until) for segment in step.segments]
        digests = [segment.digest for segment in step.segments]
        missing = {digest for digest, row in zip(digests, rows, strict=True) if row is None}
        plan = self._lora.begin([row for row in rows if row is not None])
        try:
            losses = [*self._run(flow, plan, step), self._late_loss()]
        finally:
            self._lora.take_waits()  # the head's are reported
            if plan is not None:
                self._lora.end(plan)
        if digests:
            lost = missing.union(*(lost_by(loss, digests) for loss in losses))
            agree_on_lost(self._shards, digests, lost, self._decoder.ops.device)

    def _run(self, flow: Flow, plan: StepPlan | None, step: Step) -> list[StepLost | None]:
        """What was lost: of a step in halves, of each."""
        if step.cut:
            halves = halves_of(flow.batch, step.cut)
            return run_halves(self._decoder, halves, self._lora, windows_of(plan, halves))
        deltas = CarriedDeltas(self._lora, plan)
        self._decoder.run(flow, deltas, until=step.until)
        return [deltas.loss]

    def _late_loss(self) -> StepLost | None:
        """What did not come of its deltas, though the step is through."""
        try:
            self._lora.verify()
        except StepLost as loss:
            return loss
        return None

    def _flow(self, step: Step) -> Flow:
        """The flow of a step; those that the head has let go are forgotten."""
        flow = self._flows.get(step.flow) if step.rows is None else Flow(step.rows.batch(self._decoder.ops.device))
        if flow is None:
            raise Internal(f"the head of this engine goes on with flow {step.flow}, which is not here")
        self._flows = {number: self._flows[number] for number in step.kept if number in self._flows}
        if not step.cut:
            self._flows[step.flow] = flow
        return flow

    def _lent(self, row_start: int, rows: int, digest: Digest, until: int) -> AdapterRows | None:
        """The rows under our own lease; None where it has not got so far."""
        view = self._lora.view(digest)
        return AdapterRows(row_start, rows, view.lease) if view.lease is not None and view.has_layers(until) else None

    def _tell_news(self) -> None:
        for digest, wanted in self._wanted.items():
            news = _news(digest, wanted.number, self._lora.view(digest))
            if news != wanted.told:
                wanted.told = news
                self._channel.send(news)


def _news(digest: Digest, number: int, view: LeaseView) -> LeaseNews:
    error = None if view.status is not LeaseStatus.FAILED or view.error is None else view.error.to_wire()
    return LeaseNews(digest, number, view.status.value, view.lease is not None, view.layers_ready, error)
