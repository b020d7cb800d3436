import math
from itertools import pairwise
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from infinilora.pool.evict import HALF_LIFE_S, Candidate, EvictionOrder, Heat, candidate, choose_victims
from infinilora.protocol.ids import Digest

DIGESTS = [Digest(f"sha256:{i:064x}") for i in range(12)]
members = st.lists(
    st.builds(Candidate, worth=st.floats(-50, 50), digest=st.sampled_from(DIGESTS), num_bytes=st.integers(1, 1000)),
    max_size=12,
    unique_by=lambda c: c.digest,
).map(sorted)


def one(name: str, num_bytes: int, heat: float, *, reload_s: float = 1.0) -> Candidate:
    return candidate(Digest(name), num_bytes, level=math.log2(heat), reload_s=reload_s)


def victims(*pool: Candidate, need_bytes: int, need_slots: int) -> tuple[str, ...] | None:
    return choose_victims(sorted(pool), need_bytes=need_bytes, need_slots=need_slots)


def test_the_coldest_of_one_size_goes_first() -> None:
    pool = [one("hot", 10, 5.0), one("cold", 10, 0.1), one("warm", 10, 1.0)]
    assert victims(*pool, need_bytes=10, need_slots=1) == ("cold",)


def test_of_one_heat_the_largest_and_the_cheapest_to_reload_goes_first() -> None:
    assert victims(one("s", 10, 1.0), one("l", 99, 1.0), need_bytes=1, need_slots=0) == ("l",)
    pool = [one("slow", 10, 1.0, reload_s=9.0), one("fast", 10, 1.0, reload_s=0.1)]
    assert victims(*pool, need_bytes=1, need_slots=0) == ("fast",)


def test_no_victim_is_taken_in_vain() -> None:
    assert victims(one("small", 1, 0.01), one("large", 100, 1.0), need_bytes=100, need_slots=1) == ("large",)


@given(members, st.integers(0, 3000), st.integers(0, 5))
def test_victims_suffice_and_are_minimal(pool: list[Candidate], need_bytes: int, need_slots: int) -> None:
    chosen = choose_victims(pool, need_bytes=need_bytes, need_slots=need_slots)
    free_to_go = {c.digest: c for c in pool}
    if chosen is None:
        assert sum(c.num_bytes for c in pool) < need_bytes or len(pool) < need_slots
        return
    sizes = [free_to_go[d].num_bytes for d in chosen]
    assert sum(sizes) >= need_bytes
    assert len(chosen) >= need_slots
    for size in sizes:
        assert sum(sizes) - size < need_bytes or len(sizes) - 1 < need_slots


class Use(NamedTuple):
    """So long after the one before, of this adapter."""

    after_s: float
    digest: Digest


uses = st.lists(st.builds(Use, st.floats(0.001, 500.0), st.sampled_from(DIGESTS)), max_size=40)


@given(uses, st.floats(0.0, 2000.0), st.lists(st.sampled_from(DIGESTS), max_size=4))
def test_the_order_is_that_of_worth_at_any_later_time(told: list[Use], later_s: float, gone: list[Digest]) -> None:
    """worth = heat * reload_s / num_bytes, reckoned at that time; the order is put together as they are used."""
    heat, order, now = Heat(), EvictionOrder(), 1000.0
    costs = {d: (1 + 37 * i % 11, 0.1 + 0.3 * (i % 5)) for i, d in enumerate(DIGESTS)}
    for use in told:
        now += use.after_s
        heat.warm(use.digest, now)
        num_bytes, reload_s = costs[use.digest]
        order.add(candidate(use.digest, num_bytes, level=heat.level(use.digest), reload_s=reload_s))
    for digest in gone:
        order.discard(digest)
    worths = [heat.of(c.digest, now + later_s) * costs[c.digest][1] / costs[c.digest][0] for c in order]
    assert {c.digest for c in order} == {use.digest for use in told} - set(gone)
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(worths))


def test_one_that_was_never_used_is_worth_least_and_ties_go_by_digest() -> None:
    heat = Heat()
    heat.warm(Digest("0"), 0.0)
    found = [candidate(Digest(d), 10, level=heat.level(Digest(d)), reload_s=1.0) for d in ("0", "b", "a")]
    assert [c.digest for c in sorted(found)] == ["a", "b", "0"]


def test_heat_fades_by_half_in_a_half_life_and_the_order_does_not_drown_in_days() -> None:
    heat = Heat()
    for digest, when_s in (("a", 0.0), ("b", HALF_LIFE_S)):
        heat.warm(Digest(digest), when_s)
    assert heat.of(Digest("b"), HALF_LIFE_S) == 2 * heat.of(Digest("a"), HALF_LIFE_S)
    assert heat.level(Digest("b")) == heat.level(Digest("a")) + 1.0
    heat.warm(Digest("c"), 1e7)
    heat.warm(Digest("d"), 1e7 + 1.0)
    assert heat.level(Digest("a")) < heat.level(Digest("c")) < heat.level(Digest("d"))
