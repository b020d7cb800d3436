"""Which group holds what: by table, and by properties that hold for every fleet."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.coordinator.heat import hot_spots
from infinilora.coordinator.placement import Adapter, Group, Plan, copied, place
from infinilora.protocol.ids import Digest, digest_of

A, B, C, D = sorted(digest_of(name.encode()) for name in "abcd")


def plan(groups: dict[str, int], adapters: list[Adapter], current: Plan | None = None, fill: float = 1.0) -> Plan:
    return place([Group(name, size) for name, size in groups.items()], adapters, current or {}, fill=fill)


def held(*digests: Digest) -> tuple[Digest, ...]:
    return tuple(sorted(digests))


@pytest.mark.parametrize(
    ("name", "groups", "adapters", "current", "wanted"),
    [
        ("nobody to hold anything", {}, [Adapter(A, 1)], {"g1": (A,)}, {}),
        ("one group holds all that fits", {"g1": 10}, [Adapter(A, 4), Adapter(B, 6)], {}, {"g1": held(A, B)}),
        ("the hotter goes first", {"g1": 10}, [Adapter(A, 8, 1.0), Adapter(B, 8, 2.0)], {}, {"g1": (B,)}),
        ("a pin is before heat", {"g1": 10}, [Adapter(A, 8, is_pinned=True), Adapter(B, 8, 9.0)], {}, {"g1": (A,)}),
        (
            "the emptiest group takes the next",
            {"g1": 10, "g2": 12},
            [Adapter(A, 5, 3.0), Adapter(B, 5, 2.0), Adapter(C, 5, 1.0)],
            {},
            {"g1": (B,), "g2": held(A, C)},
        ),
        ("what is at home stays", {"g1": 10, "g2": 99}, [Adapter(A, 5)], {"g1": (A,)}, {"g1": (A,), "g2": ()}),
        ("a lost group's adapters move", {"g2": 10}, [Adapter(A, 5)], {"g1": (A,)}, {"g2": (A,)}),
        (
            "a hotter one may push a colder out of its home",
            {"g1": 10, "g2": 4},
            [Adapter(A, 8, 1.0), Adapter(B, 8, 5.0)],
            {"g1": (A,)},
            {"g1": (B,), "g2": ()},
        ),
        (
            "hot is held twice",
            {"g1": 10, "g2": 10},
            [Adapter(A, 4, 9.0, is_hot=True), Adapter(B, 4, 1.0)],
            {},
            {"g1": (A,), "g2": held(A, B)},
        ),
        (
            "a second copy never costs another's first",
            {"g1": 4, "g2": 4},
            [Adapter(A, 4, 9.0, is_hot=True), Adapter(B, 4, 1.0)],
            {},
            {"g1": (A,), "g2": (B,)},
        ),
        ("hot, with one group, is held once", {"g1": 10}, [Adapter(A, 4, 9.0, is_hot=True)], {}, {"g1": (A,)}),
        ("an outsize adapter is held nowhere", {"g1": 10}, [Adapter(A, 11), Adapter(B, 1)], {}, {"g1": (B,)}),
        ("a removed adapter leaves", {"g1": 10}, [Adapter(B, 1)], {"g1": held(A, B)}, {"g1": (B,)}),
    ],
)
def test_placement(name: str, groups: dict[str, int], adapters: list[Adapter], current: Plan, wanted: Plan) -> None:
    assert plan(groups, adapters, current) == wanted, name


def test_only_the_given_share_of_a_group_is_planned() -> None:
    assert plan({"g1": 10}, [Adapter(A, 5), Adapter(B, 5)], fill=0.9) == {"g1": (A,)}


DIGESTS = [digest_of(bytes([number])) for number in range(12)]
ADAPTERS = st.lists(
    st.builds(
        Adapter,
        digest=st.sampled_from(DIGESTS),
        num_bytes=st.integers(1, 40),
        rps=st.floats(0, 10),
        is_pinned=st.booleans(),
        is_hot=st.booleans(),
    ),
    unique_by=lambda adapter: adapter.digest,
)
GROUPS = st.dictionaries(st.sampled_from(["g1", "g2", "g3", "g4"]), st.integers(0, 100))


@given(GROUPS, ADAPTERS, st.floats(0.1, 1))
def test_no_plan_overfills_a_group_or_holds_a_stranger(
    groups: dict[str, int], adapters: list[Adapter], fill: float
) -> None:
    sizes = {adapter.digest: adapter.num_bytes for adapter in adapters}
    for group, digests in plan(groups, adapters, fill=fill).items():
        assert sum(sizes[digest] for digest in digests) <= groups[group] * fill
        assert len(set(digests)) == len(digests)


@given(GROUPS, ADAPTERS)
def test_what_could_be_placed_is_placed(groups: dict[str, int], adapters: list[Adapter]) -> None:
    """An adapter is left out only if no group has room for it in the finished plan."""
    found = plan(groups, adapters)
    sizes = {adapter.digest: adapter.num_bytes for adapter in adapters}
    free = {group: groups[group] - sum(sizes[d] for d in digests) for group, digests in found.items()}
    placed = {digest for digests in found.values() for digest in digests}
    for adapter in adapters:
        assert adapter.digest in placed or all(room < adapter.num_bytes for room in free.values())


@given(GROUPS, ADAPTERS)
def test_a_plan_that_fits_is_kept(groups: dict[str, int], adapters: list[Adapter]) -> None:
    first = plan(groups, adapters)
    assert plan(groups, adapters, first) == first


@given(GROUPS, ADAPTERS)
def test_no_adapter_is_held_more_than_twice_and_only_the_hot_are_twice(
    groups: dict[str, int], adapters: list[Adapter]
) -> None:
    found = plan(groups, adapters)
    everywhere = [digest for digests in found.values() for digest in digests]
    assert all(everywhere.count(digest) <= 2 for digest in everywhere)
    assert copied(found) <= {adapter.digest for adapter in adapters if adapter.is_hot}


@pytest.mark.parametrize(
    ("rps", "was_hot", "hot"), [(1.9, False, False), (2.0, False, True), (1.0, True, True), (0.9, True, False)]
)
def test_hot_cools_later_than_it_warms(rps: float, was_hot: bool, hot: bool) -> None:
    assert (A in hot_spots({A: rps}, 2.0, frozenset({A} if was_hot else ()))) == hot
