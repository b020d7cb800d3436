"""Reads a llama model out of a GGUF file: tokenizer, configuration, and weights widened to fp32, as HF names them.

The weights do not come through transformers: its reader wants more packages, and what it makes cannot be saved.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OnProgress = Callable[[str, int, int], None]
"""Called with a stage's name, and how many of how many units are done."""

_GGUF_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(gguf: Path, on_progress: OnProgress) -> tuple[Any, Any, dict[str, Tensor]]:
    """The tokenizer, the configuration and the dequantised fp32 weights of a llama GGUF, as HF names them."""
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig

    on_progress("reading the tokenizer", 0, 1)
    place: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **place)
    # The file says `smollm`: digits stand alone. The reader of GGUF knows only the byte-level half of that.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    read = AutoConfig.from_pretrained(gguf.parent, **place).to_dict()
    tied = {"rms_norm_eps": 1e-5, "dtype": "float32", "tie_word_embeddings": True}
    config = LlamaConfig(**read | tied | {"architectures": ["LlamaForCausalLM"]})
    on_progress("reading the tokenizer", 1, 1)
    return tokenizer, config, _read_weights(gguf, config.num_attention_heads, config.num_key_value_heads, on_progress)


def _read_weights(gguf: Path, num_heads: int, num_kv_heads: int, on_progress: OnProgress) -> dict[str, Tensor]:
    from gguf import GGUFReader, dequantize

    tensors = GGUFReader(gguf).tensors
    weights: dict[str, Tensor] = {}
    for done, tensor in enumerate(tensors, 1):
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = _split_halves(weight, num_heads if "attn_q" in tensor.name else num_kv_heads)
        weights[_hf_name(tensor.name)] = weight
        on_progress("reading the weights", done, len(tensors))
    return weights


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem = name.removesuffix(".weight")
    if stem in _GGUF_NAMES:
        return f"model.{_GGUF_NAMES[stem]}.weight"
    _, layer, module = stem.split(".")
    return f"model.layers.{layer}.{_GGUF_NAMES[module]}.weight"


def _split_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from GGUF's rotary order (pairs side by side) to that of HF (two halves)."""
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()
