"""What trainers write that is LoRA and not PEFT's: MLX's directories.

    adapter_config.json     {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 20.0, ...}, ...}
    adapters.safetensors    model.layers.0.self_attn.q_proj.lora_a [in, r]   .lora_b [r, out]   .m [out], of DoRA

The delta is scale · (a·b)ᵀ: both matrices lie transposed against PEFT's, and the scale is no alpha. DoRA is as PEFT's:
a magnitude for each row, the base's bias left alone. (Its first months scaled the bias too; their files have `alpha` or
`use_dora`, and are refused.) The rest of the configuration is how it was trained. Which modules are adapted, the
weights alone tell.
"""

from typing import Any

import msgspec

from infinilora.weights.config import CONFIG_FILE, LoraConfig
from infinilora.weights.refuse import invalid
from infinilora.weights.rules import LoraRules, checked_rules

MLX_TENSORS_FILE = "adapters.safetensors"
_PARAMETERS = "lora_parameters"


class _Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that MLX's own reader takes from `lora_parameters`. An `alpha` of its first year meant another scale."""

    rank: int
    scale: float
    dropout: float = 0.0
    keys: list[str] | None = None


def is_mlx(config: dict[str, Any]) -> bool:
    """Whether a configuration is MLX's: no peft_type, and its own key for LoRA."""
    return "peft_type" not in config and _PARAMETERS in config


def mlx_rules(config: dict[str, Any]) -> LoraRules:
    """One rank and one scale for every module in the file. Raises AdapterInvalid."""
    kind = config.get("fine_tune_type") or "lora"
    if kind not in ("lora", "dora"):
        raise invalid(CONFIG_FILE, "fine_tune_type", found=f"{kind!r:.200} (MLX)", wanted="'lora' or 'dora'")
    if config.get("use_dora"):
        raise invalid(
            CONFIG_FILE,
            "use_dora",
            found=f"{config['use_dora']!r:.200} (DoRA of MLX before fine_tune_type, which scaled biases at first)",
            wanted="fine_tune_type 'dora'",
        )
    try:
        parameters = msgspec.convert(config[_PARAMETERS], _Parameters)
        alpha = parameters.scale * parameters.rank
    except (msgspec.ValidationError, OverflowError) as error:
        raise invalid(
            CONFIG_FILE, _PARAMETERS, found=str(error), wanted="rank and scale, as MLX writes them"
        ) from error
    return checked_rules(LoraConfig(r=parameters.rank, lora_alpha=alpha, use_dora=kind == "dora"))
