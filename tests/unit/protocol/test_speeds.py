import math

import pytest

from infinilora.protocol.speeds import relative_speeds


@pytest.mark.parametrize(
    ("rows_per_s", "relative"),
    [
        ([], []),
        ([0.0, 0.0], [1.0, 1.0]),
        ([700.0], [1.0]),
        ([1000.0, 1300.0], [1.0, 1.0]),
        ([1000.0, 2000.0], [0.5, 1.0]),
        ([1000.0, 1500.0], [0.5, 1.0]),
        ([10.0, 1000.0], [1 / 128, 1.0]),
        ([1000.0, 2000.0, 0.0], [0.5, 1.0, 1.0]),
        ([1000.0, -2000.0], [1.0, 1.0]),
        ([1000.0, math.inf, math.nan], [1.0, 1.0, 1.0]),
    ],
)
def test_speeds_are_told_apart_by_halves_of_the_fastest(rows_per_s: list[float], relative: list[float]) -> None:
    named = {f"g{number}": rows for number, rows in enumerate(rows_per_s)}
    assert list(relative_speeds(named).values()) == relative
