"""The leader's other round: digests without a name are dropped from every process and from the store.

Registration and collection meet in a digest's `DigestRecord`. A registration changes it in the script that points
its name, so a collection that has read it before must fail at its next step; one that reads it afterwards finds the
name too, because the registry is read later still. The object is deleted only while the record says `dying`, and no
name can be pointed to it then.

A leader may be stopped at any instruction and wake up when another leads. So whatever it writes is written only if its
epoch is still the newest, in the same script; and the one step that Redis cannot refuse is bound by time:

    dying, epoch mine -> deletion made ready (good for WITHIN_S) -> claimed: still dying, mine -> object -> record

Who takes a dying digest over from an earlier leader keeps its record, and with it every registration of the same
content, waiting until nothing that the earlier one had claimed can be deleted any more.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from infinilora.coordinator.garbage import fate
from infinilora.coordinator.leader import Leadership
from infinilora.coordinator.orders import TAKEN, Orders
from infinilora.coordinator.registry import Registry
from infinilora.protocol import keys
from infinilora.protocol.adapter import DigestRecord
from infinilora.protocol.control import EngineLoad, Forget, GroupLoad
from infinilora.protocol.errors import InfiniLoraError
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import BlobStore
from infinilora.runtime.members import Members
from infinilora.runtime.membership import Member
from infinilora.runtime.store import Change, Store, Unstamp, Value, fence

logger = logging.getLogger(__name__)

MAX_LOOKED_AT = 64
"""Digests of one round: those whose grace time is over, then the others; the oldest first."""
MAX_WAITING = 4096
"""Digests whose grace time runs, the oldest; those behind them begin when these are gone."""
WITHIN_S = 10
"""From making a deletion ready to its arrival at the store, which takes none later."""


class Times(NamedTuple):
    """How long a digest without a name is kept, and how far the store's clock may be behind."""

    grace_s: float
    clock_skew_s: float


class _Case(NamedTuple):
    digest: Digest
    record: Value[DigestRecord] | None

    def change(self, value: DigestRecord | None) -> Change:
        return Change(keys.digest(self.digest), self.record.raw if self.record else None, value)

    def unchanged(self) -> Change:
        return Change(keys.digest(self.digest), self.record.raw if self.record else None)


