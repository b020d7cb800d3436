"""Which instance goes, and when, by table and over whole lives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.coordinator.victims import Holding, Step, number_of, step


@pytest.mark.parametrize(
    ("count", "target", "there", "draining", "wanted"),
    [
        (2, 2, {"e-0": "busy", "e-1": "busy"}, (), (2, ())),
        (2, 4, {"e-0": "busy", "e-1": "busy"}, (), (4, ())),
        (2, 1, {"e-0": "busy", "e-1": "busy"}, (), (2, ("e-1",))),
        (2, 1, {"e-0": "busy", "e-1": "busy"}, ("e-1",), (2, ("e-1",))),
        (2, 1, {"e-0": "busy", "e-1": "drained"}, ("e-1",), (1, ("e-1",))),
        (2, 1, {"e-0": "busy", "e-1": "drained"}, (), (2, ("e-1",))),  # another's drain, that may end
        (1, 1, {"e-0": "busy", "e-1": "drained"}, ("e-1",), (1, ("e-1",))),  # on its way out
        (1, 1, {"e-0": "busy"}, ("e-1",), (1, ())),  # gone: its next life is not to drain
        (2, 2, {"e-0": "busy", "e-1": "busy"}, ("e-1",), (2, ())),  # wanted again
        (1, 2, {"e-0": "busy", "e-1": "drained"}, ("e-1",), (2, ())),
        (3, 2, {"e-0": "busy", "e-1": "busy"}, (), (2, ())),  # it never came
        (3, 2, {"e-0": "busy", "e-2": "starting"}, (), (2, ("e-2",))),
        (11, 10, {"e-9": "busy", "e-10": "busy"}, (), (11, ("e-10",))),
        (1, 0, {"e-0": "drained"}, ("e-0",), (0, ("e-0",))),
        (1, 0, {"mine": "busy"}, (), (0, ())),  # not one of those that are counted
    ],
)
def test_a_step(
    count: int, target: int, there: dict[str, Holding], draining: tuple[str, ...], wanted: tuple[int, tuple[str, ...]]
) -> None:
    assert step(count, target, there, draining) == Step(wanted[0], frozenset(wanted[1]))


def test_numbers_are_at_the_end() -> None:
    assert [number_of(name) for name in ("lora-12", "a1-b", "7", "engine.3")] == [12, -1, 7, 3]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_nobody_who_works_is_ended_and_nobody_who_stays_drains(targets: list[tuple[int, bool]]) -> None:
    """A follower ends what is beyond the count; an instance empties some time after it was asked to drain."""
    count, draining = 3, frozenset[str]()
    held: dict[str, Holding] = {f"e-{number}": "busy" for number in range(3)}
    for target, empties in targets:
        there = {f"e-{n}": held.get(f"e-{n}", "starting") for n in range(max(count, len(held)))}
        taken = step(count, target, there, draining)
        assert abs(taken.num - target) <= abs(count - target)
        for name, holding in there.items():
            assert number_of(name) < taken.num or holding != "busy", "ended at work"
        assert all(number_of(name) >= min(taken.num - 1, target) for name in taken.draining)
        count, draining = taken
        held = {f"e-{n}": held.get(f"e-{n}", "busy") for n in range(count)}
        for name in held:
            is_free = name in draining and (empties or held[name] == "drained")
            held[name] = "drained" if is_free else "busy"
