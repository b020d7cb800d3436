"""What a PEFT LoRA configuration means: rank, alpha and scale of a module, and whether it is a target at all.

Pure: a configuration in, answers out. Everything in a configuration that changes the result and is not
computed here is refused by its key; a key that this version has never heard of is refused when it is set.
"""

import math
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from infinilora.weights.refuse import invalid

CONFIG_FILE = "adapter_config.json"
Number = TypeVar("Number", int, float)


class LoraRules(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a LoRA configuration that decide the delta."""

    peft_type: str
    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    target_parameters: list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    peft_version: str | None = None

    def rank(self, module: str) -> int:
        """The rank of a module (or of a parameter, by its own name)."""
        return _by_pattern(self.rank_pattern or {}, module, self.r)

    def scale(self, module: str) -> float:
        """What multiplies B·A: alpha / rank, or alpha / sqrt(rank) for rsLoRA. The one place it is computed."""
        alpha, rank = _by_pattern(self.alpha_pattern or {}, module, self.lora_alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def target_key(self, module: str) -> str | None:
        """The name by which PEFT targets this module; None: not at all, PEFT would silently drop its tensors.

        It is the module's own name, or that of its `weight` where a configuration targets parameters.
        Rank and alpha patterns are held against it.
        """
        if self._targets_module(module):
            return module
        weight = f"{module}.weight"
        return weight if self.targets_parameter(weight) else None

    def targets_parameter(self, parameter: str) -> bool:
        return _named(self.target_parameters or (), parameter)

    def _targets_module(self, module: str) -> bool:
        match self.exclude_modules:
            case str() as pattern if pattern and re.fullmatch(pattern, module):
                return False
            case list() as names if _named(names, module):
                return False
        match self.target_modules:
            case None:
                return False
            case "all-linear":
                return True
            case str() as pattern:
                return re.fullmatch(pattern, module) is not None
            case names:
                if module in names:
                    return True
                return _named(names, module) and self._transforms_layer_of(module)

    def _transforms_layer_of(self, module: str) -> bool:
        wanted = self.layers_to_transform
        if wanted is None or wanted == []:
            return True
        names = self.layers_pattern or ["[^.]*"]
        for name in [names] if isinstance(names, str) else names:
            if found := re.match(rf"(?:^|.*?\.){name}\.(?P<layer>\d+)\.", module):
                layer = int(found.group("layer"))
                return layer == wanted if isinstance(wanted, int) else layer in wanted
        return False


def _named(names: Iterable[str], key: str) -> bool:
    return any(key == name or key.endswith(f".{name}") for name in names)


def _by_pattern(patterns: dict[str, Number], key: str, default: Number) -> Number:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", key):
            return value
    return default


# Set to anything that is not false, none or empty, these change the delta in a way that is not computed here.
REFUSED = {
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "layer_replication": "replicated layers",
    "lora_bias": "a bias on lora_B",
    "megatron_config": "Megatron layers",
    "modules_to_save": "whole modules trained beside the LoRA",
    "monteclora_config": "MonteCLoRA",
    "trainable_token_indices": "trained token embeddings",
    "use_bdlora": "block-diagonal LoRA",
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
}

# Set to anything, these leave the delta alone: bookkeeping, training, initialisation.
HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "lora_dropout",
        "lora_ga_config",
        "loftq_config",
        "megatron_core",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)

# These only set the first values of A and B; every other initialisation also rewrites the base weights.
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


def rules_of(config: dict[str, Any]) -> LoraRules:
    """Check a configuration and keep what decides the delta. Raises AdapterInvalid."""
    if config.get("peft_type") != "LORA":
        raise invalid(CONFIG_FILE, "peft_type", found=repr(config.get("peft_type")), wanted="'LORA'")
    _refuse_unserved(config)
    try:
        rules = msgspec.convert(config, LoraRules)
    except msgspec.ValidationError as error:
        raise invalid(CONFIG_FILE, "content", found=str(error), wanted="a PEFT LoraConfig") from error
    _check_values(rules)
    return rules


def _refuse_unserved(config: dict[str, Any]) -> None:
    if config.get("bias", "none") != "none":
        raise invalid(CONFIG_FILE, "bias", found=repr(config["bias"]), wanted="'none'")
    init = config.get("init_lora_weights", True)
    if not any(init is plain or init == plain for plain in PLAIN_INITS if type(init) is type(plain)):
        raise invalid(
            CONFIG_FILE,
            "init_lora_weights",
            found=f"{init!r}, which also rewrites the base weights",
            wanted="an adapter converted back to plain LoRA (save_pretrained with "
            "path_initial_model_for_weight_conversion)",
        )
    known = set(LoraRules.__struct_fields__) | HARMLESS | {"bias", "init_lora_weights"}
    for key, value in sorted(config.items()):
        if key in known or not value:
            continue
        reason = REFUSED.get(key, "a key that this version does not know")
        raise invalid(CONFIG_FILE, key, found=f"{value!r:.200} ({reason})", wanted="it unset")


def _check_values(rules: LoraRules) -> None:
    for key, rank in [("r", rules.r), *(rules.rank_pattern or {}).items()]:
        if rank < 1:
            raise invalid(CONFIG_FILE, f"rank {key}", found=rank, wanted="at least 1")
    for key, alpha in [("lora_alpha", rules.lora_alpha), *(rules.alpha_pattern or {}).items()]:
        if not math.isfinite(alpha):
            raise invalid(CONFIG_FILE, f"alpha {key}", found=alpha, wanted="a finite number")
    patterns = [*(rules.rank_pattern or {}), *(rules.alpha_pattern or {})]
    patterns += [p for p in (rules.target_modules, rules.exclude_modules) if isinstance(p, str)]
    match rules.layers_pattern:
        case str() as pattern:
            patterns.append(pattern)
        case list() as more:
            patterns += more
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise invalid(
                CONFIG_FILE, f"pattern {pattern!r}", found=str(error), wanted="a regular expression"
            ) from error
