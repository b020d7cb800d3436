from hypothesis import given
from hypothesis import strategies as st

from infinilora.pool.evict import Candidate, choose_victims
from infinilora.protocol.ids import Digest

candidates = st.lists(
    st.builds(
        Candidate,
        digest=st.integers(0, 10**6).map(lambda i: Digest(f"sha256:{i:064x}")),
        num_bytes=st.integers(1, 1000),
        heat=st.floats(0, 100),
        reload_s=st.floats(0.001, 10),
        is_pinned=st.booleans(),
        in_use=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda c: c.digest,
)


def candidate(name: str, num_bytes: int, heat: float, *, reload_s: float = 1.0, pinned: bool = False) -> Candidate:
    return Candidate(Digest(name), num_bytes, heat, reload_s, is_pinned=pinned)


def test_the_coldest_of_one_size_goes_first() -> None:
    pool = [candidate("hot", 10, 5.0), candidate("cold", 10, 0.1), candidate("warm", 10, 1.0)]
    assert choose_victims(pool, need_bytes=10, need_slots=1) == ("cold",)


def test_of_one_heat_the_largest_and_the_cheapest_to_reload_goes_first() -> None:
    assert choose_victims([candidate("s", 10, 1.0), candidate("l", 99, 1.0)], need_bytes=1, need_slots=0) == ("l",)
    pool = [candidate("slow", 10, 1.0, reload_s=9.0), candidate("fast", 10, 1.0, reload_s=0.1)]
    assert choose_victims(pool, need_bytes=1, need_slots=0) == ("fast",)


def test_a_pin_is_hard_however_cold() -> None:
    assert choose_victims([candidate("pinned", 10, 0.0, pinned=True)], need_bytes=1, need_slots=1) is None


def test_no_victim_is_taken_in_vain() -> None:
    pool = [candidate("small", 1, 0.0), candidate("large", 100, 1.0)]
    assert choose_victims(pool, need_bytes=100, need_slots=1) == ("large",)


@given(candidates, st.integers(0, 3000), st.integers(0, 5))
def test_victims_suffice_are_minimal_and_never_protected(
    pool: list[Candidate], need_bytes: int, need_slots: int
) -> None:
    chosen = choose_victims(pool, need_bytes=need_bytes, need_slots=need_slots)
    free_to_go = {c.digest: c for c in pool if not c.is_pinned and not c.in_use}
    if chosen is None:
        assert sum(c.num_bytes for c in free_to_go.values()) < need_bytes or len(free_to_go) < need_slots
        return
    sizes = [free_to_go[d].num_bytes for d in chosen]
    assert sum(sizes) >= need_bytes
    assert len(chosen) >= need_slots
    for size in sizes:
        assert sum(sizes) - size < need_bytes or len(sizes) - 1 < need_slots
