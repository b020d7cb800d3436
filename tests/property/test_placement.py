"""Placement for fleets drawn at random: what no plan may do, and how near it comes to the cheapest."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinilora.coordinator.costs import Costs
from infinilora.coordinator.placement import Adapter, Group, Table, by_group, place
from infinilora.protocol.ids import digest_of
from support.placement_cost import Problem, cheapest, cost, faults, homeless_pins

MB = 1_000_000
WORSE = 0.1
"""What a plan may cost above the cheapest."""
SWING = 0.05
COUNT = settings(max_examples=100, deadline=None, derandomize=True)

ADAPTERS = st.lists(
    st.builds(
        Adapter,
        digest=st.sampled_from([digest_of(bytes([number])) for number in range(12)]),
        num_bytes=st.integers(1, 40).map(lambda size: size * MB),
        rps=st.one_of(st.just(0.0), st.floats(0.001, 10)),
        is_pinned=st.sampled_from([False] * 7 + [True]),
        copies=st.sampled_from([1, 1, 1, 2, 3, 9]),
    ),
    unique_by=lambda adapter: adapter.digest,
)
GROUPS = st.lists(
    st.builds(
        Group,
        id=st.sampled_from(["g1", "g2", "g3", "g4", "g5"]),
        bytes_total=st.integers(0, 150).map(lambda size: size * MB),
        speed=st.sampled_from([0.5, 1.0, 1.0, 3.0]),
        host=st.sampled_from(["", "", "h1", "h2"]),
        state=st.sampled_from(["ready", "ready", "ready", "draining", "dead"]),
    ),
    unique_by=lambda group: group.id,
)


def table(problem: Problem) -> Table:
    plan = place(problem.groups, problem.adapters, problem.current, fill=problem.fill, costs=problem.costs)
    return by_group(plan, problem.groups)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Half of them with a plan before this one, of other heat and other sizes of groups."""
    groups, adapters, fill = draw(GROUPS), draw(ADAPTERS), draw(st.sampled_from([1.0, 0.9, 0.37]))
    fresh = Problem(groups, adapters, {}, fill, Costs())
    if draw(st.booleans()):
        return fresh
    factors = st.sampled_from([0.0, 0.3, 1.0, 4.0])
    then = [replace(a, rps=a.rps * draw(factors)) for a in adapters if draw(st.booleans())]
    larger = [replace(g, state="ready", bytes_total=g.bytes_total * draw(st.sampled_from([1, 2]))) for g in groups]
    return replace(fresh, current=table(replace(fresh, groups=larger, adapters=then)))


@given(problems())
@COUNT
def test_no_group_is_overfull_and_copies_lie_apart_and_only_on_groups_that_are_ready(problem: Problem) -> None:
    assert faults(problem, table(problem)) == []


@given(problems(), st.randoms(use_true_random=False))
@COUNT
def test_the_order_of_the_arguments_changes_nothing(problem: Problem, dice: random.Random) -> None:
    groups, adapters = list(problem.groups), list(problem.adapters)
    names = list(problem.current)
    dice.shuffle(groups)
    dice.shuffle(adapters)
    dice.shuffle(names)
    current = {name: tuple(dice.sample(problem.current[name], len(problem.current[name]))) for name in names}
    found = place(groups, adapters, current, fill=problem.fill)
    assert found == place(problem.groups, problem.adapters, problem.current, fill=problem.fill)


@given(problems())
@COUNT
def test_a_plan_is_kept_while_nothing_changes(problem: Problem) -> None:
    first = table(problem)
    assert table(replace(problem, current=first)) == first


@given(problems())
@COUNT
def test_what_finds_room_has_it(problem: Problem) -> None:
    """In the finished plan no group has room for an adapter that is nowhere."""
    found = table(problem)
    sizes = {adapter.digest: adapter.num_bytes for adapter in problem.adapters}
    free = [problem.capacity(g) - sum(sizes[digest] for digest in found[g.id]) for g in problem.ready]
    placed = {digest for held in found.values() for digest in held}
    for adapter in problem.adapters:
        assert adapter.digest in placed or max(free, default=-1) < adapter.num_bytes


@given(problems())
@COUNT
def test_nobody_starves(problem: Problem) -> None:
    """Of adapters of one size: what is nowhere is asked for no more often than any first copy that has a place.

    A copy that was there before counts `stay` more, and nothing counts for its group's business.
    """
    adapters = [replace(a, num_bytes=10 * MB, is_pinned=False, copies=1) for a in problem.adapters]
    even = replace(problem, adapters=adapters, costs=Costs(wait_s=0.0))
    found = table(even)
    held = {(digest, name) for name, digests in found.items() for digest in digests}
    rps = {adapter.digest: adapter.rps for adapter in adapters}
    homeless = max((a.rps for a in adapters if a.digest not in {digest for digest, _ in held}), default=0.0)
    for digest, name in held:
        stay = 1 + even.costs.stay if digest in even.current.get(name, ()) else 1.0
        assert rps[digest] * stay >= homeless * (1 - 1e-6)


