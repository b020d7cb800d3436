"""Deltas computed by LoRA servers: leases over control streams, activations over links.

    asyncio loop                              step thread
      a GroupLink for every known group         want* / drop / view           the book, under its lock
      reconcile(): book -> lease messages       begin / submit / add / end    the links' EngineEnds
      messages  -> book                         verify                        what devices added has come
                                                                              * and from any other thread

The left side is `groups.LoraGroups`; the right is here. A step that waited on a link that dies gets StepLost and is
run again.
"""

import logging
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from infinilora.engine.lora.calls import GonePart, Part, RemoteTicket, StepCalls
from infinilora.engine.lora.choose import Group
from infinilora.engine.lora.columns import ColumnsPart
from infinilora.engine.lora.deadlines import SiteClock
from infinilora.engine.lora.grouplink import GroupLink, Identity
from infinilora.engine.lora.groups import LoraGroups
from infinilora.engine.lora.interface import AdapterRows, LeaseView, OnChange, Routing, StepLost, StepPlan, Ticket
from infinilora.engine.lora.layout import Layout
from infinilora.engine.lora.scales import scale_rows
from infinilora.link.errors import LinkClosed, LinkError, LinkRefused
from infinilora.link.frame import NO_TRACE, PlanSegment
from infinilora.link.open import LinkSettings
from infinilora.pool.bind import TORCH_DTYPES
from infinilora.pool.slices import WHOLE, SiteSlices
from infinilora.protocol.adapter import BaseCard, Site
from infinilora.protocol.errors import AdapterFailed
from infinilora.protocol.ids import Digest
from infinilora.runtime.rpc import Channels

logger = logging.getLogger(__name__)

KEPT_CALLS = 4
"""Sets of rows whose calls are kept ready: a step's, those of the rows it samples from, and some to come back to."""


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
    """The LoraBackend over LoRA server groups. `run` keeps the links to them; it belongs to the asyncio loop."""

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
        self._geometry = card.geometry()
        self._dtype = TORCH_DTYPES[identity.dtype]
        self._groups = LoraGroups(
            card, identity, channels=channels, link=link, on_change=on_change, on_loss=self._forget_calls
        )
        self._clocks = {site: SiteClock() for site in Site}
        self._waits: dict[Site, float] = {}
        self._recent: list[StepCalls] = []
        self._steps = 0
        self._open_plans = 0
        self._unverified: dict[GroupLink, set[Digest]] = {}
        """Whose deltas were asked for over a link since `verify`, and not found lost before it."""

    # The groups: links and leases ------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a link to every group until cancelled."""
        await self._groups.run()

    def update_groups(self, groups: Sequence[Group]) -> None:
        """The groups of this engine's base that may be used now. An open link outlives its group's silence."""
        self._groups.update(groups)

    def place(self, placed: Mapping[Digest, Collection[str]]) -> None:
        """The groups that are to hold an adapter, as they are from now on; read on the asyncio loop."""
        self._groups.placed = placed

    @property
    def open_links(self) -> dict[str, str]:
        """Group -> back-end, of the links that are open."""
        return self._groups.backends()

    def want(self, digest: Digest) -> None:
        self._groups.want(digest)

    def drop(self, digest: Digest) -> None:
        self._groups.drop(digest)

    def view(self, digest: Digest) -> LeaseView:
        return self._groups.view(digest)

    def close(self) -> None:
        """End every link. `run` is cancelled by whoever spawned it."""
        self._groups.close()

    def _forget_calls(self) -> None:
        """They hold the memory of their links. Any thread."""
        self._recent = []

    # The step thread ------------------------------------------------------------------------------

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
        links = self._groups.links_to(span.group for span in layout.spans)
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
        if not isinstance(error, LinkRefused):
            self._break(link, error)
        elif error.refusal.code == AdapterFailed.code:
            self._groups.ask_again(link.group, digests)

    def _break(self, link: GroupLink, error: LinkError) -> None:
        if not isinstance(error, LinkClosed):
            for end in link.ends:  # a peer may still write there: none is ever used again
                end.quarantine()
        logger.warning("link broken", extra={"group": link.group, "reason": error.message})
        self._groups.forget(link, error.message)

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

    def check(self) -> None:
        assert not self._open_plans, f"{self._open_plans} steps were never ended"
        self._groups.check()
