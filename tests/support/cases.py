"""What the cases are made of: fixture models, adapters tensor by tensor, and their explicit merge in transformers.

The oracle shares no thought with the code it judges: a case says itself by which factor, and to which rows of which
weight, each pair is added; transformers then runs the changed model in fp32.
"""

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

PREFIX = "base_model.model."
PROMPT = [5, 77, 12, 3, 99, 41, 8, 120, 64, 2, 31, 55]
EFFECT_FLOOR = 0.3
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

_SHARED: dict[str, Any] = {
    "vocab_size": 128,
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
_QWEN_MOE: dict[str, Any] = {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "L": ("Llama", {}),
    "LT": ("Llama", {"tie_word_embeddings": True}),
    "L-kv1": ("Llama", {"num_key_value_heads": 1}),
    "L-bias": ("Llama", {"attention_bias": True}),
    "L-long": ("Llama", {"max_position_embeddings": 2048}),
    "Q": ("Qwen3Moe", _QWEN_MOE),
    "Q8": ("Qwen3Moe", {**_QWEN_MOE, "num_experts": 8}),
    "Q2": ("Qwen2Moe", {**_QWEN_MOE, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1}),
    "Q2-odd": (
        "Qwen2Moe",
        {
            **_QWEN_MOE,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "num_experts": 5,
            "shared_expert_intermediate_size": 41,
            "decoder_sparse_step": 1,
        },
    ),
    "M": ("Mixtral", {"intermediate_size": 24, "num_local_experts": 4, "sliding_window": None}),
}
"""The fixtures of the cases: (family, what differs from L). Experts see their top 2."""

Loras = dict[str, tuple[Tensor, Tensor]]
"""Module, by the name transformers calls it today (experts one by one) -> A [r, in] and B [out, r]."""


def make_base(name: str, directory: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Save a fixture's random checkpoint; weights are large enough for positions, experts and adapters to matter."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    family, changes = BASES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**_SHARED | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    model.to(dtype).save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Change:
    """`weight[index] += delta`; a bias that the base does not have starts at zero."""

    weight: str
    delta: Tensor
    index: tuple[Any, ...] = (slice(None),)


class Oracle:
    """A base in fp32, and the same with weights changed for the time of a call."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        if self.model.config.tie_word_embeddings:  # an adapter changes one of the two, not both
            self.model.lm_head.weight = nn.Parameter(self.model.lm_head.weight.detach().clone())
        self._shapes = {key: tuple(p.shape) for key, p in self.model.named_parameters()}

    def loras(self, modules: Iterable[str], *, rank: int = 4, seed: int = 0, std: float = 0.2) -> Loras:
        """A random pair for each module; neither half is zero."""
        dice = torch.Generator().manual_seed(seed)
        made: Loras = {}
        for module in modules:
            num_out, num_in = self.shape(module)
            a, b = torch.randn(rank, num_in, generator=dice), torch.randn(num_out, rank, generator=dice)
            made[module] = (a.mul_(std), b.mul_(std))
        return made

    def shape(self, module: str) -> tuple[int, int]:
        weight, index = place(module)
        shape = self._shapes[weight]
        if not index:
            return shape[0], shape[1]
        is_half = "gate_up" in weight
        return shape[1] // (2 if is_half else 1), shape[2]

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], changes: Iterable[Change] = ()) -> Tensor:
        """fp32 [len(tokens), vocab]."""
        with self._changed(changes):
            out: Tensor = self.model(torch.tensor([list(tokens)])).logits[0].float()
        return out

    def logprobs(self, tokens: Sequence[int], changes: Iterable[Change] = ()) -> list[float]:
        """The logprob of token i + 1 given tokens 0..i, for each i."""
        scores = self.logits(tokens, changes).log_softmax(-1)
        return [float(scores[i, token]) for i, token in enumerate(tokens[1:])]

    def shortfall(self, prompt: list[int], produced: list[int], changes: Iterable[Change] = ()) -> float:
        """By how much the served tokens fall short of the oracle's best logit, at worst; teacher-forced."""
        logits = self.logits(prompt + produced, changes)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(produced)[:, None])[:, 0]
        return float((logits.max(-1).values - chosen).max())

    def effect(self, changes: Iterable[Change], prompt: Sequence[int] = PROMPT) -> float:
        """Largest difference to a logit: a case without an effect proves nothing."""
        return float((self.logits(prompt, changes) - self.logits(prompt)).abs().max())

    @torch.no_grad()
    def choices(self, changes: Iterable[Change] = ()) -> list[list[set[int]]]:
        """The experts of each token of the prompt, layer by layer."""
        top = self.model.config.num_experts_per_tok
        with self._changed(changes):
            layers = self.model(torch.tensor([PROMPT]), output_router_logits=True).router_logits
        return [[set(row) for row in scores.topk(top, -1).indices.tolist()] for scores in layers]

    def experts_reached(self) -> int:
        """How many experts the prompt is routed to in the layer where they are fewest."""
        return min(len(set.union(*layer)) for layer in self.choices())

    def merge(self, loras: Loras, scale: float | Mapping[str, float]) -> list[Change]:
        """Each pair at its factor: one for all, or one a module."""
        changes = []
        for module, (a, b) in loras.items():
            factor = scale[module] if isinstance(scale, Mapping) else scale
            weight, index = place(module)
            if "gate_up" in weight:
                half = self._shapes[weight][1] // 2
                rows = slice(0, half) if module.endswith("gate_proj") else slice(half, None)
                index = (*index, rows)
            changes.append(Change(weight, factor * (b.float() @ a.float()), index or (slice(None),)))
        return changes

    @contextmanager
    def _changed(self, changes: Iterable[Change]) -> Iterator[None]:
        saved: dict[str, Tensor | None] = {}
        for change in changes:
            module, _, leaf = change.weight.rpartition(".")
            owner = self.model.get_submodule(module)
            if change.weight not in saved:
                held = getattr(owner, leaf)
                saved[change.weight] = None if held is None else held.data.clone()
                if held is None:
                    setattr(owner, leaf, nn.Parameter(torch.zeros_like(change.delta)))
            getattr(owner, leaf).data[change.index] += change.delta
        try:
            yield
        finally:
            for weight, value in saved.items():
                module, _, leaf = weight.rpartition(".")
                owner = self.model.get_submodule(module)
                if value is None:
                    setattr(owner, leaf, None)
                else:
                    getattr(owner, leaf).data.copy_(value)


def place(module: str) -> tuple[str, tuple[Any, ...]]:
    """The weight that holds a module, and which of its experts it is (empty: it is no expert's)."""
    prefix, is_expert, rest = module.partition(".experts.")
    if not is_expert:
        return f"{module}.weight", ()
    number, _, leaf = rest.partition(".")
    return f"{prefix}.experts.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}", (int(number),)


def modules(*leaves: str, layers: Sequence[int] = (0, 1)) -> list[str]:
    """Dense modules of each layer by their last names."""
    homes = {leaf: "self_attn" if leaf in ATTENTION else "mlp" for leaf in leaves}
    return [f"model.layers.{layer}.{home}.{leaf}" for layer in layers for leaf, home in homes.items()]


def experts(*leaves: str, numbers: Sequence[int] = (0, 1, 2, 3), layers: Sequence[int] = (0, 1)) -> list[str]:
    """Modules of experts, by today's names."""
    return [f"model.layers.{layer}.mlp.experts.{e}.{leaf}" for layer in layers for e in numbers for leaf in leaves]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """So many random tokens, others for each seed."""
    dice = random.Random(1000 * length + seed)
    return [dice.randrange(_SHARED["vocab_size"]) for _ in range(length)]


def strength(rank: int) -> float:
    """Of A and B, so that every rank has an effect of one size."""
    return 0.4 / math.sqrt(math.sqrt(rank))


def config(**changes: Any) -> dict[str, Any]:
    """What PEFT writes for the standard adapter: rank 4, alpha 8, q_proj and v_proj."""
    plain: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
    }
    return plain | changes


def without(settings: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def keyed(loras: Loras, form: str = PREFIX + "{module}.lora_{half}.weight") -> dict[str, Tensor]:
    """Pairs under the names of a file."""
    return {
        form.format(module=module, half=half): tensor
        for module, pair in loras.items()
        for half, tensor in zip("AB", pair, strict=True)
    }


@dataclass(frozen=True)
class Files:
    """An adapter as its trainer leaves it: configuration, tensors, and other files by name."""

    config: Any
    tensors: Mapping[str, Tensor] | None = None
    more: Mapping[str, bytes] = field(default_factory=dict)
    weights: str = "adapter_model.safetensors"

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text(json.dumps(self.config))
        if self.tensors is not None:
            plain = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in self.tensors.items()}
            save_file(plain, directory / self.weights, metadata={"format": "pt"})
        for name, data in self.more.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return directory
