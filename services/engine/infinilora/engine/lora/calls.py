"""The site calls of a step over links: made ready once for a set of rows, and sent in every step that has them.

    StepCalls   rows and links that stay the same from step to step
    SiteCall    one site of it, for every layer where the same rows are adapted: a part for each span and slice
    Part        one prepared ticket of one shard; where experts are cut into columns, a ColumnsPart (columns.py)

A decode step repeats the shapes of the one before it, so that a call is little more than two native calls: what
is checked and laid out once is not checked again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from infinilora.engine.lora.columns import ColumnPicks, ColumnsPart
from infinilora.engine.lora.deadlines import SiteClock
from infinilora.engine.lora.grouplink import GroupLink
from infinilora.engine.lora.interface import Routing
from infinilora.engine.lora.layout import KEPT_WINDOWS, Layout, Range, Span
from infinilora.link import ports
from infinilora.link.engine_end import EngineEnd
from infinilora.link.frame import MAX_RUNS, Flag, Header, Kind, PlanSegment, column_slices
from infinilora.link.shapes import dtype_code
from infinilora.pool.slices import WHOLE, SiteSlice, SiteSlices
from infinilora.protocol.adapter import Site, SiteGeometry
from infinilora.protocol.ids import Digest
from infinilora.protocol.shards import HEAD

_NUM_SITES = max(Site) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The rows of one span, or a slice of their columns, to one shard of its group."""

    span: Span
    link: GroupLink
    end: EngineEnd
    ticket: ports.Ticket

    @property
    def tickets(self) -> tuple[ports.Ticket, ...]:
        return (self.ticket,)

    def wait(self, y: Tensor, deadline_s: float) -> float:
        """Add the delta to y; the seconds that it took. Raises LinkError."""
        return self.end.wait(self.ticket, y, deadline_s=deadline_s, add=True)


@dataclass(frozen=True, slots=True, eq=False)
class GonePart:
    """The rows of one span whose link was gone at the start."""

    span: Span
    tickets: tuple[ports.Ticket, ...] = ()


@dataclass(slots=True, eq=False)
class RemoteTicket:
    """A site call on its way to one or more groups. Good for one `add` within its step."""

    call: "SiteCall"
    layer: int


class SiteCall:
    """Rows of a step at one site. `under_way` is the ticket that may still be added: one at a time."""

    def __init__(
        self,
        layout: Layout,
        site: Site,
        parts: Sequence[Part | ColumnsPart | GonePart],
        clock: SiteClock,
        dtype: torch.dtype,
    ) -> None:
        self.layout = layout
        self.site = site
        self.parts = tuple(parts)
        self._whole = tuple(part for part in parts if isinstance(part, Part))
        self._cut = tuple(part for part in parts if isinstance(part, ColumnsPart))
        self.clock = clock
        self.under_way: RemoteTicket | None = None
        self._dtype = dtype

    @property
    def digests(self) -> frozenset[Digest]:
        return frozenset().union(*(part.span.digests for part in self.parts))

    @property
    def tickets(self) -> Iterator[ports.Ticket]:
        """Of the latest call, in the order in which they are waited for."""
        return chain.from_iterable(part.tickets for part in self.parts)

    def send(self, step_id: int, layer: int, x: Tensor, routing: Routing | None) -> RemoteTicket:
        """Send x [T, ...] as it is to every link that has a part. Never waits."""
        ids = weights = None
        if routing is not None:
            ids, weights = routing.topk_ids, routing.topk_weights if self.site is Site.MOE_DOWN else None
        elif self.site is Site.EMBED:
            x, ids = torch.empty(len(x), 0, dtype=self._dtype, device=x.device), x
        ticket = self.under_way = RemoteTicket(self, layer)
        for part in self._whole:
            part.end.send(part.ticket, step_id, layer, x, ids, weights)
        for cut in self._cut:
            cut.send(step_id, layer, x, routing)
        return ticket


