"""Deltas computed by LoRA servers: leases over control streams, activations over links.

    asyncio loop                              step thread
      a GroupLink for every known group         want* / drop / view           the book, under its lock
      reconcile(): book -> lease messages       begin / submit / add / end    the links' EngineEnds
      messages  -> book                         verify                        what devices added has come
                                                                              * and from any other thread

A link that dies takes its leases with it: they go back to WAITING and are asked of another group, or of the
same one when it is back. A step that waited on it gets StepLost and is run again.
"""

import asyncio
import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from torch import Tensor

from infinilora.engine.lora.book import LeaseBook
from infinilora.engine.lora.calls import GonePart, Part, RemoteTicket, StepCalls
from infinilora.engine.lora.choose import Group, choose_group
from infinilora.engine.lora.columns import ColumnsPart
from infinilora.engine.lora.deadlines import SiteClock
from infinilora.engine.lora.grouplink import GroupLink, Identity, open_link
from infinilora.engine.lora.interface import (
    AdapterRows,
    Lease,
    LeaseView,
    OnChange,
    Routing,
    StepLost,
    StepPlan,
    Ticket,
)
from infinilora.engine.lora.layout import Layout
from infinilora.engine.lora.offers import GroupOffers
from infinilora.engine.lora.scales import column_scales, read_scale, scale_rows
from infinilora.link.errors import LinkClosed, LinkError, LinkNotOpened, LinkRefused
from infinilora.link.frame import NO_TRACE, PlanSegment
from infinilora.link.open import LinkSettings
from infinilora.pool.bind import TORCH_DTYPES
from infinilora.pool.slices import WHOLE, SiteSlices
from infinilora.protocol import lora_pb2
from infinilora.protocol.adapter import BaseCard, Site
from infinilora.protocol.errors import AdapterFailed, InfiniLoraError, Internal, WireError, from_wire
from infinilora.protocol.ids import Digest
from infinilora.runtime.rpc import Channels, Message

logger = logging.getLogger(__name__)

KEPT_CALLS = 4
"""Sets of rows whose calls are kept ready: a step's, those of the rows it samples from, and some to come back to."""

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 0.5


class RemotePlan:
    """One step over links."""

    def __init__(self, step_id: int, calls: StepCalls) -> None:
        self.step_id = step_id
        self.calls = calls

    @property
    def num_rows(self) -> int:
        return self.calls.layout.num_rows

    def adapts(self, layer: int, site: Site) -> bool:
        return bool(self.calls.layout.ranges(layer, site))

    def window(self, start: int, stop: int) -> StepPlan | None:
        calls = self.calls.window(start, stop)
        return RemotePlan(self.step_id, calls) if calls.layout.rows else None


