"""Requests that are drawn: their rate, their spread, their popularity, their lengths; and what is refused."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from infinilora.planner.simulate.load import Load, requests_of
from infinilora.protocol.errors import InvalidRequest


def drawn(**changes: Any) -> Any:
    return requests_of(Load(**({"rate": 50.0, "requests": 20_000, "adapters": 64} | changes)), seed=3)


def gaps(requests: Any) -> Any:
    return np.diff([0.0, *(r.arrival_s for r in requests)])


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_their_mean_and_spread(cv: float) -> None:
    found = gaps(drawn(gap_cv=cv))
    assert found.mean() == pytest.approx(1 / 50, rel=0.1)
    assert found.std() / found.mean() == pytest.approx(cv, abs=0.02 + 0.08 * cv)


@pytest.mark.parametrize("shape", ["burst", "diurnal"])
def test_a_shape_keeps_the_mean_rate_and_moves_requests_to_its_peak(shape: str) -> None:
    found = drawn(shape=shape, period_s=10.0, swing=0.5)
    assert found[-1].arrival_s == pytest.approx(400, rel=0.05)
    phases = np.array([r.arrival_s for r in found]) % 10.0 / 10.0
    if shape == "burst":
        assert (phases < 0.1).mean() == pytest.approx(0.5, abs=0.02)
    else:  # 1 + a sin over half a period: 1/2 + a / pi of all
        assert (phases < 0.5).mean() == pytest.approx(0.5 + 0.5 / np.pi, abs=0.02)


def test_popularity_is_zipf() -> None:
    found = Counter(r.adapter for r in drawn(zipf=1.0))
    harmonic = sum(1 / i for i in range(1, 65))
    for rank in (1, 2, 5):
        assert found[rank - 1] / 20_000 == pytest.approx(1 / rank / harmonic, rel=0.1)


def test_popularity_drifts_by_one_rank() -> None:
    found = drawn(zipf=3.0, drift_s=100.0)
    for start, adapter in ((0.0, 0), (100.0, 1), (200.0, 2)):
        then = Counter(r.adapter for r in found if start <= r.arrival_s < start + 100.0)
        assert then.most_common(1)[0][0] == adapter


def test_lengths_have_their_mean_and_spread() -> None:
    found = np.array([r.output for r in drawn(output=200, output_cv=0.8)])
    assert found.mean() == pytest.approx(200, rel=0.03)
    assert found.std() / found.mean() == pytest.approx(0.8, rel=0.06)
    assert {r.prompt for r in drawn(prompt=17)} == {17}


def test_times_rise_and_a_seed_says_all() -> None:
    found = drawn(gap_cv=2.0, shape="burst", prompt_cv=1.0)
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(found))
    assert found == drawn(gap_cv=2.0, shape="burst", prompt_cv=1.0)
    assert found != requests_of(Load(rate=50.0, requests=20_000, adapters=64, gap_cv=2.0, shape="burst"), seed=4)


@pytest.mark.parametrize(
    "changes", [{"rate": 0.0}, {"requests": 0}, {"adapters": 0}, {"gap_cv": -1.0}, {"swing": 2.0}, {"output": 0}]
)
def test_a_load_that_cannot_be_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        drawn(**changes)
    assert refused.value.param == next(iter(changes))