@given(problems())
@COUNT
def test_no_pin_is_left_out_while_a_group_could_hold_it_beside_the_other_pins(problem: Problem) -> None:
    found = table(problem)
    pins = {adapter.digest: adapter.num_bytes for adapter in problem.adapters if adapter.is_pinned}
    placed = {digest for held in found.values() for digest in held}
    for group in problem.ready:
        room = problem.capacity(group) - sum(pins.get(digest, 0) for digest in found[group.id])
        assert all(digest in placed or size > room for digest, size in pins.items())


@given(problems(), st.data())
@COUNT
def test_a_changed_plan_pays_for_its_moves(problem: Problem, data: st.DataObject) -> None:
    """After any change of heat the new plan, its moves counted, is no dearer than to leave all where it is."""
    before = table(problem)
    swung = [replace(a, rps=a.rps * data.draw(st.floats(0, 2))) for a in problem.adapters]
    later = replace(problem, adapters=swung, current=before)
    after = table(later)
    assert cost(later, after) <= cost(later, before) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_a_small_swing_of_heat_changes_little(seed: int) -> None:
    """Every heat up or down by as much as a twentieth: at most one copy of a hundred is elsewhere."""
    dice = random.Random(seed)
    sizes = dice.choice([(10,), (5, 10, 10, 20, 40)])
    adapters = [
        Adapter(
            digest_of(f"{seed}/{rank}".encode()), dice.choice(sizes) * MB, 30 / (rank + 1), copies=3 if rank < 5 else 1
        )
        for rank in range(600)
    ]
    planned = sum(adapter.num_bytes for adapter in adapters) * dice.choice([0.6, 1.5])
    groups = [Group(f"g{n}", int(planned / 8 * dice.uniform(0.7, 1.3)), dice.choice([1.0, 2.0])) for n in range(8)]
    before = table(Problem(groups, adapters, {}, 1.0, Costs()))
    swung = [replace(a, rps=a.rps * dice.uniform(1 - SWING, 1 + SWING)) for a in adapters]
    after = table(Problem(groups, swung, before, 1.0, Costs()))
    changed = sum(len(set(after[name]) - set(before[name])) for name in before)
    assert changed <= 0.01 * sum(map(len, before.values()))


def drawn(seed: int) -> Problem:
    """A small fleet: two to four groups, three to twelve adapters, too few bytes or enough, from nothing or not."""
    dice = random.Random(seed)
    sizes = dice.choice([(1, 2, 3, 4), (4,), (1, 2, 4, 8, 16), tuple(range(1, 30))])
    adapters = [
        Adapter(
            digest_of(f"{seed}/{rank}".encode()),
            dice.choice(sizes) * MB,
            dice.choice([0.0, dice.random() / 10, dice.random(), dice.random() * 10, 3 / (rank + 1)]),
            is_pinned=dice.random() < 0.1,
            copies=dice.choice([1, 1, 1, 1, 2, 3]),
        )
        for rank in range(dice.randint(3, 12))
    ]
    number = dice.randint(2, 4)
    planned = sum(adapter.num_bytes for adapter in adapters) * dice.choice([0.4, 0.7, 1.0, 1.5, 3])
    groups = [
        Group(
            f"g{name}",
            int(planned / number * dice.uniform(0.6, 1.4)),
            speed=dice.choice([0.5, 1.0, 1.0, 2.0]),
            host=dice.choice(["", "h1", "h2"]),
        )
        for name in range(number)
    ]
    fresh = Problem(groups, adapters, {}, 1.0, Costs())
    if dice.random() < 0.4:
        return fresh
    then = [replace(a, rps=dice.random() * 5, is_pinned=False) for a in adapters if dice.random() < 0.8]
    return replace(fresh, current=table(replace(fresh, adapters=then)))


@pytest.mark.parametrize("block", range(10))
@pytest.mark.timeout(300)
def test_a_plan_costs_at_most_a_tenth_more_than_the_cheapest(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        problem = drawn(seed)
        found = table(problem)
        least, best = cheapest(problem)
        assert faults(problem, found) == faults(problem, best) == [], seed
        assert homeless_pins(problem, found) == homeless_pins(problem, best), seed
        assert cost(problem, found) <= least * (1 + WORSE) + 1e-9, seed
        assert cost(problem, found) >= least * (1 - 1e-3) - 1e-6, (seed, "the exact solver was not exact")
