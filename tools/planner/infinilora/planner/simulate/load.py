"""Requests of a simulated run: when, of which adapter, how long. Seeded: the same words make the same requests."""

from typing import Literal, NamedTuple

import msgspec
import numpy as np

from infinilora.coordinator.provision.popularity import Floats, zipf
from infinilora.planner.workload import MAX_ADAPTERS, positive
from infinilora.protocol.errors import InvalidRequest

MAX_REQUESTS = 10_000_000
MAX_TOKENS = 1_000_000
Shape = Literal["steady", "burst", "diurnal"]


class Request(NamedTuple):
    """One request; `adapter` is a number, `prompt` and `output` are tokens, 1 at least.

    `is_prefilled`: keys and values of all but its last token come with it.
    """

    id: int
    arrival_s: float
    adapter: int
    prompt: int
    output: int
    is_prefilled: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workload in a few numbers. Gaps are Gamma of a coefficient of variation `gap_cv` (1: Poisson, 0: even)."""

    rate: float
    requests: int = 5000
    adapters: int = 512
    zipf: float = 1.2
    gap_cv: float = 1.0
    shape: Shape = "steady"
    period_s: float = 60.0
    """Of a burst, or of a day."""
    swing: float = 0.5
    """Of the rate at its peak, above the mean; for a burst, the share of all requests that are in it, for a tenth of
    each period."""
    drift_s: float = 0.0
    """After so long the adapters move one rank up, the first becoming the last; 0: never."""
    prompt: int = 128
    prompt_cv: float = 0.0
    output: int = 128
    output_cv: float = 0.0
    is_prefilled: bool = False
    warmup: float = 0.1
    """Of the requests, that come first and are not counted."""


def check_load(load: Load) -> None:
    positive(load.rate, "rate")
    for name, most in (("requests", MAX_REQUESTS), ("adapters", MAX_ADAPTERS), ("prompt", MAX_TOKENS)):
        _within(getattr(load, name), 1, most, name)
    _within(load.output, 1, MAX_TOKENS, "output")
    for name in ("gap_cv", "prompt_cv", "output_cv"):
        _within(getattr(load, name), 0.0, 10.0, name)
    _within(load.zipf, 0.0, 1e6, "zipf")
    _within(load.swing, 0.0, 1.0, "swing")
    _within(load.warmup, 0.0, 0.9, "warmup")
    _within(load.drift_s, 0.0, 1e9, "drift_s")
    positive(load.period_s, "period_s")


def _within(value: float, least: float, most: float, param: str) -> None:
    if not least <= value <= most:
        raise InvalidRequest(f"found {value:g}; wanted a number from {least:g} to {most:g}", param=param)


def requests_of(load: Load, seed: int) -> list[Request]:
    """All of them, in order of time."""
    check_load(load)
    dice = np.random.default_rng(seed)
    times = _times(load, dice)
    ranks = np.searchsorted(np.cumsum(zipf(load.adapters, load.zipf))[:-1], dice.random(load.requests), side="right")
    moved = np.floor(times / load.drift_s).astype(np.int64) if load.drift_s else 0
    adapters = (ranks + moved) % load.adapters
    prompts = _lengths(load.prompt, load.prompt_cv, load.requests, dice)
    outputs = _lengths(load.output, load.output_cv, load.requests, dice)
    columns = (range(load.requests), times.tolist(), adapters.tolist(), prompts.tolist(), outputs.tolist())
    return [Request(*row, load.is_prefilled) for row in zip(*columns, strict=True)]


def _times(load: Load, dice: np.random.Generator) -> Floats:
    """Arrivals of an even rate, bent so that the rate follows the shape: the integral of it is inverted."""
    if load.gap_cv:
        shape = load.gap_cv**-2
        gaps = dice.gamma(shape, 1.0 / (shape * load.rate), load.requests)
    else:
        gaps = np.full(load.requests, 1.0 / load.rate)
    times: Floats = np.cumsum(gaps)
    if load.shape == "steady":
        return times
    phase, passed = np.linspace(0.0, 1.0, 1001), np.linspace(0.0, 1.0, 1001)
    if load.shape == "diurnal":
        passed = phase + load.swing * (1.0 - np.cos(2 * np.pi * phase)) / (2 * np.pi)
    else:
        passed = np.where(phase < 0.1, phase / 0.1 * load.swing, load.swing + (phase - 0.1) / 0.9 * (1 - load.swing))
    whole, part = np.divmod(times / load.period_s, 1.0)
    bent: Floats = (whole + np.interp(part, passed, phase)) * load.period_s
    return bent


def _lengths(mean: int, cv: float, count: int, dice: np.random.Generator) -> Floats:
    """Whole tokens, log-normal with this mean and coefficient of variation, at least 1, at most MAX_TOKENS."""
    if not cv:
        return np.full(count, mean)
    spread = np.log1p(cv**2)
    drawn = dice.lognormal(np.log(mean) - spread / 2, np.sqrt(spread), count)
    lengths: Floats = np.clip(np.rint(drawn), 1, MAX_TOKENS).astype(np.int64)
    return lengths
