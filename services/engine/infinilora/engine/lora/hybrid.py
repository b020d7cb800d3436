"""Deltas of the hottest adapters computed here, those of all others by LoRA servers: two back-ends behind one door.

rows  | a a a | b | c c | d |  base  |        a, c are local:   | a a a |   | c c |         computed in `add`, while
                                              b, d are remote:          | b |     | d |     these are on their way

A digest is held of the LoRA servers until it is resident here, and here until the LoRA servers have it again, and no
row waits for that. Which rows of a step go where, their leases say. A request warms its adapter, and the choice of the
hottest is made again at each; but it comes while a step runs, so what was held of the wrong one is let go at a `drop`.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from infinilora.engine.lora.hottest import choose_hottest, heats_of
from infinilora.engine.lora.interface import (
    AdapterRows,
    LeaseStatus,
    LeaseView,
    LoraBackend,
    Routing,
    StepPlan,
    Ticket,
)
from infinilora.engine.lora.local import GROUP
from infinilora.pool.evict import HALF_LIFE_S, Heat
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import Overloaded, Unavailable
from infinilora.protocol.ids import Digest

LEAST_HEAT = 1.5 * math.log(2) / HALF_LIFE_S
"""Of an adapter that is brought here: it was asked for twice within a half-life."""
MOST_KNOWN = 256
"""Adapters that the choice is made of: those used last."""


class Sizes(Protocol):
    """The part of AdapterPool that the choice needs."""

    def size_of(self, digest: Digest) -> int | None: ...

    @property
    def capacity_bytes(self) -> int: ...


@dataclass(slots=True)
class _Held:
    """One wanted digest: who wants it here, and of whom we want it."""

    holders: int = 0
    here: bool = False
    there: bool = False


@dataclass(frozen=True, slots=True)
class HybridPlan:
    """One step's rows in two plans; None where one of them has none."""

    here: StepPlan | None
    there: StepPlan | None

    @property
    def num_rows(self) -> int:
        return max(plan.num_rows for plan in (self.here, self.there) if plan is not None)

    def adapts(self, layer: int, site: Site) -> bool:
        return any(plan.adapts(layer, site) for plan in (self.here, self.there) if plan is not None)

    def window(self, start: int, stop: int) -> StepPlan | None:
        here, there = (None if plan is None else plan.window(start, stop) for plan in (self.here, self.there))
        return None if here is None and there is None else HybridPlan(here, there)


@dataclass(frozen=True, slots=True)
class HybridTicket:
    """Deltas of both kinds at one site."""

    here: Ticket | None
    there: Ticket | None