class StepCalls:
    """The calls of one layout over one set of links: `links[n]` carries span n (None: there is none).

    `first`: the step's row that is row 0 of the layout, and of every x and y.
    """

    def __init__(
        self,
        layout: Layout,
        links: tuple[GroupLink | None, ...],
        geometry: Mapping[tuple[int, Site], SiteGeometry],
        clocks: Mapping[Site, SiteClock],
        dtype: torch.dtype,
        slices: SiteSlices | None = None,
        first: int = 0,
    ) -> None:
        """`slices`: the columns that this shard of an engine has; of a site that is not there, all."""
        self.layout = layout
        self.links = links
        self.plans = _plans(layout, links)
        self._slices = slices or {}
        self._geometry = geometry
        self._clocks = clocks
        self._dtype = dtype
        self._found: dict[int, SiteCall | None] = {}
        self._shared: dict[tuple[object, ...], SiteCall] = {}
        self._extra: list[SiteCall] = []
        self._first = first
        self._picks = ColumnPicks(first)
        self._windows: dict[tuple[int, int], StepCalls] = {}

    def find(self, layer: int, site: Site, x: Tensor, routing: Routing | None) -> SiteCall | None:
        """A call that may be sent; None where no row is adapted. x and routing say the widths when it is new."""
        at = layer * _NUM_SITES + site
        call = self._found[at] if at in self._found else self._find(layer, site, x, routing)
        if call is None or call.under_way is None:
            return call
        self._extra.append(self._make(layer, site, self.layout.ranges(layer, site), x, routing))
        return self._extra[-1]

    def without(self, gone: set[GroupLink]) -> "StepCalls":
        """The same rows without some of the links."""
        links = tuple(None if link in gone else link for link in self.links)
        return StepCalls(self.layout, links, self._geometry, self._clocks, self._dtype, self._slices)

    def window(self, start: int, stop: int) -> "StepCalls":
        """Those of rows [start, stop) alone, counted from `start`."""
        found = self._windows.get((start, stop))
        if found is None:
            layout = self.layout.window(start, stop)
            link_of = {span.group: link for span, link in zip(self.layout.spans, self.links, strict=True)}
            links = tuple(link_of[span.group] for span in layout.spans)
            found = StepCalls(
                layout, links, self._geometry, self._clocks, self._dtype, self._slices, self._first + start
            )
            if len(self._windows) >= KEPT_WINDOWS:
                self._windows.clear()
            self._windows[start, stop] = found
        return found

    def end(self) -> None:
        """The step is over: none of its tickets is added any more."""
        for window in self._windows.values():
            window.end()
        for call in chain(self._shared.values(), self._extra):
            call.under_way = None
        self._extra.clear()

    def _find(self, layer: int, site: Site, x: Tensor, routing: Routing | None) -> SiteCall | None:
        ranges = self.layout.ranges(layer, site)
        call = None
        if ranges:
            owners = tuple(self._owner(found, layer, site) for found in ranges)
            cut = self._slices.get((layer, site), WHOLE)
            key = (site, ranges, owners, self._geometry[layer, site].out_dim, cut, x.shape[1:], x.dtype)
            call = self._shared.get(key)
            if call is None:
                call = self._shared[key] = self._make(layer, site, ranges, x, routing)
        self._found[layer * _NUM_SITES + site] = call
        return call

    def _make(self, layer: int, site: Site, ranges: Sequence[Range], x: Tensor, routing: Routing | None) -> SiteCall:
        shape = self._shape(layer, site, x, routing)
        parts: list[Part | ColumnsPart | GonePart] = []
        for found in ranges:
            span, link = self.layout.spans[found.span], self.links[found.span]
            if link is None:
                parts.append(GonePart(span))
            elif link.sharding is not None and link.owner(layer, site) is None:
                geometry = self._geometry[layer, site]
                parts.append(ColumnsPart(span, link, link.sharding, found, shape, geometry, self._picks))
            else:
                end = link.ends[link.owner(layer, site) or HEAD]
                rows = shape._replace(row_start=self._first + found.start, rows=found.stop - found.start)
                cut = self._slices.get((layer, site), WHOLE)
                parts += [Part(span, link, end, ticket) for ticket in _tickets(end, rows, found.start, cut)]
        return SiteCall(self.layout, site, parts, self._clocks[site], self._dtype)

    def _owner(self, found: Range, layer: int, site: Site) -> int | None:
        """Which shard a range goes to; None where its link is gone, or to several."""
        link = self.links[found.span]
        return None if link is None else link.owner(layer, site)

    def _shape(self, layer: int, site: Site, x: Tensor, routing: Routing | None) -> Header:
        """What all rows of a call have in common; on the link a row is flat."""
        out_cols, in_cols, dtype = self._geometry[layer, site].out_dim, x.shape[1:].numel(), x.dtype
        topk, flags = (0, 0) if routing is None else (routing.topk_ids.shape[1], Flag.HAS_IDS)
        if site is Site.MOE_GATE_UP:
            out_cols *= max(topk, 1)
        elif site is Site.MOE_DOWN and routing is not None:
            flags |= Flag.HAS_WEIGHTS
        elif site is Site.EMBED:
            in_cols, dtype, topk, flags = 0, self._dtype, in_cols, Flag.HAS_IDS
        return Header(
            kind=Kind.SITE,
            flags=flags,
            site=site,
            in_cols=in_cols,
            out_cols=out_cols,
            topk=topk,
            dtype=dtype_code(dtype),
        )


def _tickets(end: EngineEnd, shape: Header, at: int, cut: SiteSlice) -> list[ports.Ticket]:
    """For rows from row `at` of x on: one, or one for each run of output columns that cannot come with others.

    Runs are those of a shard of an engine, or what fits a buffer of a row of lm_head.
    """
    if cut.inputs is not None:
        shape = shape._replace(in_begin=cut.inputs[0], in_end=cut.inputs[1])
    runs = cut.outputs or column_slices(shape.out_cols, shape.torch_dtype.itemsize, end.buffer_bytes)
    if not cut.outputs and (shape.site != Site.LM_HEAD or len(runs) == 1):
        return [end.prepare(shape, at=at)]
    if cut.outputs and end.takes_runs and len(runs) <= MAX_RUNS:
        whole = shape.asking(runs)
        if whole.row_bytes(whole.out_cols) <= end.buffer_bytes:
            return [end.prepare(whole, at=at)]
    tickets, out_at = [], 0
    for first, stop in runs:
        tickets.append(end.prepare(shape.asking([(first, stop)]), at=at, out_at=out_at))
        out_at += stop - first
    return tickets


def _plans(layout: Layout, links: Sequence[GroupLink | None]) -> list[tuple[GroupLink, list[PlanSegment]]]:
    """What each link is told at the start of a step: which of its rows belong to which tenancy."""
    plans: dict[GroupLink, list[PlanSegment]] = {}
    for span, link in zip(layout.spans, links, strict=True):
        if link is not None:
            plans.setdefault(link, []).extend(
                PlanSegment(s.row_start, s.rows, s.lease.slot, s.lease.slot_generation) for s in span.segments
            )
    return list(plans.items())
