"""Rotary position frequencies, as a config describes them: default, linear, llama3 and yarn scaling.

Pure numbers: frequencies per pair of channels and one factor on cos and sin. Other scalings depend on the
length of the text seen so far and are refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilora.protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Rope:
    """inv_freq has head_dim / 2 entries; cos and sin are multiplied by `magnitude`."""

    inv_freq: tuple[float, ...]
    magnitude: float = 1.0


def read_rope(config: Mapping[str, Any], *, head_dim: int, max_position: int, source: str) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    rules: dict[str, Any] = dict(config.get("rope_scaling") or {})
    rules.update(config.get("rope_parameters") or {})
    theta = float(rules.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rules.get("rope_type") or rules.get("type") or "default"
    partial = rules.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise InvalidRequest(f"{source}: partial_rotary_factor {partial} is not supported; wanted 1")
    plain = tuple(theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2))
    try:
        match kind:
            case "default":
                return Rope(plain)
            case "linear":
                return Rope(tuple(f / float(rules["factor"]) for f in plain))
            case "llama3":
                return Rope(_llama3(plain, rules))
            case "yarn":
                return _yarn(plain, rules, theta=theta, head_dim=head_dim, max_position=max_position)
    except KeyError as missing:
        raise InvalidRequest(f"{source}: rope scaling {kind!r} lacks {missing}") from None
    raise InvalidRequest(f"{source}: rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn")


def _llama3(plain: tuple[float, ...], rules: Mapping[str, Any]) -> tuple[float, ...]:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    factor, trained = float(rules["factor"]), float(rules["original_max_position_embeddings"])
    low, high = float(rules["low_freq_factor"]), float(rules["high_freq_factor"])

    def stretched(freq: float) -> float:
        turns = trained * freq / (2 * math.pi)
        if turns < low:
            return freq / factor
        if turns > high:
            return freq
        keep = (turns - low) / (high - low)
        return (1 - keep) * freq / factor + keep * freq

    return tuple(stretched(f) for f in plain)


def _yarn(
    plain: tuple[float, ...], rules: Mapping[str, Any], *, theta: float, head_dim: int, max_position: int
) -> Rope:
    """Blend stretched and plain frequencies over channels, by how often each turns within the trained length."""
    trained = float(rules.get("original_max_position_embeddings") or max_position)
    factor = float(rules["factor"])

    def channel_of(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = channel_of(float(rules.get("beta_fast") or 32))
    last = channel_of(float(rules.get("beta_slow") or 1))
    if rules.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = max(last - first, 0.001)
    frequencies = []
    for i, freq in enumerate(plain):
        stretch = min(max((i - first) / width, 0.0), 1.0)
        frequencies.append(stretch * freq / factor + (1 - stretch) * freq)
    return Rope(tuple(frequencies), _yarn_magnitude(factor, rules))


def _yarn_magnitude(factor: float, rules: Mapping[str, Any]) -> float:
    if rules.get("attention_factor") is not None:
        return float(rules["attention_factor"])

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rules.get("mscale") and rules.get("mscale_all_dim"):
        return growth(float(rules["mscale"])) / growth(float(rules["mscale_all_dim"]))
    return growth(1.0)
