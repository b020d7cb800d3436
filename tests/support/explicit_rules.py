"""What the config of an adapter says of a module, by PEFT's own rules: its rank, its scale, whether it is adapted.

Part of the oracle of tests/property (`explicit_merge`); knows neither the base nor the tensors.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]

CONFIG_NAME = "adapter_config.json"
DEFAULT_RANK, DEFAULT_ALPHA = 8, 8
EMBEDDING = "embed_tokens"

_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights",
    "bias", "peft_version",
}  # fmt: skip
_NO_MATTER = {
    "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout", "auto_mapping",
    "fan_in_fan_out", "megatron_core", "qalora_group_size", "eva_config", "corda_config", "loftq_config",
    "lora_ga_config", "runtime_config", "lora_bias",
}  # fmt: skip
"""Of no effect on W' once trained. `lora_bias` says that there are tensors beside it, and those are read."""
_INITS_THAT_KEEP_THE_BASE = {"gaussian", "eva", "orthogonal"}


class NoMeaning(Exception):
    """The files say nothing definite about this base: who serves them makes something up."""


def rank_of(config: Config, name: str) -> int:
    """That of the first pattern, in file order, that is the name or a dotted tail of it; else `r`."""
    return int(_by_pattern(config, "rank_pattern", name, _given(config, "r", DEFAULT_RANK)))


def scale_of(config: Config, name: str) -> float:
    """alpha / r, or alpha / sqrt(r), with the alpha and the r of this module."""
    alpha = float(_by_pattern(config, "alpha_pattern", name, _given(config, "lora_alpha", DEFAULT_ALPHA)))
    rank = rank_of(config, name)
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _given(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    return default if value is None else value


def _by_pattern(config: Config, which: str, name: str, otherwise: Any) -> Any:
    r"""PEFT of 0.14 put `.*\.` before a key and nothing around it; that of 0.13 took rank and alpha of one key."""
    patterns = config.get(which) or {}
    version = re.match(r"\s*v?0\.(\d+)", str(config.get("peft_version")))
    minor = int(version[1]) if version else 99
    form = r".*\.{}$" if minor < 15 else r"(?:.*\.)?(?:{})$"
    keys = list(patterns) if minor > 13 else [*(config.get("rank_pattern") or {}), *(config.get("alpha_pattern") or {})]
    for key in keys:
        if re.match(form.replace("{}", key), name):
            return patterns.get(key, otherwise)
    return patterns.get(name, otherwise) if minor < 15 else otherwise


def targets_module(config: Config, name: str, *, old_peft: bool = False) -> bool:
    """Whether PEFT wraps this linear module. `old_peft`: it took the last number of a name for the layer."""
    targets = config.get("target_modules")
    if is_excluded(config.get("exclude_modules"), name):
        return False
    if targets is None:
        return names_no_targets(config)
    if isinstance(targets, str):
        is_linear = name != "lm_head" and not name.endswith(EMBEDDING)
        return (targets.lower() == "all-linear" and is_linear) or re.fullmatch(targets, name) is not None
    if name in targets:
        return True  # what is named in full is adapted whatever its layer
    return _is_named(targets, name) and _is_in_layers(config, name, last=old_peft)


def names_no_targets(config: Config) -> bool:
    """Nothing is said at all: what is in the file is what was trained."""
    return config.get("target_modules") is None and not config.get("target_parameters")


def targets_parameter(config: Config, name: str) -> bool:
    """Whether PEFT wraps this parameter by `target_parameters`."""
    return _is_named(config.get("target_parameters") or (), name)


def _is_named(names: Sequence[str], name: str) -> bool:
    return any(name == known or name.endswith(f".{known}") for known in names)


def is_excluded(exclude: Any, name: str) -> bool:
    if isinstance(exclude, str):
        return bool(exclude) and re.fullmatch(exclude, name) is not None
    return _is_named(exclude or (), name)


def _is_in_layers(config: Config, name: str, *, last: bool) -> bool:
    wanted = config.get("layers_to_transform")
    if wanted is None or wanted == []:
        return True
    any_text = ".*" if last else ".*?"
    patterns = config.get("layers_pattern") or None
    patterns = [patterns] if isinstance(patterns, str) else patterns
    forms = [rf"{any_text}\.[^.]*\.(\d+)\."] if not patterns else [rf"(?:^|{any_text}\.){p}\.(\d+)\." for p in patterns]
    for form in forms:
        if found := re.match(form, name):
            return int(found[1]) in ([wanted] if isinstance(wanted, int) else wanted)
    return False


def read_config(path: Path) -> Config:
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise NoMeaning(f"config: {error}") from error
    if not isinstance(config, dict):
        raise NoMeaning("config is not an object")
    if config.get("peft_type") != "LORA":
        raise NoMeaning(f"peft_type {config.get('peft_type')!r}")
    if config.get("bias") not in (None, "none"):
        raise NoMeaning("trained biases")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _INITS_THAT_KEEP_THE_BASE:
        raise NoMeaning(f"init {init!r} changed the base")
    active = [key for key, value in config.items() if value and key not in _READ | _NO_MATTER]
    if active:
        raise NoMeaning(f"unknown and active: {active}")
    return config
