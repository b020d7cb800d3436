"""Costs are found again in steps that were made by them."""

import random
from itertools import product
from typing import NamedTuple

import pytest

from infinilora.planner.constants import Constant
from infinilora.planner.simulate.costs import BaseCost, DeltaCost
from infinilora.planner.simulate.fit import Base, Seen, fit_base, fit_deltas, fit_load, least_squares, told
from infinilora.protocol.errors import InvalidRequest

SHAPES = [(n, n, 40 * n, False) for n in (1, 2, 4, 8, 16, 32)] + [
    *((prompt, 1, prompt, True) for prompt in (8, 32, 64, 128, 256)),
    *((prompt + 4, 5, prompt + 160, True) for prompt in (16, 32, 64)),
    (4, 4, 2000, False),
]
"""(rows, tokens, context, first token?): streams that decode, prompts alone, prompts that join, long contexts."""


class Machine(NamedTuple):
    """A base step and the way in, in seconds."""

    fixed: float = 0.009
    row: float = 0.0006
    token: float = 0.0002
    context: float = 0.000002
    floor: float = 0.0
    join: float = 0.0
    gateway: float = 0.006

    def base(self) -> Base:
        *cost, gateway = (Constant(value, "made") for value in self)
        return Base(BaseCost(*cost), gateway)


def seen_on(base: Base, *, noise: float = 0.0) -> list[Seen]:
    dice = random.Random(3)
    shapes = [Seen(1.0, *shape) for shape in SHAPES]
    return [seen._replace(seconds=base.seconds(seen) * (1 + dice.uniform(-noise, noise))) for seen in shapes]


@pytest.mark.parametrize(
    "machine",
    [
        Machine(),
        Machine(floor=0.0135),
        Machine(token=0.0),
        Machine(floor=0.0135, join=0.003),
        Machine(context=0.0, gateway=0.0),
        Machine(fixed=0.002, row=0.002, floor=0.020),
    ],
    ids=["line", "floor", "free tokens", "joins", "nothing but rows", "high floor"],
)
def test_a_machine_is_found_again(machine: Machine) -> None:
    """By what it says of steps that it has not seen, and of the way in alone."""
    found = fit_base(seen_on(machine.base()), "made")
    for rows, tokens, context in ((1, 1, 3000), (3, 3, 90), (6, 6, 200), (12, 12, 50), (100, 9, 900)):
        wanted = machine.base().cost.step_s(rows, tokens, context)
        assert found.cost.step_s(rows, tokens, context) == pytest.approx(wanted, rel=1e-6)
    assert found.gateway_s.value == pytest.approx(machine.gateway, abs=1e-9)
    assert found.cost.join_s.value == pytest.approx(machine.join, abs=1e-9)


def test_noise_of_five_percent_is_a_few_percent_of_a_prediction() -> None:
    machine = Machine(floor=0.0135).base()
    found = fit_base(seen_on(machine, noise=0.05), "made")
    for seen in seen_on(machine):
        assert found.seconds(seen) == pytest.approx(seen.seconds, rel=0.05)


def test_deltas_and_the_lease_are_found_again() -> None:
    base, delta, lease_s = (
        Machine().base(),
        DeltaCost(*(Constant(v, "") for v in (0.003, 0.0003, 5e-11, 0.002))),
        0.0015,
    )
    points = []
    for shape, adapters in product(SHAPES, (1, 8)):
        bare = Seen(1.0, *shape, read_bytes=adapters * 1e7, asks_lease=shape[3] and adapters == 1)
        seconds = (
            base.seconds(bare)
            + delta.step_s(bare.rows, bare.read_bytes, is_joined=bare.is_joined)
            + lease_s * bare.asks_lease
        )
        points.append(bare._replace(seconds=seconds))
    found, lease = fit_deltas(points, base, "made", has_lease=True)
    numbers = (found.fixed_s.value, found.row_s.value, found.byte_s.value, found.join_s.value, lease.value)
    assert numbers == pytest.approx((0.003, 0.0003, 5e-11, 0.002, 0.0015), rel=1e-6)
    _, none = fit_deltas(points, base, "made", has_lease=False)
    assert none.value == 0.0


def test_a_load_is_its_latency_and_its_bytes() -> None:
    latency_s, store = fit_load([(size, 0.05 + size / 4e8) for size in (1e7, 4e7, 8e7)], "made")
    assert (latency_s.value, store.value) == pytest.approx((0.05, 4e8))
    assert latency_s.source.startswith("made: 3 points, off by 0.0%")


def test_no_number_is_below_zero() -> None:
    """A line through these falls; the best that does not is even, nearest by relative error."""
    fixed, slope = least_squares([(1.0, 1.0), (1.0, 2.0)], [2.0, 1.0])
    assert slope == 0.0
    assert fixed == pytest.approx((1 / 2 + 1) / (1 / 4 + 1))


def test_steps_of_one_size_fit_nothing() -> None:
    with pytest.raises(InvalidRequest, match="two sizes"):
        fit_base([Seen(0.01, 4, 4, 100)] * 3, "made")


def test_a_fit_says_how_good_it_is() -> None:
    assert told([0.01, -0.05, 0.02]) == "3 points, off by 2.0% in the middle, 5.0% at most"
