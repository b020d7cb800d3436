"""What a PEFT LoRA configuration means: rank, alpha and scale of a module, and whether it is a target at all.

A configuration in, answers out. Everything in a configuration that changes the result and is not computed here
is refused by its key; a key that this version has never heard of is refused when it is set.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from infinilora.protocol.adapter import AdapterWarning
from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.patterns import Matcher
from infinilora.weights.readings import TODAY, Reading, other_readings, reading_of
from infinilora.weights.refuse import invalid, listed

CONFIG_FILE = "adapter_config.json"
Readings = Callable[[Iterable[bool]], bool]
"""`any` or `all`: of PEFT's two readings of a layer's number."""

_LAYER = (r"(?:^|.*?\.){}\.(?P<layer>\d+)\.", r"(?:^|.*\.){}\.(?P<layer>\d+)\.")
"""A module's layer as PEFT reads it today (the first number), and as it did until 0.18 (the last: an expert's)."""
_ANY_LIST = "[^.]*"
_MAX_RANK = 1 << 20
_MAX_ALPHA = 3e38


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a LoRA configuration that decide the delta."""

    peft_type: str = "LORA"
    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    lora_bias: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] = []
    target_parameters: list[str] = []
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] = []
    modules_to_save: list[str] = []
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    ensure_weight_tying: bool = False
    peft_version: str | None = None


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
        wanted = self.config.layers_to_transform
        if wanted is None or wanted == []:
            return True
        layers = [wanted] if isinstance(wanted, int) else wanted
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


# Set to anything that is not false, none or empty, these change the delta in a way that is not computed here.
REFUSED = {
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "layer_replication": "replicated layers",
    "megatron_config": "Megatron layers",
    "monteclora_config": "MonteCLoRA",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
}

# Set to anything, these leave the delta alone: bookkeeping, training (swift writes its own learning rates beside),
# initialisation.
HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "lora_dropout",
        "lora_dtype",
        "lora_ga_config",
        "loftq_config",
        "lorap_emb_lr",
        "lorap_lr_ratio",
        "megatron_core",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)

# These only set the first values of A and B; every other initialisation also rewrites the base weights.
PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})

# What only the configuration of something that drafts tokens has.
DRAFTERS = ("medusa", "speculator", "eagle")


def rules_of(config: dict[str, Any]) -> LoraRules:
    """Check a configuration and keep what decides the delta. Raises AdapterInvalid."""
    refuse_drafters(CONFIG_FILE, config)
    if config.get("peft_type") != "LORA":
        raise invalid(CONFIG_FILE, "peft_type", found=f"{config.get('peft_type')!r:.200}", wanted="'LORA'")
    _refuse_unserved(config)
    try:
        fields = msgspec.convert(_plain(config), LoraConfig)
    except (msgspec.ValidationError, OverflowError) as error:
        raise _misfit(error) from error
    return checked_rules(fields, others=other_readings(config.keys()))


def _misfit(error: Exception) -> AdapterInvalid:
    """A value that a LoraConfig of PEFT would not hold: by its key, where msgspec says at which ("... - at `$.r`")."""
    told, _, key = str(error).rpartition(" - at `$.")
    if words := re.fullmatch("Expected `(.+)`, got `(.+)`", told):
        return invalid(CONFIG_FILE, f"{key[:-1]:.200}", found=words[2], wanted=words[1].replace("|", "or"))
    return invalid(CONFIG_FILE, "content", found=str(error), wanted="a PEFT LoraConfig")


def refuse_drafters(file: str, config: dict[str, Any]) -> None:
    """Medusa heads and other speculators come under names like an adapter's, and are none."""
    for key, value in config.items():
        if key.lower().startswith(DRAFTERS) and value:
            raise invalid(
                file,
                f"{key:.200}",
                found=f"{value!r:.200}: a Medusa head or another speculator, which drafts tokens",
                wanted="a LoRA adapter; speculators are not served",
            )


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Without nulls, which stand for defaults, and with whole numbers where a writer made them floats."""
    plain = {key: value for key, value in config.items() if value is not None}
    for key in ("r", "layers_to_transform"):
        if key in plain:
            plain[key] = _whole(plain[key])
    if isinstance(ranks := plain.get("rank_pattern"), dict):
        plain["rank_pattern"] = {pattern: _whole(rank) for pattern, rank in ranks.items()}
    return plain


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(number) for number in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refuse_unserved(config: dict[str, Any]) -> None:
    bias = config.get("bias")
    if bias is not None and bias != "none":
        raise invalid(CONFIG_FILE, "bias", found=f"{bias!r:.200}", wanted="'none'")
    init = config.get("init_lora_weights")
    if not (init is None or isinstance(init, bool) or (isinstance(init, str) and init.lower() in PLAIN_INITS)):
        raise invalid(
            CONFIG_FILE,
            "init_lora_weights",
            found=f"{init!r:.200}, which also rewrites the base weights",
            wanted="an adapter converted back to plain LoRA (save_pretrained with "
            "path_initial_model_for_weight_conversion), or its first values beside it (in pissa_init/ or the like)",
        )
    known = set(LoraConfig.__struct_fields__) | HARMLESS | {"bias", "init_lora_weights"}
    for key, value in sorted(config.items()):
        if key in known or not value:
            continue
        reason = REFUSED.get(key, "a key that this version does not know")
        raise invalid(CONFIG_FILE, f"{key:.200}", found=f"{value!r:.200} ({reason})", wanted="it unset")


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
    matcher = Matcher(CONFIG_FILE)
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        matcher.check(pattern, reading.form)
    for targets in (config.target_modules, config.exclude_modules):
        if isinstance(targets, str):
            matcher.check(targets)
    for pattern in _layer_lists(config):
        for form in _LAYER:
            matcher.check(pattern, form)
    has_patterns = config.rank_pattern or config.alpha_pattern
    return LoraRules(config, matcher, reading, others if has_patterns else ())