class RemoteLora:
    """The LoraBackend over LoRA server groups. `run` keeps its links; it belongs to the asyncio loop."""

    def __init__(
        self,
        card: BaseCard,
        identity: Identity,
        *,
        channels: Channels,
        link: LinkSettings,
        on_change: OnChange,
        slices: SiteSlices | None = None,
    ) -> None:
        """`slices`: the columns that this shard of an engine has."""
        self._slices = slices or {}
        self._card = card
        self._geometry = card.geometry()
        self._dtype = TORCH_DTYPES[identity.dtype]
        self._identity = identity
        self._channels = channels
        self._offers = GroupOffers(link)
        self._on_change = on_change
        self._book = LeaseBook()
        self._lock = threading.Lock()
        self._links: dict[str, GroupLink] = {}
        self._groups: dict[str, Group] = {}
        self.placed: Mapping[Digest, Collection[str]] = {}
        """The groups that are to hold an adapter; read on the asyncio loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fleet_changed = asyncio.Event()
        self._clocks = {site: SiteClock() for site in Site}
        self._waits: dict[Site, float] = {}
        self._recent: list[StepCalls] = []
        self._steps = 0
        self._open_plans = 0
        self._unverified: dict[GroupLink, set[Digest]] = {}
        """Whose deltas were asked for over a link since `verify`, and not found lost before it."""
        self._has_narrowed = False

    # The asyncio loop: fleet, links, lease messages ------------------------------------------------

    async def run(self) -> None:
        """Keep a link to every group until cancelled."""
        self._loop = asyncio.get_running_loop()
        keepers: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._fleet_changed.clear()
                for name in self._groups.keys() - keepers.keys():
                    keepers[name] = tasks.create_task(self._keep(name), name=f"link to {name}")
                for name in keepers.keys() - self._groups.keys():
                    keepers.pop(name).cancel()
                await self._fleet_changed.wait()

    def update_groups(self, groups: Sequence[Group]) -> None:
        """The groups of this engine's base that may be used now. An open link outlives its group's silence."""
        known = {group.name: group for group in groups}
        with self._lock:
            open_links = set(self._links)
        self._groups = {
            name: known.get(name) or self._groups[name] for name in known.keys() | (open_links & self._groups.keys())
        }
        self._fleet_changed.set()

    @property
    def open_links(self) -> dict[str, str]:
        """Group -> back-end, of the links that are open."""
        with self._lock:
            return {name: link.backend for name, link in self._links.items() if link.is_alive}

    async def _keep(self, name: str) -> None:
        backoff_s = FIRST_BACKOFF_S
        address = ""
        while name in self._groups:
            group = self._groups[name]
            if address not in ("", group.address):
                await self._channels.forget(address)
            address = group.address
            try:
                offers = self._offers.to(group)
                opening = open_link(self._channels, name, group.address, self._identity, offers, card=self._card)
                async with opening as link:
                    backoff_s = FIRST_BACKOFF_S
                    await self._live(link)
                    logger.warning("link ended", extra={"group": name, "reason": link.reason})
                    if name in self._groups:
                        self._offers.failed(group, link.backend, link.reason, was_open=True)
            except (InfiniLoraError, OSError) as error:
                logger.warning("no link", extra={"group": name, "reason": str(error)})
                if isinstance(error, LinkNotOpened):
                    self._offers.failed(group, error.backend, error.message)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _live(self, link: GroupLink) -> None:
        with self._lock:
            self._links[link.group] = link
        self._reconcile()
        try:
            await link.run(partial(self._take, link))
        finally:
            self._forget(link, link.reason)

    def _take(self, link: GroupLink, message: Message) -> None:
        match message.WhichOneof("message"):
            case "granted":
                news = message.granted
                self._has_narrowed |= link.narrows
                self._book.grant(
                    Lease(
                        Digest(news.digest),
                        link.group,
                        news.slot,
                        news.slot_generation,
                        tuple(news.layer_sites),
                        column_scales(news.layer_sites, news.scaled_sites),
                        self._has_narrowed,
                    )
                )
            case "scale":
                self._take_scale(link.group, message.scale)
            case "layers":
                ready = message.layers
                self._book.layers_ready(
                    link.group,
                    Digest(ready.digest),
                    slot=ready.slot,
                    slot_generation=ready.slot_generation,
                    count=ready.count,
                )
            case "failed":
                self._refused(link.group, message.failed)
            case other:
                raise Internal(f"group {link.group} sent {other!r} after its welcome")
        self._on_change()

    def _take_scale(self, group: str, news: Message) -> None:
        scale = read_scale(news, self._geometry)
        digest = Digest(news.digest)
        self._book.put_scale(group, digest, scale, slot=news.slot, slot_generation=news.slot_generation)

    def _refused(self, group: str, failed: Message) -> None:
        """A failure that another group may not share is tried there; one of the adapter itself is final."""
        digest = Digest(failed.digest)
        error = from_wire(WireError(code=failed.code, message=failed.message))
        elsewhere = self._choose(digest, self._book.refused_by(digest) | {group})
        is_final = not error.retryable or elsewhere is None
        extra = {"adapter_id": digest, "group": group, "code": failed.code, "reason": failed.message}
        logger.warning("lease refused", extra=extra)
        self._book.refuse(group, digest, error, is_final=is_final)
        if not is_final:
            self._reconcile()

    def _reconcile(self) -> None:
        """Tell the groups what the book says: give up what nobody wants, ask for what nobody was asked for."""
        with self._lock:
            for digest, group in self._book.take_unwanted():
                self._send(group, lora_pb2.EngineMessage(release=lora_pb2.LeaseRelease(digest=digest)))
            for digest, refused_by in self._book.unasked():
                chosen = self._choose(digest, refused_by)
                if chosen is not None:
                    self._book.ask(digest, chosen)
                    self._send(chosen, lora_pb2.EngineMessage(lease=lora_pb2.LeaseRequest(digest=digest)))

    def _choose(self, digest: Digest, refused_by: Collection[str]) -> str | None:
        placed = self.placed.get(digest, ()) if self.placed else None
        return choose_group(digest, self._candidates(), placed, refused_by)

    def _candidates(self) -> list[Group]:
        """Groups with a link that is open now."""
        return [self._groups[n] for n, link in self._links.items() if link.is_alive and n in self._groups]

    def _send(self, group: str, message: Message) -> None:
        link = self._links.get(group)
        if link is not None:
            link.send(message)

    def _forget(self, link: GroupLink, reason: str) -> None:
        """The link is dead, and every lease it carried. Any thread; harmless when repeated."""
        with self._lock:
            if self._links.get(link.group) is not link:
                return
            del self._links[link.group]
            self._recent = []  # what holds its memory
            self._book.group_lost(link.group)
        link.die(reason)
        self._wake_loop()
        self._on_change()

    def _wake_loop(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._reconcile)

    # The step thread ------------------------------------------------------------------------------

    def want(self, digest: Digest) -> None:
        if self._book.want(digest):
            self._wake_loop()

    def drop(self, digest: Digest) -> None:
        if self._book.drop(digest):
            self._wake_loop()

    def view(self, digest: Digest) -> LeaseView:
        return self._book.view(digest)

    def begin(self, rows: Sequence[AdapterRows], trace: bytes = b"") -> StepPlan | None:
        if not rows:
            return None
        self._steps += 1
        self._open_plans += 1
        calls = self._calls_of(tuple(rows))
        gone = {link for link, segments in calls.plans if not self._send_plan(link, segments, trace or NO_TRACE)}
        calls = calls.without(gone) if gone else calls
        for span, link in zip(calls.layout.spans, calls.links, strict=True):
            if link is not None:
                self._unverified.setdefault(link, set()).update(span.digests)
        return RemotePlan(self._steps, calls)

    def _calls_of(self, rows: tuple[AdapterRows, ...]) -> StepCalls:
        """Those of the last step with these rows, as long as its links are the ones of now."""
        recent = self._recent
        last = next((calls for calls in recent if calls.layout.rows == rows), None)
        layout = Layout(rows) if last is None else last.layout
        with self._lock:
            links = tuple(self._links.get(span.group) for span in layout.spans)
        calls = last if last is not None and last.links == links else None
        if calls is None:
            calls = StepCalls(layout, links, self._geometry, self._clocks, self._dtype, self._slices)
        self._recent = [calls, *(other for other in recent if other is not last)][:KEPT_CALLS]
        return calls

    def _send_plan(self, link: GroupLink, segments: Sequence[PlanSegment], trace: bytes) -> bool:
        try:
            for end in link.ends:
                end.send_plan(self._steps, segments, trace=trace)
        except LinkError as error:
            self._break(link, error)
            return False
        return True

    def submit(
        self, plan: StepPlan, layer: int, site: Site, x: Tensor, routing: Routing | None = None
    ) -> Ticket | None:
        assert isinstance(plan, RemotePlan)
        call = plan.calls.find(layer, site, x, routing)
        return None if call is None else call.send(plan.step_id, layer, x, routing)

    def add(self, ticket: Ticket | None, y: Tensor) -> None:
        if ticket is None:
            return
        assert isinstance(ticket, RemoteTicket)
        call, clock = ticket.call, ticket.call.clock
        if call.under_way is not ticket:
            raise StepLost(call.digests, "its step is over, or its delta was added already")
        if call.layout.has_scales:
            cut = self._slices.get((ticket.layer, call.site), WHOLE)
            scale_rows(call.layout.scaled(ticket.layer, call.site), ticket.layer, call.site, y, cut)
        for part in call.parts:
            try:
                clock.took_s.append(self._wait(part, y, clock.deadline_s))
            finally:
                waited_s = sum(ticket.waited_s for ticket in part.tickets)
                self._waits[call.site] = self._waits.get(call.site, 0.0) + waited_s
        call.under_way = None

    def _wait(self, part: Part | ColumnsPart | GonePart, y: Tensor, deadline_s: float) -> float:
        """Add one part's delta to y; the seconds it took. Raises StepLost."""
        if isinstance(part, GonePart):
            raise StepLost(part.span.digests, f"the link to group {part.span.group} was gone")
        try:
            return part.wait(y, deadline_s)
        except LinkError as error:
            self._unverified.get(part.link, set()).difference_update(part.span.digests)
            self._failed(part.link, part.span.digests, error)
            raise StepLost(part.span.digests, error.message) from error

    def verify(self) -> None:
        """One wait for each link of the steps since the last time. A link that fails loses all rows that used it."""
        unverified, self._unverified = self._unverified, {}
        lost, reasons = set[Digest](), list[str]()
        for link, digests in unverified.items():
            try:
                for end in link.ends:
                    end.verify()
            except LinkError as error:
                self._failed(link, frozenset(digests), error)
                lost |= digests
                reasons.append(error.message)
        if lost:
            raise StepLost(frozenset(lost), "; ".join(reasons))

    def _failed(self, link: GroupLink, digests: frozenset[Digest], error: LinkError) -> None:
        """A refusal leaves the link whole; anything else is its end."""
        if isinstance(error, LinkRefused):
            self._ask_again(link.group, digests, error)
        else:
            self._break(link, error)

    def _ask_again(self, group: str, digests: frozenset[Digest], error: LinkRefused) -> None:
        """The server does not (or not yet) grant what we took for granted: have the leases told anew."""
        if error.refusal.code == AdapterFailed.code:
            self._book.ask_again(group, digests)
            self._wake_loop()

    def _break(self, link: GroupLink, error: LinkError) -> None:
        if not isinstance(error, LinkClosed):
            for end in link.ends:  # a peer may still write there: none is ever used again
                end.quarantine()
        logger.warning("link broken", extra={"group": link.group, "reason": error.message})
        self._forget(link, error.message)

    def end(self, plan: StepPlan) -> None:
        assert isinstance(plan, RemotePlan)
        self._open_plans -= 1
        plan.calls.end()
        for link, _ in plan.calls.plans:
            for end in link.ends:
                end.abandon()
        for clock in self._clocks.values():
            clock.catch_up()

    def take_waits(self) -> dict[Site, float]:
        waits, self._waits = self._waits, {}
        return waits

    def close(self) -> None:
        """End every link. `run` is cancelled by whoever spawned it."""
        self._groups = {}
        with self._lock:
            links = list(self._links.values())
        for link in links:
            self._forget(link, "this engine closes")

    def check(self) -> None:
        assert not self._book.num_holders(), f"{self._book.num_holders()} adapters are still held"
        assert not self._open_plans, f"{self._open_plans} steps were never ended"
        with self._lock:
            waiting = {name: sum(e.num_outstanding for e in link.ends) for name, link in self._links.items()}
        assert not any(waiting.values()), f"site calls were never waited for: {waiting}"
