"""What multiplies a pair, read a second time: the self-test's own road from a config to alpha / rank.

Knows which PEFT read patterns in which way, and which of a fused module's names the config means; not the rules that
packing goes by. Takes ranks from shapes.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_DEFAULT_ALPHA = 8.0


class Scales:
    """The scales of one config of PEFT, or the one scale of MLX's."""

    def __init__(self, config: Mapping[str, Any], *, is_mlx: bool) -> None:
        self._config = config
        targets, excluded, parameters = (
            None if is_mlx else config.get(key) for key in ("target_modules", "exclude_modules", "target_parameters")
        )
        self._targeted, self._excluded, self._parameters = _held(targets), _held(excluded), _held(parameters)
        self._has_targets = targets is not None
        self._mlx = float(config["lora_parameters"]["scale"]) if is_mlx else None
        self._alphas: dict[str, float] = {} if is_mlx else dict(config.get("alpha_pattern") or {})
        ranks = [] if is_mlx else list(config.get("rank_pattern") or ())
        told = re.match(r"[\sv]*(\d+)\.(\d+)", config.get("peft_version") or "")
        version = [int(number) for number in told.groups()] if told else []
        self._is_old = bool(version) and version < [0, 15]
        before = [] if not version or version >= [0, 14] else ranks  # an alpha was taken by the rank's own key
        wrap = r".*\.{}$" if self._is_old else r"(.*\.)?({})$"
        self._keys = [(re.compile(wrap.replace("{}", key)), key) for key in (*before, *self._alphas)]

    def of(self, module: str, rank: int) -> float:
        """Alpha / rank, or alpha / sqrt(rank), by the module's name in the trainer's model."""
        if self._mlx is not None:
            return self._mlx
        name = self._parameter(module)
        key = next((key for pattern, key in self._keys if pattern.match(name)), name if self._is_old else None)
        alpha = self._config.get("lora_alpha")
        alpha = _DEFAULT_ALPHA if alpha is None else alpha
        alpha = alpha if key is None else self._alphas.get(key, alpha)
        return float(alpha) / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def means_parts(self, module: str, parts: Sequence[str]) -> bool:
        """Whether the config targets what a fused module stands for, and not the module itself."""
        if self._mlx is not None or not parts:
            return False
        return not self._targets(module) and all(map(self._targets, parts))

    def _parameter(self, module: str) -> str:
        """What patterns are held against: the module, or its weight where that is what the config targets."""
        weight = f"{module}.weight"
        return weight if _is_meant(weight, self._parameters) else module

    def _targets(self, module: str) -> bool:
        if any(_is_meant(name, self._parameters) for name in (module, f"{module}.weight")):
            return True
        if _is_meant(module, self._excluded):
            return False
        if not self._targeted:
            return not self._has_targets and not self._parameters
        return str(self._targeted).lower() == "all-linear" or _is_meant(module, self._targeted)


def _held(names: str | Sequence[str] | None) -> str | frozenset[str]:
    """A pattern, or names that are looked up at once, however many they are."""
    return names if isinstance(names, str) else frozenset(names or ())


def _is_meant(name: str, by: str | frozenset[str]) -> bool:
    if isinstance(by, str):
        return re.fullmatch(by, name) is not None
    parts = name.split(".")
    return any(".".join(parts[start:]) in by for start in range(len(parts)))
