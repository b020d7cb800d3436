"""What a PEFT LoRA configuration means: rank, alpha and scale of a module, and whether it is a target at all.

A configuration in (`config`), answers out.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from infinilora.protocol.adapter import AdapterWarning
from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.config import CONFIG_FILE, LoraConfig, config_of
from infinilora.weights.patterns import Matcher
from infinilora.weights.readings import TODAY, Reading, other_readings, reading_of
from infinilora.weights.refuse import invalid, listed

Readings = Callable[[Iterable[bool]], bool]
"""`any` or `all`: of PEFT's two readings of a layer's number."""

_LAYER = (r"(?:^|.*?\.){}\.(?P<layer>\d+)\.", r"(?:^|.*\.){}\.(?P<layer>\d+)\.")
"""A module's layer as PEFT reads it today (the first number), and as it did until 0.18 (the last: an expert's)."""
_ANY_LIST = "[^.]*"
_MAX_RANK = 1 << 20
_MAX_ALPHA = 3e38
MAX_PATTERNS = 2048
"""One for each projection of the longest Llama is 882. Each is compiled, and held against every module."""


class Terms(NamedTuple):
    """What a module's pair is held against: its rank, and what multiplies B·A."""

    rank: int
    scale: float


class _Names:
    """A list of a configuration: names of modules or of what they end in. A question costs no more for a long one."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def __contains__(self, key: str) -> bool:
        """Whether the key is one of them, or ends in a dot and one of them."""
        parts = key.split(".")
        return any(".".join(parts[i:]) in self._names for i in range(len(parts)))

    def is_whole(self, key: str) -> bool:
        return key in self._names


@dataclass(frozen=True)
class LoraRules:
    """The answers that a configuration gives. Pure, but for the time that its patterns are given."""

    config: LoraConfig
    matcher: Matcher
    reading: Reading = TODAY
    others: tuple[Reading, ...] = ()
    """How else the patterns may have been read when the file was trained."""

    @cached_property
    def _target_names(self) -> _Names:
        return _names(self.config.target_modules)

    @cached_property
    def _excluded_names(self) -> _Names:
        return _names(self.config.exclude_modules)

    @cached_property
    def _target_parameters(self) -> _Names:
        return _names(self.config.target_parameters)

    @cached_property
    def _layers(self) -> frozenset[int]:
        """Those to transform; none: all."""
        wanted = self.config.layers_to_transform
        return frozenset([wanted] if isinstance(wanted, int) else wanted or ())

    def rank(self, module: str) -> int:
        """The rank of a module (or of a parameter, by its own name)."""
        return self.terms(module).rank

    def scale(self, module: str) -> float:
        """What multiplies B·A: alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
        return self.terms(module).scale

    def terms(self, key: str) -> Terms:
        """Rank and scale by the name that patterns are held against."""
        return self._terms(self.reading, self.matcher, key)

    def pattern_of(self, key: str, *, but_not_of: Iterable[str]) -> str | None:
        """A pattern, if there is one, that is of this name and of none of the others."""
        for pattern in (*self.config.rank_pattern, *self.config.alpha_pattern):
            if self._is_of(pattern, key) and not any(self._is_of(pattern, other) for other in but_not_of):
                return pattern
        return None

    def _is_of(self, pattern: str, key: str) -> bool:
        return self.matcher.first((pattern,), self.reading.form, key) is not None

    def _terms(self, reading: Reading, matcher: Matcher, key: str) -> Terms:
        """The one place where a scale is computed."""
        config = self.config
        rank, alpha = reading.given(matcher, config.rank_pattern, config.alpha_pattern, key)
        rank = config.r if rank is None else rank
        alpha = config.lora_alpha if alpha is None else alpha
        return Terms(rank, alpha / math.sqrt(rank) if config.use_rslora else alpha / rank)

    def keys(self, module: str, parts: Sequence[str] = (), *, container: str = "") -> tuple[str, ...]:
        """The names by which rank and scale of a module are asked; none where nothing targets it: PEFT would drop it.

        One: the module's own; that of a parameter of `container`, where the configuration lists it or targets the
        container. One for each of several `parts` that the module stands for, where all of those are targets.
        """
        key = self.target_key(module)
        if key is None and container and (self.names_parameter(module) or self.target_key(container)):
            key = module
        if key:
            return (key,)
        keys = tuple(key for part in parts if (key := self.target_key(part)))
        return keys if len(keys) == len(parts) else ()

    def doubts(self, keys: Iterable[str]) -> tuple[AdapterWarning, ...]:
        """A warning where modules of these keys would have another scale by another reading, and none another rank.

        A reading that gives another rank to a tensor of the file is none of the file's.
        """
        names = dict.fromkeys(keys)
        for reading in self.others:
            matcher = Matcher(CONFIG_FILE)
            try:
                differing = {name: (self.terms(name), self._terms(reading, matcher, name)) for name in names}
            except AdapterInvalid:
                continue  # a pattern that its form makes no expression of, or an endless one: nobody trained by it
            if all(ours.rank == theirs.rank for ours, theirs in differing.values()):
                told = [f"{n}: {o.scale:.6g}, not {t.scale:.6g}" for n, (o, t) in differing.items() if o != t]
                if told:
                    return (_doubt(reading, told),)
        return ()

    def target_key(self, module: str) -> str | None:
        """The name by which PEFT targets this module, or None.

        It is that of its `weight` where the configuration lists the parameter (which `all-linear` and the like may
        cover a second time), else the module's own. Rank and alpha patterns are held against it.
        """
        weight = f"{module}.weight"
        if self.names_parameter(weight):
            return weight
        return module if self._targets_module(module, readings=any) else None

    def surely_targets(self, module: str) -> bool:
        """Whether every generation of PEFT would have trained this module; False where the weights decide."""
        if self._weights_decide:
            return False
        return self._targets_module(module, readings=all) or self.names_parameter(f"{module}.weight")

    def targets_parameter(self, parameter: str) -> bool:
        return self._weights_decide or self.names_parameter(parameter)

    def names_parameter(self, parameter: str) -> bool:
        """Whether the configuration itself lists this parameter."""
        return parameter in self._target_parameters

    @property
    def _weights_decide(self) -> bool:
        """No targets at all: PEFT takes a default of the model's type, and the file holds what was trained."""
        return self.config.target_modules is None and not self.config.target_parameters

    def _targets_module(self, module: str, *, readings: Readings) -> bool:
        if self.excludes(module):
            return False
        match self.config.target_modules:
            case None:
                return self._weights_decide and self._transforms_layer_of(module, readings)
            case str() as pattern if pattern.lower() == "all-linear":
                # PEFT leaves out the head; embeddings are not linear.
                return module.rpartition(".")[2] not in {"lm_head", "embed_tokens"}
            case str() as pattern:
                return self.matcher.fullmatch(pattern, module)
            case _:
                return self._target_names.is_whole(module) or (
                    module in self._target_names and self._transforms_layer_of(module, readings)
                )

    def excludes(self, module: str) -> bool:
        match self.config.exclude_modules:
            case str() as pattern:
                return bool(pattern) and self.matcher.fullmatch(pattern, module)
            case _:
                return module in self._excluded_names

    def _transforms_layer_of(self, module: str, readings: Readings) -> bool:
        layers = self._layers
        if not layers:
            return True
        lists = _layer_lists(self.config)
        found = [self.matcher.first(lists, form, module) for form in _LAYER]
        return readings(number is not None and int(number[1]["layer"]) in layers for number in found)