class HybridLora:
    """A LoraBackend over two, which it owns: `remote` for any adapter, `local` over a pool for the hottest."""

    def __init__(
        self, remote: LoraBackend, local: LoraBackend, pool: Sizes, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._remote = remote
        self._local = local
        self._pool = pool
        self._clock = clock
        self._lock = threading.Lock()
        self._heat = Heat()
        self._recent: dict[Digest, None] = {}
        self._sizes: dict[Digest, int] = {}
        self._hot: frozenset[Digest] = frozenset()
        self._held: dict[Digest, _Held] = {}
        self._unfit: set[Digest] = set()
        """Not chosen any more: too large for our pool, or broken."""
        self._has_narrowed = False
        """Whether rows of any adapter may have been narrowed: the keys and values that are kept may come of them."""

    @property
    def hot(self) -> frozenset[Digest]:
        """The adapters chosen to be computed here, whether they are here yet or not."""
        return self._hot

    # Leases -----------------------------------------------------------------------------------------

    def want(self, digest: Digest) -> None:
        with self._lock:
            held = self._held.setdefault(digest, _Held())
            held.holders += 1
            self._choose(digest)
            self._ask(digest, held)

    def drop(self, digest: Digest) -> None:
        with self._lock:
            held = self._held[digest]
            held.holders -= 1
            if not held.holders:
                del self._held[digest]
                if held.here:
                    self._local.drop(digest)
                if held.there:
                    self._remote.drop(digest)
            self._settle_moving()

    def view(self, digest: Digest) -> LeaseView:
        """Here as soon as it is resident here; else what the LoRA servers say."""
        with self._lock:
            held = self._held.get(digest)
            if held is not None and held.here:
                view = self._local.view(digest)
                if view.lease is not None and view.status is LeaseStatus.RESIDENT:
                    return replace(view, lease=replace(view.lease, may_narrow=True)) if self._has_narrowed else view
                if not held.there:  # it was here, and is lost
                    self._settle(digest, held)
            view = self._remote.view(digest)
            self._has_narrowed |= view.lease is not None and view.lease.may_narrow
            return view

    def _choose(self, digest: Digest) -> None:
        now = self._clock()
        self._heat.warm(digest, now)
        self._recent.pop(digest, None)
        self._recent[digest] = None
        if len(self._recent) > MOST_KNOWN:
            self._recent.pop(next(iter(self._recent)))
        self._learn_sizes()
        scores = {d: self._heat.of(d, now) for d in self._recent if d not in self._unfit}
        self._hot = choose_hottest(
            heats_of(scores, self._sizes),
            self._hot,
            capacity_bytes=self._pool.capacity_bytes,
            least_heat=LEAST_HEAT,
        )

    def _learn_sizes(self) -> None:
        for digest in self._hot - self._sizes.keys():
            num_bytes = self._pool.size_of(digest)
            if num_bytes is not None:
                self._sizes[digest] = num_bytes
        for digest in self._sizes.keys() - self._recent.keys():
            del self._sizes[digest]

    def _settle_moving(self) -> None:
        """Whoever is held of both, or of the wrong one, may have arrived where it belongs."""
        for digest, held in self._held.items():
            if held.here != (digest in self._hot) or held.there == held.here:
                self._settle(digest, held)

    def _ask(self, digest: Digest, held: _Held) -> bool:
        """Have it asked for where it belongs, and there as long as it is not resident here. Whether it is."""
        if digest in self._hot and not held.here:
            self._local.want(digest)
            held.here = True
        is_here = held.here and self._is_here(digest)
        if not held.there and not (is_here and digest in self._hot):
            self._remote.want(digest)
            held.there = True
        return is_here

    def _settle(self, digest: Digest, held: _Held) -> None:
        """Hold it where it belongs; and where it is now, until it has arrived there."""
        is_here = self._ask(digest, held)
        is_hot = digest in self._hot
        if is_hot and is_here and held.there:
            self._remote.drop(digest)
            held.there = False
        is_there = held.there and self._remote.view(digest).status is LeaseStatus.RESIDENT
        if held.here and not is_hot and (is_there or not is_here):
            self._local.drop(digest)
            held.here = False

    def _is_here(self, digest: Digest) -> bool:
        """Whether it is resident here. One that failed is not hot any more: LoRA servers have the last word on it."""
        view = self._local.view(digest)
        if view.status is LeaseStatus.FAILED:
            self._hot -= {digest}
            if not isinstance(view.error, Overloaded | Unavailable):
                self._unfit.add(digest)
        return view.status is LeaseStatus.RESIDENT

    # A step -----------------------------------------------------------------------------------------

    def begin(self, rows: Sequence[AdapterRows], trace: bytes = b"") -> StepPlan | None:
        here = self._local.begin([r for r in rows if r.lease.group == GROUP], trace)
        there = self._remote.begin([r for r in rows if r.lease.group != GROUP], trace)
        return None if here is None and there is None else HybridPlan(here, there)

    def submit(
        self, plan: StepPlan, layer: int, site: Site, x: Tensor, routing: Routing | None = None
    ) -> Ticket | None:
        assert isinstance(plan, HybridPlan)
        there = None if plan.there is None else self._remote.submit(plan.there, layer, site, x, routing)
        here = None if plan.here is None else self._local.submit(plan.here, layer, site, x, routing)
        return None if here is None and there is None else HybridTicket(here, there)

    def add(self, ticket: Ticket | None, y: Tensor) -> None:
        """Ours first: theirs are on their way meanwhile."""
        if ticket is None:
            return
        assert isinstance(ticket, HybridTicket)
        self._local.add(ticket.here, y)
        self._remote.add(ticket.there, y)

    def verify(self) -> None:
        self._local.verify()
        self._remote.verify()

    def end(self, plan: StepPlan) -> None:
        assert isinstance(plan, HybridPlan)
        if plan.here is not None:
            self._local.end(plan.here)
        if plan.there is not None:
            self._remote.end(plan.there)

    def take_waits(self) -> dict[Site, float]:
        """Theirs: what is computed here waits for nobody."""
        return self._remote.take_waits()

    def close(self) -> None:
        self._local.close()
        self._remote.close()

    def check(self) -> None:
        assert not self._held, f"adapters are still held: {list(self._held)}"
        self._local.check()
        self._remote.check()
