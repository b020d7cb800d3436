"""The fields of a PEFT LoRA configuration: what is read, what is left alone, and what is refused by its key.

Everything in a configuration that changes the result and is not computed here is refused; a key that this version has
never heard of is refused when it is set. What the fields mean is `rules`.
"""

import re
from typing import Any

import msgspec

from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.refuse import invalid

CONFIG_FILE = "adapter_config.json"


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


def config_of(config: dict[str, Any]) -> LoraConfig:
    """Check a configuration and keep what decides the delta. Raises AdapterInvalid."""
    refuse_drafters(CONFIG_FILE, config)
    if config.get("peft_type") != "LORA":
        raise invalid(CONFIG_FILE, "peft_type", found=f"{config.get('peft_type')!r:.200}", wanted="'LORA'")
    _refuse_unserved(config)
    try:
        return msgspec.convert(_plain(config), LoraConfig)
    except (msgspec.ValidationError, OverflowError) as error:
        raise _misfit(error) from error


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
