"""The slot table by table and by a machine that plays pool, loader, engines and coordinator at random."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinilora.pool.slots import SlotTable
from infinilora.pool.tenancy import Drain, Limits, Place, Refuse, SlotState
from infinilora.protocol.errors import AdapterFailed, Overloaded, Unavailable
from infinilora.protocol.ids import Digest

LIMITS = Limits(max_bypass=3, age_after_s=2.0, max_wait_s=10.0)
LAYERS = 3


class Pool:
    """The least that a pool does with decisions: memory is there, and loads end when told to."""

    def __init__(self, *, num_slots: int = 8, capacity_bytes: int = 100) -> None:
        self.table = SlotTable(num_slots=num_slots, capacity_bytes=capacity_bytes, limits=LIMITS)
        self.now = 0.0
        self.refused: dict[str, Exception] = {}

    def settle(self) -> None:
        while decision := self.table.decide(self.now):
            match decision:
                case Drain(slot=slot, slot_generation=generation):
                    self.table.emptied(slot, generation)
                case Place(digest=digest):
                    self.table.place(digest, self.now)
                case Refuse(digest=digest, error=error):
                    self.table.refuse(digest)
                    self.refused[digest] = error

    def want(self, name: str, num_bytes: int | None = 10, *, holder: str = "e") -> None:
        self.table.lease(holder, Digest(name), self.now)
        if num_bytes is not None:
            self.table.sized(Digest(name), num_bytes=num_bytes, num_layers=LAYERS, now=self.now)
        self.settle()

    def load(self, name: str, num_bytes: int = 10, *, holder: str = "e") -> None:
        self.want(name, num_bytes, holder=holder)
        slot = self.table.slot_of(Digest(name))
        assert slot is not None
        self.table.layers_ready(slot.index, slot.slot_generation, LAYERS, self.now)

    def release(self, name: str, *, holder: str = "e") -> None:
        self.table.release(holder, Digest(name), self.now)
        self.settle()

    def is_placed(self, name: str) -> bool:
        return self.table.slot_of(Digest(name)) is not None


def test_a_cold_adapter_of_unknown_size_delays_nobody() -> None:
    pool = Pool()
    pool.want("unknown", None)
    pool.now += 5.0
    pool.want("known", 90)
    assert pool.is_placed("known")
    assert not pool.is_placed("unknown")


def test_one_that_is_too_big_now_is_passed_by_those_that_fit() -> None:
    pool = Pool()
    pool.load("in use", 60)
    pool.want("big", 80)
    pool.want("small", 10)
    assert pool.is_placed("small")
    assert not pool.is_placed("big")


def test_it_is_passed_a_stated_number_of_times_and_no_more() -> None:
    pool = Pool()
    pool.load("in use", 60)
    pool.want("big", 90)
    for i in range(LIMITS.max_bypass + 2):
        pool.want(f"small {i}", 5)
    assert [pool.is_placed(f"small {i}") for i in range(LIMITS.max_bypass + 2)] == [True] * 3 + [False] * 2


def test_an_aged_one_keeps_what_comes_free_and_gets_its_turn() -> None:
    pool = Pool()
    pool.load("a", 50)
    pool.load("b", 50)
    pool.want("big", 90)
    pool.now += LIMITS.age_after_s
    pool.release("a")
    pool.want("later", 10)
    assert not pool.is_placed("a")
    assert not pool.is_placed("later")
    pool.release("b")
    assert pool.is_placed("big")
    assert pool.is_placed("later")


def test_resident_adapters_are_leased_whoever_waits() -> None:
    pool = Pool()
    pool.load("hot", 50)
    pool.want("big", 90)
    pool.now += LIMITS.age_after_s
    assert pool.table.lease("another engine", Digest("hot"), pool.now) is not None


def test_one_that_waits_too_long_is_refused_as_overloaded() -> None:
    pool = Pool()
    pool.load("in use", 60)
    pool.want("big", 80)
    pool.now += LIMITS.max_wait_s
    pool.settle()
    assert isinstance(pool.refused["big"], Overloaded)
    assert not pool.table.waiting


def test_one_larger_than_the_pool_fails_at_once_and_says_both_sizes() -> None:
    pool = Pool()
    pool.want("huge", 101)
    assert isinstance(pool.refused["huge"], AdapterFailed)
    assert "101 bytes" in str(pool.refused["huge"])
    assert "has 100" in str(pool.refused["huge"])


def test_one_that_pins_leave_no_room_for_is_refused_at_once() -> None:
    pool = Pool()
    pool.load("pinned", 60)
    pool.table.pin(Digest("pinned"), pinned=True)
    pool.release("pinned")
    pool.want("big", 80)
    assert isinstance(pool.refused["big"], Overloaded)
    assert pool.is_placed("pinned")


def test_a_resident_adapter_stays_until_its_room_is_needed_and_the_coldest_goes() -> None:
    pool = Pool()
    for name in ("a", "b"):
        pool.load(name, 50)
        pool.release(name)
    pool.now = 1.0
    pool.want("a")
    pool.release("a")
    assert pool.is_placed("a")
    assert pool.is_placed("b")
    pool.want("c", 40)
    assert pool.is_placed("a")
    assert not pool.is_placed("b")


def test_a_load_that_nobody_wants_any_more_is_stopped() -> None:
    pool = Pool()
    pool.want("a")
    pool.table.release("e", Digest("a"), pool.now)
    assert isinstance(pool.table.decide(pool.now), Drain)


def test_a_new_tenancy_has_a_new_slot_generation() -> None:
    pool = Pool(num_slots=1)
    pool.load("a")
    first = pool.table.slots[0].slot_generation
    pool.release("a")
    pool.load("b")
    assert pool.table.slots[0].slot_generation == first + 1


def test_news_of_an_old_tenancy_are_ignored() -> None:
    pool = Pool(num_slots=1)
    pool.load("a")
    old = pool.table.slots[0].slot_generation
    pool.release("a")
    pool.want("b")
    assert pool.table.layers_ready(0, old, LAYERS, pool.now) is None
    assert pool.table.slots[0].layers_ready == 0


def test_a_failed_load_takes_the_lease_from_every_holder() -> None:
    pool = Pool()
    pool.want("a", holder="e1")
    pool.want("a", holder="e2")
    holders, drain = pool.table.failed(Digest("a"))
    assert holders == ("e1", "e2")
    assert drain is not None
    assert pool.table.num_leases == 0


def test_an_evict_hint_never_breaks_a_lease_and_a_new_lease_overrules_it() -> None:
    pool = Pool()
    pool.load("a")
    pool.load("b")
    pool.table.evict(Digest("a"))
    pool.table.evict(Digest("b"))
    pool.settle()
    assert pool.is_placed("a")
    pool.want("a", holder="e2")
    pool.release("a")
    pool.release("a", holder="e2")
    pool.release("b")
    assert pool.is_placed("a")
    assert not pool.is_placed("b")


def test_hints_wait_behind_leases_and_push_out_nothing_that_is_hinted() -> None:
    pool = Pool()
    pool.table.stage(Digest("hinted"))
    pool.table.sized(Digest("hinted"), num_bytes=60, num_layers=LAYERS, now=0.0)
    pool.want("leased", 50)
    assert not pool.is_placed("hinted")
    pool.release("leased")
    pool.settle()
    assert pool.is_placed("hinted")
    slot = pool.table.slot_of(Digest("hinted"))
    assert slot is not None
    pool.table.layers_ready(slot.index, slot.slot_generation, LAYERS, 0.0)
    pool.table.stage(Digest("other hint"))
    pool.table.sized(Digest("other hint"), num_bytes=60, num_layers=LAYERS, now=0.0)
    pool.settle()
    assert pool.is_placed("hinted")


def test_a_hint_that_is_taken_back_gives_way_to_another_and_is_there_until_then() -> None:
    pool = Pool(num_slots=1)
    pool.load("hinted")
    pool.table.stage(Digest("hinted"))
    pool.release("hinted")
    pool.table.unhint(Digest("hinted"))
    pool.settle()
    assert pool.is_placed("hinted")
    pool.table.stage(Digest("other hint"))
    pool.table.sized(Digest("other hint"), num_bytes=10, num_layers=LAYERS, now=0.0)
    pool.settle()
    assert pool.is_placed("other hint")
    assert not pool.is_placed("hinted")


def test_a_pin_comes_before_other_hints_and_pushes_out_what_is_hinted() -> None:
    pool = Pool(num_slots=2)
    for name in ("hinted", "also hinted"):
        pool.load(name)
        pool.table.stage(Digest(name))
        pool.release(name)
    for name in ("other hint", "pinned"):
        pool.table.stage(Digest(name))
        pool.table.sized(Digest(name), num_bytes=10, num_layers=LAYERS, now=0.0)
    pool.settle()
    assert not pool.is_placed("pinned")
    pool.table.pin(Digest("pinned"), pinned=True)
    pool.settle()
    assert pool.is_placed("pinned")
    assert not pool.is_placed("other hint")
    assert pool.is_placed("hinted") != pool.is_placed("also hinted")


def test_a_pin_pushes_out_nothing_that_is_leased() -> None:
    pool = Pool(num_slots=1)
    pool.load("leased")
    pool.table.pin(Digest("pinned"), pinned=True)
    pool.table.sized(Digest("pinned"), num_bytes=10, num_layers=LAYERS, now=0.0)
    pool.settle()
    assert pool.is_placed("leased")
    pool.release("leased")
    assert pool.is_placed("pinned")


def test_a_draining_pool_keeps_leases_and_grants_no_new_one() -> None:
    pool = Pool()
    pool.load("a")
    pool.table.is_draining = True
    assert pool.table.lease("e", Digest("a"), 0.0) is not None
    with pytest.raises(Unavailable, match="ask another"):
        pool.table.lease("other", Digest("a"), 0.0)


def test_room_in_too_many_pieces_pushes_out_one_more() -> None:
    pool = Pool()
    pool.load("a", 20)
    pool.release("a")
    pool.table.lease("e", Digest("b"), 0.0)
    pool.table.sized(Digest("b"), num_bytes=70, num_layers=LAYERS, now=0.0)
    assert isinstance(pool.table.decide(0.0), Place)
    pool.table.no_room(Digest("b"))
    drain = pool.table.decide(0.0)
    assert isinstance(drain, Drain)
    assert drain.digest == "a"
    assert pool.table.decide(0.0) is None, "it waits for the memory that is on its way"
    pool.table.emptied(drain.slot, drain.slot_generation)
    assert isinstance(pool.table.decide(0.0), Place)


def test_an_aged_one_that_finds_too_little_begins_with_what_is_worth_least() -> None:
    pool = Pool()
    pool.load("in use", 20)
    for name in ("hot", "cold"):
        pool.load(name, 30)
        pool.release(name)
    pool.now += 1.0
    pool.table.lease("e", Digest("hot"), pool.now)
    pool.release("hot")
    pool.table.lease("e", Digest("big"), pool.now)
    pool.table.sized(Digest("big"), num_bytes=90, num_layers=LAYERS, now=pool.now)
    assert pool.table.decide(pool.now) is None
    pool.now += LIMITS.age_after_s
    drains = [pool.table.decide(pool.now), pool.table.decide(pool.now)]
    assert [d.digest for d in drains if isinstance(d, Drain)] == ["cold", "hot"]


def test_a_use_that_has_just_ended_counts() -> None:
    """Of 1 + 2^(-100/60) uses at 100 s, and 2 of 50 s before: 2 * 2^(-50/60), which is less."""
    pool = Pool()
    pool.load("long", 50)
    pool.now = 50.0
    pool.load("short", 50)
    pool.release("short")
    pool.now = 100.0
    pool.release("long")
    for name in ("long", "short"):
        slot = pool.table.slot_of(Digest(name))
        assert slot is not None
        assert slot.reload_s == 1e-4
    pool.want("wanted", 50)
    assert pool.is_placed("long")
    assert not pool.is_placed("short")


def test_an_unpinned_adapter_may_go() -> None:
    pool = Pool(num_slots=1)
    pool.load("pinned")
    pool.table.pin(Digest("pinned"), pinned=True)
    pool.release("pinned")
    pool.table.pin(Digest("pinned"), pinned=False)
    pool.want("wanted")
    assert pool.is_placed("wanted")


SIZES = {Digest(f"d{i}"): size for i, size in enumerate((20, 40, 60, 90))}
NAMES = st.sampled_from(sorted(SIZES))
HOLDERS = st.sampled_from(["e0", "e1"])


class Life(RuleBasedStateMachine):
    """A model beside the table: what each holder has been told it may use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(num_slots=3, capacity_bytes=100, limits=LIMITS, first_generation=7)
        self.now = 0.0
        self.leases: dict[tuple[str, Digest], tuple[int, int]] = {}
        self.wants: dict[tuple[str, Digest], float] = {}
        self.stopping: list[tuple[int, int]] = []
        self.tenancies: set[tuple[int, int]] = set()

    def settle(self) -> None:
        for _ in range(200):
            decision = self.table.decide(self.now)
            match decision:
                case None:
                    return
                case Drain(slot=slot, slot_generation=generation):
                    assert (slot, generation) not in self.leases.values(), "a leased slot was drained"
                    self.stopping.append((slot, generation))
                case Place(digest=digest):
                    slot_ = self.table.place(digest, self.now)
                    tenancy = (slot_.index, slot_.slot_generation)
                    assert tenancy not in self.tenancies, "a tenancy came twice"
                    self.tenancies.add(tenancy)
                    for holder in slot_.holders:
                        del self.wants[holder, digest]
                        self.leases[holder, digest] = tenancy
                case Refuse(digest=digest):
                    for holder in self.table.refuse(digest):
                        del self.wants[holder, digest]
        raise AssertionError("decide never comes to rest")

    @rule(holder=HOLDERS, digest=NAMES, is_size_known=st.booleans())
    def lease(self, holder: str, digest: Digest, is_size_known: bool) -> None:
        slot = self.table.lease(holder, digest, self.now)
        if is_size_known:
            self.table.sized(digest, num_bytes=SIZES[digest], num_layers=LAYERS, now=self.now)
        if slot:
            self.wants.pop((holder, digest), None)
            self.leases[holder, digest] = (slot.index, slot.slot_generation)
        else:
            self.wants.setdefault((holder, digest), self.now)
        self.settle()

    @rule(holder=HOLDERS, digest=NAMES)
    def release(self, holder: str, digest: Digest) -> None:
        self.table.release(holder, digest, self.now)
        self.leases.pop((holder, digest), None)
        self.wants.pop((holder, digest), None)
        self.settle()

    @rule(holder=HOLDERS)
    def a_holder_dies(self, holder: str) -> None:
        held = self.table.held_by(holder)
        assert set(held) == {d for h, d in (*self.leases, *self.wants) if h == holder}
        for digest in held:
            self.release(holder, digest)

    @rule(digest=NAMES)
    def size(self, digest: Digest) -> None:
        self.table.sized(digest, num_bytes=SIZES[digest], num_layers=LAYERS, now=self.now)
        self.settle()

    @rule(digest=NAMES, count=st.integers(1, LAYERS))
    def layers_come(self, digest: Digest, count: int) -> None:
        if slot := self.table.slot_of(digest):
            count = LAYERS if count > 1 else count
            self.table.layers_ready(slot.index, slot.slot_generation, count, self.now)
            self.settle()

    @rule(digest=NAMES)
    def fail(self, digest: Digest) -> None:
        holders, drain = self.table.failed(digest)
        for holder in holders:
            assert self.leases.pop((holder, digest), None) or self.wants.pop((holder, digest), -1.0) >= 0.0
        if drain:
            self.stopping.append((drain.slot, drain.slot_generation))
        self.settle()

    @precondition(lambda self: self.stopping)
    @rule(data=st.data())
    def a_load_stops(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.stopping) - 1))
        self.table.emptied(*self.stopping.pop(index))
        self.settle()

    @rule(digest=NAMES, kind=st.sampled_from(["stage", "unhint", "evict", "pin", "unpin"]))
    def command(self, digest: Digest, kind: str) -> None:
        match kind:
            case "stage":
                self.table.stage(digest)
            case "unhint":
                self.table.unhint(digest)
            case "evict":
                self.table.evict(digest)
            case _:
                self.table.pin(digest, pinned=kind == "pin")
        self.settle()

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @rule(digest=NAMES)
    def memory_is_in_pieces(self, digest: Digest) -> None:
        entry = self.table.waiting.get(digest)
        if entry and any(s.state is not SlotState.EMPTY for s in self.table.slots):
            self.table.no_room(digest)
            self.settle()

    @invariant()
    def the_table_is_sound(self) -> None:
        self.table.check()

    @invariant()
    def what_may_go_is_in_order_of_its_worth_now(self) -> None:
        """By the definition: heat * reload_s / num_bytes. `check` compares who they are."""
        slots = [self.table.slot_of(c.digest) for c in self.table._evictable]
        worths = [self.table._heat.of(s.digest, self.now) * s.reload_s / s.num_bytes for s in slots if s and s.digest]
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(worths))

    @invariant()
    def every_lease_stands_on_the_tenancy_it_was_granted(self) -> None:
        for (holder, digest), (index, generation) in self.leases.items():
            slot = self.table.slots[index]
            assert (slot.digest, slot.slot_generation) == (digest, generation)
            assert holder in slot.holders
        assert len(self.leases) == self.table.num_leases

    @invariant()
    def nobody_of_known_size_waits_beyond_the_bound(self) -> None:
        for entry in self.table.waiting.values():
            if entry.num_bytes is not None:
                assert self.now - entry.since < LIMITS.max_wait_s
                assert entry.bypassed <= LIMITS.max_bypass or not entry.holders

    @invariant()
    def nobody_waits_for_room_that_is_there(self) -> None:
        sized = [w for w in self.table.waiting.values() if w.num_bytes is not None and w.holders]
        if not sized or self.stopping or any(w.split_at is not None for w in sized):
            return
        first = sized[0]
        has_slot = any(s.state is SlotState.EMPTY for s in self.table.slots)
        assert not (has_slot and (first.num_bytes or 0) <= self.table.free_bytes)


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
