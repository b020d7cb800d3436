"""What came of a run, in the numbers that are told: against an SLO, by adapter, and in bytes."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from infinilora.coordinator.provision.popularity import Floats

ATTAINED = 0.9
"""An adapter is within its SLO if more than this share of its requests are."""


class Ended(NamedTuple):
    """One request at its end. `tpot_s` is None for a single token, `ttft_s` where none came."""

    id: int
    adapter: int
    ttft_s: float | None
    tpot_s: float | None
    is_done: bool


class Slo(msgspec.Struct, frozen=True):
    """P95 of TTFT, and the mean of TPOT."""

    ttft_s: float = 0.25
    tpot_s: float = 0.1

    def is_met(self, ended: Ended) -> bool:
        """By one request."""
        in_time = ended.is_done and ended.ttft_s is not None and ended.ttft_s <= self.ttft_s
        return in_time and (ended.tpot_s is None or ended.tpot_s <= self.tpot_s)


class Quantiles(msgspec.Struct, frozen=True):
    """Seconds."""

    p50: float
    p95: float
    p99: float
    mean: float


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes: from the store, into pools, over links between engines and groups; and how many loads."""

    fetched_bytes: int
    staged_bytes: int
    link_bytes: int
    loads: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A run. Requests of the warm-up are not in it, but for `moved`, `preemptions`, `steps`, `events`.

    `is_whole`: it was run to its end, and not left because the SLO was lost already.
    """

    requests: int
    failed: int
    rate: float
    """Ended requests a second, from the first counted arrival to the last end."""
    output_tokens_per_s: float
    ttft_s: Quantiles
    ttft_percentiles_s: tuple[float, ...]
    """The 1st to the 99th, for a picture."""
    tpot_s: Quantiles
    is_within_slo: bool
    requests_within_slo: float
    adapters_within_slo: float
    """Of the adapters that were asked for."""
    jain: float
    """Jain's index over adapters of the share of their requests within the SLO: 1, all fare alike."""
    moved: Moved
    preemptions: int
    steps: int
    events: int
    virtual_s: float
    is_whole: bool


def quantiles(values: Sequence[float]) -> Quantiles:
    """By the nearest rank upwards; of nothing, all infinite: a run in which nothing came has met no limit."""
    if not values:
        return Quantiles(float("inf"), float("inf"), float("inf"), float("inf"))
    p50, p95, p99 = (float(v) for v in np.quantile(np.array(values), (0.5, 0.95, 0.99), method="inverted_cdf"))
    return Quantiles(p50, p95, p99, float(np.mean(values)))


def percentiles(values: Sequence[float]) -> tuple[float, ...]:
    """The 1st to the 99th; of nothing, none."""
    if not values:
        return ()
    found = np.quantile(np.array(values), np.arange(1, 100) / 100, method="inverted_cdf")
    return tuple(round(float(v), 6) for v in found)


def jain(shares: Floats) -> float:
    """(sum)^2 / (n x sum of squares); all nothing: all alike."""
    squares = float((shares**2).sum())
    return float(shares.sum()) ** 2 / (len(shares) * squares) if squares else 1.0


def attainment(ended: Sequence[Ended], slo: Slo) -> Floats:
    """Share of requests within the SLO, for each adapter that was asked for."""
    adapters = np.array([one.adapter for one in ended])
    met = np.array([slo.is_met(one) for one in ended], dtype=np.float64)
    _, index = np.unique(adapters, return_inverse=True)
    shares: Floats = np.bincount(index, weights=met) / np.bincount(index)
    return shares


def ttfts(ended: Sequence[Ended]) -> list[float]:
    """A request that failed waits for ever."""
    return [one.ttft_s if one.is_done and one.ttft_s is not None else float("inf") for one in ended]


def tpots(ended: Sequence[Ended]) -> list[float]:
    return [one.tpot_s for one in ended if one.tpot_s is not None and one.is_done]
