"""The coupled mode: adapters live in this process's own pool, and deltas are computed where they are added.

The same pool, kernels and checks as a LoRA server's; what is missing is the other process. A delta is computed
in `add`, straight into y: nothing runs beside the base product, so an own buffer would only cost.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from infinilora.engine.lora.interface import (
    AdapterRows,
    Lease,
    LeaseStatus,
    LeaseView,
    OnChange,
    Routing,
    StepLost,
    StepPlan,
    Ticket,
)
from infinilora.engine.lora.layout import Layout, Range
from infinilora.engine.lora.scales import column_scales, scale_rows
from infinilora.pool.execute import SiteCall, StepWork, TenancyRows, execute
from infinilora.pool.pool import AdapterPool, LeaseState
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import AdapterError
from infinilora.protocol.ids import Digest

HOLDER = "engine"
GROUP = "this engine"
"""No LoRA server's group is called so: a subject of the bus has no blanks."""


class LocalPlan:
    """One step's rows as the pool's execution takes them. `first`: the row of `work` that is row 0 of `layout`."""

    def __init__(self, layout: Layout, work: StepWork, first: int = 0) -> None:
        self.layout = layout
        self.work = work
        self.first = first

    @property
    def num_rows(self) -> int:
        return self.layout.num_rows

    def adapts(self, layer: int, site: Site) -> bool:
        return bool(self.layout.ranges(layer, site))

    def window(self, start: int, stop: int) -> StepPlan | None:
        layout = self.layout.window(start, stop)
        return LocalPlan(layout, self.work, self.first + start) if layout.rows else None


@dataclass(frozen=True, slots=True)
class LocalTicket:
    """A delta not computed yet, and what it is computed from."""

    plan: LocalPlan
    layer: int
    site: Site
    x: Tensor
    routing: Routing | None
    ranges: tuple[Range, ...]


class LocalLora:
    """The LoraBackend over a pool, which it does not own. Its one holder there is this engine."""

    def __init__(self, pool: AdapterPool, on_change: OnChange, *, first_expert: int = 0) -> None:
        """`first_expert`: of those that the pool holds, where it is the share of an engine's shard."""
        self._first_expert = first_expert
        self._pool = pool
        self._grants = pool.grants(HOLDER)
        self._on_change = on_change
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        """So that the pool hears of the first and the last holder in this order. Taken before the pool's own lock."""
        self._holders: dict[Digest, int] = {}
        self._states: dict[Digest, LeaseState] = {}
        self._leases: dict[Digest, Lease] = {}
        """One for a tenancy: a layout is kept for as long as its leases are the same."""
        self._layout = Layout(())
        self._steps = 0
        self._open_plans = 0

    def want(self, digest: Digest) -> None:
        with self._asking:
            self._holders[digest] = self._holders.get(digest, 0) + 1
            if self._holders[digest] == 1:
                self._pool.lease(HOLDER, digest, self._changed)

    def drop(self, digest: Digest) -> None:
        with self._asking:
            self._holders[digest] -= 1
            if self._holders[digest]:
                return
            del self._holders[digest]
            self._pool.release(HOLDER, digest)
            with self._lock:
                self._states.pop(digest, None)
                self._leases.pop(digest, None)

    def view(self, digest: Digest) -> LeaseView:
        with self._lock:
            state, lease = self._states.get(digest), self._leases.get(digest)
        if state is None:
            return LeaseView(LeaseStatus.WAITING)
        if state.error is not None:
            return LeaseView(LeaseStatus.FAILED, error=state.error)
        if state.is_resident:
            return LeaseView(LeaseStatus.RESIDENT, lease)
        status = LeaseStatus.ADMISSIBLE if state.is_admissible else LeaseStatus.WAITING
        return LeaseView(status, lease, layers_ready=state.layers_ready)

    def begin(self, rows: Sequence[AdapterRows], trace: bytes = b"") -> StepPlan | None:  # noqa: ARG002
        if not rows:
            return None
        if self._layout.rows != tuple(rows):
            self._layout = Layout(rows)
        self._steps += 1
        self._open_plans += 1
        self._grants.stepped(row.lease.slot for row in rows)
        return LocalPlan(self._layout, StepWork(self._steps, [_tenancy(segment) for segment in rows]))

    def submit(
        self, plan: StepPlan, layer: int, site: Site, x: Tensor, routing: Routing | None = None
    ) -> Ticket | None:
        assert isinstance(plan, LocalPlan)
        ranges = plan.layout.ranges(layer, site)
        return LocalTicket(plan, layer, site, x, routing, ranges) if ranges else None

    def add(self, ticket: Ticket | None, y: Tensor) -> None:
        if ticket is None:
            return
        assert isinstance(ticket, LocalTicket)
        scale_rows(ticket.plan.layout.scaled(ticket.layer, ticket.site), ticket.layer, ticket.site, y)
        for rows in ticket.ranges:
            self._compute(ticket, y, rows)

    def _compute(self, ticket: LocalTicket, y: Tensor, rows: Range) -> None:
        at, routing = slice(rows.start, rows.stop), ticket.routing
        ids = ticket.x if ticket.site is Site.EMBED else None if routing is None else routing.topk_ids
        if ids is not None:
            ids = ids[at]
            if routing is not None and self._first_expert:
                ids = ids - self._first_expert  # the others', -1, stay below 0
        call = SiteCall(
            ticket.layer,
            ticket.site,
            ticket.plan.first + rows.start,
            ticket.x[at],
            y[at],
            ids,
            None if routing is None else routing.topk_weights[at],
        )
        try:
            execute(self._pool.kernels, self._grants, ticket.plan.work, call, accumulate=True)
        except AdapterError as error:
            raise StepLost(ticket.plan.layout.spans[rows.span].digests, error.message) from error

    def verify(self) -> None:
        """A delta that cannot be computed is told in `add`; on a device it runs before whatever reads y."""

    def end(self, plan: StepPlan) -> None:  # noqa: ARG002
        self._open_plans -= 1

    def take_waits(self) -> dict[Site, float]:
        """None: a delta is computed in `add`, which waits for nobody."""
        return {}

    def close(self) -> None:
        """Give every lease up; the pool stays open."""
        self._pool.drop(HOLDER)

    def check(self) -> None:
        assert not self._holders, f"adapters are still held: {self._holders}"
        assert not self._open_plans, f"{self._open_plans} steps were never ended"
        self._pool.check()

    def _changed(self, state: LeaseState) -> None:
        """From any thread, under the pool's lock."""
        with self._lock:
            self._states[state.digest] = state
            self._note_tenancy(state)
        self._on_change()

    def _note_tenancy(self, state: LeaseState) -> None:
        """Keep the lease of this tenancy, with the column scales of the layers that are ready."""
        if state.error is not None:
            self._leases.pop(state.digest, None)
            return
        lease = self._leases.get(state.digest)
        if lease is None or (lease.slot, lease.slot_generation) != (state.slot, state.slot_generation):
            scales = column_scales(state.layer_sites, state.scaled_sites)
            lease = Lease(state.digest, GROUP, state.slot, state.slot_generation, state.layer_sites, scales)
            self._leases[state.digest] = lease
        if lease.scales is not None:
            for scale in state.scales:
                lease.scales.put(scale)


def _tenancy(segment: AdapterRows) -> TenancyRows:
    return TenancyRows(segment.row_start, segment.rows, segment.lease.slot, segment.lease.slot_generation)
