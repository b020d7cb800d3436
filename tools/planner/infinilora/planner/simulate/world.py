"""A whole fleet on one timeline: requests in, outcomes out. Who decides what is in the services' policies.

requests -> SimGateway -> SimEngine (Scheduler) -> Desk -> SimPool (SlotTable), of the engine or of a group
^              |                                ^
+-- heartbeats +------- placement: coordinator -+
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from infinilora.coordinator.heat import copies
from infinilora.coordinator.placement import Adapter, Group, Table, by_group, copies_of, place
from infinilora.engine.lora.choose import Group as GroupBeat
from infinilora.engine.sched.scheduler import LeaseState, Limits
from infinilora.planner.simulate.costs import Costs
from infinilora.planner.simulate.desk import Desk
from infinilora.planner.simulate.engine import EngineSize, SimEngine
from infinilora.planner.simulate.fleet import Failure, Fleet, check_fleet
from infinilora.planner.simulate.load import Request
from infinilora.planner.simulate.outcome import Ended
from infinilora.planner.simulate.pool import SimPool
from infinilora.planner.simulate.pricing import OWN, Pricing
from infinilora.planner.simulate.routing import Beat, SimGateway
from infinilora.planner.simulate.sequence import CountedSequence
from infinilora.planner.simulate.timeline import Timeline
from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.ids import Digest

BLOCK_TOKENS = 16
STALL_S = 3600.0
"""Of virtual time in which nothing happens while requests wait: nothing ever will, and the run is given up."""
FILL = 0.9
"""Of a group's bytes that placement plans with, as the coordinator does."""


def digest_at(adapter: int) -> Digest:
    return Digest(f"adapter-{adapter:06d}")