def _doubt(reading: Reading, told: list[str]) -> AdapterWarning:
    text = (
        f"patterns of rank and alpha are read as PEFT reads them since 0.15, for {CONFIG_FILE} has no peft_version; "
        f"if a PEFT {reading.when} trained it, the scales of {len(told)} modules were others: {listed(told)}"
    )
    return AdapterWarning(code="patterns_in_doubt", text=text, count=len(told))


def _names(listed: str | list[str] | None) -> _Names:
    return _Names(() if listed is None or isinstance(listed, str) else listed)


def _layer_lists(config: LoraConfig) -> list[str]:
    names = [config.layers_pattern] if isinstance(config.layers_pattern, str) else config.layers_pattern
    return [name for name in names if name] or [_ANY_LIST]


def rules_of(config: dict[str, Any]) -> LoraRules:
    """Of a configuration as it is in its file. Raises AdapterInvalid."""
    return checked_rules(config_of(config), others=other_readings(config.keys()))


def checked_rules(config: LoraConfig, *, others: tuple[Reading, ...] = ()) -> LoraRules:
    """The rules of a configuration whose ranks, alphas and patterns hold. Raises AdapterInvalid."""
    reading = reading_of(config.peft_version)
    if config.use_dora and config.lora_bias:
        raise invalid(CONFIG_FILE, "lora_bias", found="true, and use_dora as well", wanted="one of them, as in PEFT")
    for key, rank in [("r", config.r), *config.rank_pattern.items()]:
        if not 1 <= rank <= _MAX_RANK:
            raise invalid(CONFIG_FILE, f"rank {key:.200}", found=rank, wanted=f"at least 1, at most {_MAX_RANK}")
    for key, alpha in [("lora_alpha", config.lora_alpha), *config.alpha_pattern.items()]:
        if not abs(alpha) <= _MAX_ALPHA:
            raise invalid(CONFIG_FILE, f"alpha {key:.200}", found=alpha, wanted="a finite number of single precision")
    matcher = _checked_patterns(config, reading)
    has_patterns = config.rank_pattern or config.alpha_pattern
    return LoraRules(config, matcher, reading, others if has_patterns else ())


def _checked_patterns(config: LoraConfig, reading: Reading) -> Matcher:
    """A matcher that has seen all patterns, which are regular expressions, and not too many."""
    matcher = Matcher(CONFIG_FILE)
    scaling, lists = dict.fromkeys([*config.rank_pattern, *config.alpha_pattern]), _layer_lists(config)
    for key, patterns in (("rank_pattern and alpha_pattern", scaling), ("layers_pattern", lists)):
        if len(patterns) > MAX_PATTERNS:
            found = f"{len(patterns)} patterns"
            raise invalid(CONFIG_FILE, key, found=found, wanted=f"at most {MAX_PATTERNS}")
    for pattern in scaling:
        matcher.check(pattern, reading.form)
    for targets in (config.target_modules, config.exclude_modules):
        if isinstance(targets, str):
            matcher.check(targets)
    for pattern in lists:
        for form in _LAYER:
            matcher.check(pattern, form)
    return matcher