class Collector:
    """Remembers since when a digest has had no name, who has dropped one that is dying, and what it took over when."""

    def __init__(
        self,
        *,
        store: Store,
        blobs: BlobStore,
        members: Members,
        leadership: Leadership,
        registry: Registry,
        orders: Orders,
        times: Times,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._members = members
        self._leadership = leadership
        self._registry = registry
        self._orders = orders
        self._grace_s = times.grace_s
        self._hold_s = WITHIN_S + times.clock_skew_s
        self._clock = clock
        self._since: dict[Digest, float] = {}
        self._stamps: dict[Digest, int] = {}
        self._told: dict[Digest, dict[str, int]] = {}
        """Which life has dropped a digest, and the number of its latest beat by then."""
        self._taken_over: dict[Digest, float] = {}

    def told_nobody(self) -> None:
        """Others have led since this process told anybody anything."""
        self._told.clear()

    async def round(self, epoch: int) -> None:
        """Take every condemned digest one step on. Raises Unavailable when Redis is away."""
        entries = await self._store.journal(keys.CONDEMNED, 0, MAX_WAITING)
        now = self._clock()
        stamps = {Digest(entry): number for entry, number in entries}
        # One that was stamped again had a name meanwhile, or is to have one: its time begins anew.
        again = {digest for digest, number in stamps.items() if self._stamps.get(digest) != number}
        self._since = {digest: now if digest in again else self._since[digest] for digest in stamps}
        self._stamps = stamps
        digests = sorted(self._since, key=lambda digest: now - self._since[digest] < self._grace_s)[:MAX_LOOKED_AT]
        self._told = {digest: told for digest, told in self._told.items() if digest in self._since}
        self._taken_over = {digest: at for digest, at in self._taken_over.items() if now - at < self._hold_s}
        records = await self._store.get_many([keys.digest(digest) for digest in digests], DigestRecord)
        if digests:
            await self._registry.refresh()  # after the records were read: a name that came in between shows
        async with asyncio.TaskGroup() as group:
            for digest, record in zip(digests, records, strict=True):
                group.create_task(self._try(_Case(digest, record), epoch))

    async def _try(self, case: _Case, epoch: int) -> None:
        """One step, or none this time: what is in the way of one digest is not in the way of others."""
        try:
            await self._step(case, epoch)
        except InfiniLoraError as error:
            logger.warning("adapter not deleted yet", extra={"adapter_id": case.digest, "reason": error.message})

    async def _step(self, case: _Case, epoch: int) -> None:
        state = case.record.value.state if case.record else "live"
        match fate(
            state,
            is_named=case.digest in self._registry.digests(),
            is_leased=self._is_leased(case.digest),
            unseen_s=self._clock() - self._since[case.digest],
            grace_s=self._grace_s,
        ):
            case "keep":
                await self._keep(case, epoch)
            case "drop":
                await self._store.swap([fence(epoch), case.change(DigestRecord(state="dying", epoch=epoch))])
            case "forget":
                await self._forget(case, epoch)
            case "wait":
                return

    async def _keep(self, case: _Case, epoch: int) -> None:
        """Some name leads to it: look at it no more, and let go of references that lead nowhere."""
        refs = case.record.value.refs if case.record else ()
        held = tuple(ref for ref in refs if self._registry.holds(ref.partition("@")[0], case.digest))
        changes = [fence(epoch), case.change(DigestRecord(refs=held))]
        await self._store.swap(changes, also=[Unstamp(keys.CONDEMNED, case.digest)])

    async def _forget(self, case: _Case, epoch: int) -> None:
        """Have every process drop it; once all have, delete the object and then the record."""
        if case.record is None or case.record.value.epoch != epoch:
            await self._take_over(case, epoch)
            return
        there = [m for m in self._members.all() if m.health != "dead" and m.beat.kind in ("lora-server", "engine")]
        told = self._told.setdefault(case.digest, {})
        untold = [member for member in there if self._is_to_be_told(member, case.digest)]
        took = await asyncio.gather(*(self._has_dropped(member, case.digest, epoch) for member in untold))
        told |= {_life(member): member.beat.seq for member, taken in zip(untold, took, strict=True) if taken}
        is_held = any(case.digest in _held(member) for member in there)
        may_arrive = case.digest in self._taken_over
        if is_held or may_arrive or not all(took) or self._leadership.holding != epoch:
            return
        await self._delete(case, epoch)

    async def _take_over(self, case: _Case, epoch: int) -> None:
        if await self._store.swap([fence(epoch), case.change(DigestRecord(state="dying", epoch=epoch))]):
            self._taken_over[case.digest] = self._clock()

    async def _delete(self, case: _Case, epoch: int) -> None:
        """The objects, then the record: whoever has lost the lead meanwhile deletes none of them."""
        objects = (keys.reference(case.digest), keys.packed(case.digest))
        deletions = [await asyncio.to_thread(self._blobs.deletion, name, within_s=WITHIN_S) for name in objects]
        if not await self._store.swap([fence(epoch), case.unchanged()]):
            return
        for delete in deletions:
            await asyncio.to_thread(delete)
        changes = [fence(epoch), case.change(None)]
        if await self._store.swap(changes, also=[Unstamp(keys.CONDEMNED, case.digest)]):
            logger.info("adapter deleted", extra={"adapter_id": case.digest})

    def _is_to_be_told(self, member: Member, digest: Digest) -> bool:
        """Also of whoever has it still, or again: a request that lost its engine may have asked for it since."""
        told_at = self._told[digest].get(_life(member))
        if told_at is None:
            return True
        return member.beat.seq > told_at and digest in _held(member) and not self._is_leased(digest)

    async def _has_dropped(self, member: Member, digest: Digest, epoch: int) -> bool:
        return await self._orders.give(member, Forget(digest=digest), epoch) == TAKEN

    def _is_leased(self, digest: Digest) -> bool:
        return any(
            isinstance(member.beat.load, EngineLoad) and digest in member.beat.load.digests
            for member in self._members.all()
            if member.health != "dead"
        )


def _life(member: Member) -> str:
    return f"{member.beat.kind}/{member.beat.id}/{member.beat.incarnation}"


def _held(member: Member) -> tuple[Digest, ...]:
    match member.beat.load:
        case GroupLoad(resident=held):
            return held
        case EngineLoad(digests=leased, resident=held):
            return leased + held
        case None:
            return ()