class World:
    """One run. `sizes[i]`: bytes of adapter i. Run it once."""

    def __init__(
        self,
        fleet: Fleet,
        costs: Costs,
        sizes: Sequence[int],
        requests: Sequence[Request],
        *,
        on_end: Callable[[Ended], None],
        can_stretch: bool = True,
    ) -> None:
        check_fleet(fleet)
        self.timeline = Timeline()
        self.link_rows = self.num_ended = 0
        self._fleet, self._costs, self._requests, self._on_end = fleet, costs, requests, on_end
        self._digests = [digest_at(i) for i in range(len(sizes))]
        self.sizes = dict(zip(self._digests, sizes, strict=True))
        self._asked: Counter[Digest] = Counter()
        self._tables: dict[str, Table] = {"engines": {}, "groups": {}}
        self._places: dict[str, dict[Digest, frozenset[str]]] = {"engines": {}, "groups": {}}
        self.groups = {f"group-{i:03d}": self._group(f"group-{i:03d}") for i in range(fleet.groups * fleet.has_groups)}
        self.engines: dict[str, SimEngine] = {}
        self.own: dict[str, SimPool] = {}
        self._desks: dict[str, Desk] = {}
        self._pricing = Pricing(costs, self.sizes, lambda engine: self._desks[engine].homes)
        for index in range(fleet.engines):
            self._add_engine(f"engine-{index:03d}", can_stretch=can_stretch)
        self._beats = {key: Beat() for key in self.engines}
        self._gateways = [
            SimGateway(fleet.routing, self._beats, lambda digest: self._places["engines"].get(digest, frozenset()))
            for _ in range(fleet.gateways)
        ]
        self._placed_at: dict[int, str] = {}
        self._back_s: dict[str, float] = {}
        self._num_arrived = 0
        self._progress, self._progress_s = 0, 0.0

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """To the end of the last request, or until told. InvalidRequest where some could wait for ever."""
        self._next_request(0)
        self._replan()
        self._beat()
        for failure in self._fleet.failures:
            self.timeline.at(failure.at_s, partial(self._fail, failure))
        self.timeline.run(lambda: self.num_ended == len(self._requests) or until())

    # What there is ---------------------------------------------------------------------------------

    def _pool(self, name: str, num_bytes: int, tell: Callable[[str, Digest, LeaseState], None]) -> SimPool:
        fleet = self._fleet
        pool = SimPool(
            name,
            self.timeline,
            self._costs.load,
            self.sizes,
            tell,
            pool_bytes=num_bytes,
            host_bytes=fleet.host_bytes,
            slots=min(
                fleet.slots, num_bytes // min(self.sizes.values(), default=num_bytes) + 1
            ),  # more are never filled
        )
        if fleet.is_host_warm:
            pool.warm_host(self._digests[::-1])
        if fleet.is_pool_warm:
            pool.warm_pool(self._digests)
        return pool

    def _group(self, name: str) -> SimPool:
        return self._pool(
            name, self._fleet.group_bytes, lambda holder, digest, state: self._desks[holder].told(name, digest, state)
        )

    def _add_engine(self, key: str, *, can_stretch: bool) -> None:
        fleet = self._fleet
        if fleet.has_pools:
            self.own[key] = self._pool(
                key, fleet.engine_bytes, lambda holder, digest, state: self._desks[holder].told(OWN, digest, state)
            )
        desk = self._desks[key] = Desk(
            key,
            self.timeline,
            self.own.get(key),
            self.groups,
            lease_s=self._costs.lease_s.value,
            sizes=self.sizes,
            placed=self._placed,
            heard=lambda engine, digest: self.engines[engine].heard(digest),
        )
        limits = Limits(fleet.max_running, fleet.step_tokens, tpot_s=fleet.tpot_ms / 1000)
        self.engines[key] = SimEngine(
            key,
            EngineSize(limits, fleet.kv_tokens // BLOCK_TOKENS, BLOCK_TOKENS),
            self.timeline,
            self._pricing,
            desk.leases,
            on_end=self._ended,
            can_stretch=can_stretch,
        )

    def _placed(self, digest: Digest) -> frozenset[str] | None:
        """Where the coordinator wants it; None: there is one group, and so no placement."""
        return self._places["groups"].get(digest, frozenset()) if len(self.groups) > 1 else None

    # Requests --------------------------------------------------------------------------------------

    def _next_request(self, index: int) -> None:
        if index < len(self._requests):
            request = self._requests[index]
            self.timeline.at(request.arrival_s, lambda: self._arrive(index))

    def _arrive(self, index: int) -> None:
        request = self._requests[index]
        self._next_request(index + 1)
        self._num_arrived += 1
        digest = self._digest_of(request)
        if digest is not None:
            self._asked[digest] += 1
        self._send(CountedSequence(request, digest, now=self.timeline.now))

    def _digest_of(self, request: Request) -> Digest | None:
        return None if request.adapter < 0 else self._digests[request.adapter]

    def _send(self, sequence: CountedSequence) -> None:
        engine = self._gateway_of(sequence.request).route(sequence.digest)
        if engine is None:  # nobody is there: the gateway's client retries
            self.timeline.at(self.timeline.now + self._fleet.heartbeat_s, lambda: self._send(sequence))
            return
        self._placed_at[sequence.request.id] = engine
        self.engines[engine].add(sequence)

    def _gateway_of(self, request: Request) -> SimGateway:
        return self._gateways[request.id % len(self._gateways)]

    def _ended(self, sequence: CountedSequence, is_done: bool) -> None:  # noqa: FBT001 - as a callback gives it
        request, now = sequence.request, self.timeline.now
        engine = self._placed_at.pop(request.id)
        self._gateway_of(request).ended(engine)
        self.num_ended += 1
        if sequence.digest is not None and self._desks[engine].group_of(sequence.digest) != OWN:
            self.link_rows += request.output if request.is_prefilled else request.prompt + request.output - 1
        first_s, tpot_s = sequence.first_s, None
        if first_s is not None and request.output > 1 and is_done:
            tpot_s = (now - first_s) / (request.output - 1)
        ttft_s = None if first_s is None else first_s - request.arrival_s + self._costs.gateway_s.value
        self._on_end(Ended(request.id, request.adapter, ttft_s, tpot_s, is_done))

    # What comes round ------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Every engine and group tells how it is."""
        for key, engine in self.engines.items():
            own = self.own.get(key)
            held = frozenset(engine.leases.wanted)
            self._beats[key].take(engine, held if own is None else held | frozenset(own.table.resident()))
        groups = [
            GroupBeat(
                name=name,
                address=name,
                incarnation="",
                bytes_free=pool.table.free_bytes,
                leases=pool.num_leases,
                resident=frozenset(pool.table.resident()),
            )
            for name, pool in self.groups.items()
        ]
        for desk in self._desks.values():
            desk.beat(groups)
        self._look_for_progress()
        self.timeline.at(self.timeline.now + self._fleet.heartbeat_s, self._beat)

    def _look_for_progress(self) -> None:
        waiting, now = self._num_arrived - self.num_ended, self.timeline.now
        progress = self._num_arrived + self.num_ended + sum(engine.num_steps for engine in self.engines.values())
        if not waiting or progress != self._progress:
            self._progress, self._progress_s = progress, now
        elif now - self._progress_s > STALL_S:
            raise InvalidRequest(
                f"found {waiting} requests that still wait after {STALL_S:g} s in which nothing happened; wanted a "
                "fleet that serves them: failures that end, and fleet.kv_tokens for the longest prompt and output",
                param="scenario",
            )

    def _replan(self) -> None:
        """Homes of adapters, by what was asked for since the last time."""
        fleet = self._fleet
        if fleet.routing == "home":
            everything = sum(self.sizes.values())
            self._place("engines", dict.fromkeys(self.engines, everything), fill=1.0)
        if len(self.groups) > 1:
            self._place("groups", dict.fromkeys(self.groups, fleet.group_bytes), fill=FILL)
        if fleet.routing == "home" or len(self.groups) > 1:
            self._asked.clear()
            self.timeline.at(self.timeline.now + fleet.replan_s, self._replan)

    def _place(self, kind: str, capacities: dict[str, int], *, fill: float) -> None:
        """One copy more for each fair share of all requests that an adapter has."""
        rps = {digest: self._asked[digest] / self._fleet.replan_s for digest in self._digests}
        fair, had = sum(rps.values()) / len(capacities) or 1.0, copies_of(self._tables[kind])
        adapters = [
            Adapter(d, self.sizes[d], rps=rps[d], copies=copies(rps[d], fair, had.get(d, 0))) for d in self._digests
        ]
        groups = [Group(name, num_bytes) for name, num_bytes in capacities.items()]
        plan = place(groups, adapters, self._tables[kind], fill=fill)
        self._tables[kind] = by_group(plan, groups)
        self._places[kind] = {digest: frozenset(home.groups) for digest, home in plan.items()}

    # Failures --------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        back_s = self.timeline.now + failure.for_s
        if failure.kind == "engine":
            self._fail_engine(list(self.engines)[failure.index], back_s)
        else:
            self._fail_group(list(self.groups)[failure.index], back_s)

    def _fail_engine(self, key: str, back_s: float) -> None:
        """Gateways see its connections end, and go on elsewhere with what each sequence has."""
        self._beats[key].is_alive = False
        for sequence in self.engines[key].die():
            self._gateway_of(sequence.request).ended(key)
            again = CountedSequence(
                sequence.request, sequence.digest, now=self.timeline.now, produced=sequence.num_produced
            )
            again.first_s = sequence.first_s
            self.timeline.at(self.timeline.now + self._fleet.detect_s, partial(self._send, again))
        if own := self.own.get(key):
            own.die()
            own.rise()
        self._rise_at(back_s, key, lambda: setattr(self._beats[key], "is_alive", True))

    def _fail_group(self, name: str, back_s: float) -> None:
        for holder, digest in self.groups[name].die():
            self._desks[holder].lost(name, digest, self._fleet.detect_s)
        self._rise_at(back_s, name, self.groups[name].rise)

    def _rise_at(self, back_s: float, name: str, rise: Callable[[], None]) -> None:
        """Of failures that overlap, the one that lasts longest has the last word."""
        self._back_s[name] = max(back_s, self._back_s.get(name, 0.0))
        self.timeline.at(back_s, lambda: rise() if back_s >= self._back_s[name] else None)
