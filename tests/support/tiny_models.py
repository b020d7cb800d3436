"""Tiny random checkpoints of every family as HF directories, and transformers as the oracle of their numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 128

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _config(kind: str, **changes: Any) -> Any:
    cls = getattr(transformers, f"{kind}Config")
    return cls(**{**_SHARED, **changes})


CONFIGS: dict[str, Any] = {
    "llama": lambda: _config("Llama"),
    "llama-biased": lambda: _config("Llama", attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "llama-tied": lambda: _config("Llama", tie_word_embeddings=True, num_key_value_heads=1),
    "llama-long": lambda: _config("Llama", max_position_embeddings=16384),
    "llama-rope3": lambda: _config("Llama", rope_parameters=_LLAMA3_ROPE),
    "llama-yarn": lambda: _config("Llama", rope_parameters=_YARN_ROPE),
    "llama-linear": lambda: _config(
        "Llama", rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    ),
    "mistral": lambda: _config("Mistral", sliding_window=None, head_dim=16),
    "qwen2": lambda: _config("Qwen2"),
    "qwen3": lambda: _config("Qwen3", head_dim=16),
    "mixtral": lambda: _config("Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": lambda: _config(
        "Qwen3Moe",
        **_EXPERTS,
        head_dim=16,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        num_hidden_layers=3,
        mlp_only_layers=[1],
    ),
    "qwen2_moe": lambda: _config(
        "Qwen2Moe",
        **_EXPERTS,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_hidden_layers=3,
        decoder_sparse_step=2,
    ),
    "qwen2_moe-deep": lambda: _config(
        "Qwen2Moe",
        **_EXPERTS,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_hidden_layers=4,
    ),
    "olmoe": lambda: _config("Olmoe", **_EXPERTS, num_key_value_heads=4, clip_qkv=0.9),
    "olmoe-gqa": lambda: _config("Olmoe", **_EXPERTS),
}
DENSE = ("llama", "llama-biased", "llama-tied", "mistral", "qwen2", "qwen3")
MOE = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe")


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint directory and the same weights in transformers."""

    name: str
    directory: Path
    hf: Any

    def logprobs(self, tokens: list[int]) -> Tensor:
        """Log-probabilities [positions, vocab] of what follows each token, by transformers."""
        with torch.inference_mode():
            out: Tensor = self.hf(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        return out


def make_tiny_model(name: str, directory: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> TinyModel:
    """Random weights, large enough that adapters, positions and experts matter; saved as transformers saves."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.normal_(std=0.2)
            else:
                parameter.normal_(std=0.2)
    model = model.to(dtype).eval()
    model.save_pretrained(directory)
    return TinyModel(name, directory, model.float())
