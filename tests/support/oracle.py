"""The oracle of the end-to-end tests: transformers (+ PEFT, or an explicit merge where PEFT has no say).

Shares no code with what it checks: adapters are written by name here, merged by hand here, and run by transformers.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)$")
ANSWERS_AT_ONCE = 32
_FUSED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class Oracle:
    """One base checkpoint in fp32, with any number of adapters merged for the time of a call."""

    def __init__(self, model_dir: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.config = self.model.config
        if self.config.tie_word_embeddings:  # an adapter of one of the two leaves the other as it is
            self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.detach().clone())

    @torch.no_grad()
    def logits(self, token_ids: list[int], adapter: Path | None = None) -> Tensor:
        """fp32 [len(token_ids), vocab]."""
        with self.merged(adapter):
            out: Tensor = self.model(torch.tensor([token_ids])).logits[0].float()
        return out

    def logprobs(self, token_ids: list[int], adapter: Path | None = None) -> list[float]:
        """The logprob of token i + 1 given tokens 0..i, for each i."""
        scores = torch.log_softmax(self.logits(token_ids, adapter), dim=-1)
        return [float(scores[i, t]) for i, t in enumerate(token_ids[1:])]

    def effect(self, token_ids: list[int], adapter: Path) -> float:
        """Largest absolute difference the adapter makes to a logit: a test without an effect proves nothing."""
        return float((self.logits(token_ids, adapter) - self.logits(token_ids)).abs().max())

    def shortfall(self, prompt: list[int], produced: list[int], adapter: Path | None = None) -> float:
        """Teacher-forced: by how much the served greedy tokens fall short of the oracle's best logit, at worst."""
        logits = self.logits(prompt + produced, adapter)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(produced)[:, None])[:, 0]
        return float((logits.max(dim=-1).values - chosen).max())

    @torch.no_grad()
    def worst_shortfall(self, answers: Sequence[tuple[list[int], list[int]]], adapter: Path | None = None) -> float:
        """The largest `shortfall` of many (prompt, produced). What fills a short one up comes after it: no matter."""
        worst = 0.0
        with self.merged(adapter):
            for start in range(0, len(answers), ANSWERS_AT_ONCE):
                some = answers[start : start + ANSWERS_AT_ONCE]
                longest = max(len(prompt) + len(produced) for prompt, produced in some)
                rows = [[*p, *t] + [0] * (longest - len(p) - len(t)) for p, t in some]
                for logits, (prompt, produced) in zip(self.model(torch.tensor(rows)).logits.float(), some, strict=True):
                    of_each = logits[len(prompt) - 1 : len(prompt) + len(produced) - 1]
                    chosen = of_each.gather(1, torch.tensor(produced)[:, None])[:, 0]
                    worst = max(worst, float((of_each.max(dim=-1).values - chosen).max()))
        return worst

    @contextmanager
    def merged(self, adapter: Path | None) -> Iterator[None]:
        """W += scale * B @ A for each pair of the adapter's file, then each row to its magnitude if any, and back."""
        if adapter is None:
            yield
            return
        saved: dict[str, Tensor] = {}
        params = dict(self.model.named_parameters())
        for module, delta in deltas(adapter):
            name, rows, expert = self._where(module, params)
            saved.setdefault(name, params[name].detach().clone())
            target = params[name].data if expert is None else params[name].data[expert]
            target[rows] += delta
        for module, magnitudes in lengths(adapter):
            weight = params[f"{module}.weight"].data
            weight *= (magnitudes / weight.norm(dim=1))[:, None]
        try:
            yield
        finally:
            for name, value in saved.items():
                params[name].data.copy_(value)

    def _where(self, module: str, params: dict[str, Tensor]) -> tuple[str, slice, int | None]:
        module = module.replace("block_sparse_moe", "mlp")
        if match := _EXPERT.match(module):
            prefix, expert, projection = match.groups()
            projection = _FUSED.get(projection, projection)
            if projection == "down_proj":
                return f"{prefix}.experts.down_proj", slice(None), int(expert)
            name = f"{prefix}.experts.gate_up_proj"
            half = params[name].shape[1] // 2
            rows = slice(0, half) if projection == "gate_proj" else slice(half, None)
            return name, rows, int(expert)
        return f"{module}.weight", slice(None), None


def deltas(adapter: Path) -> Iterator[tuple[str, Tensor]]:
    """(module name, scale * B @ A) for each pair of a plain PEFT file, in fp32."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key in tensors:
        if key.endswith(".lora_A.weight"):
            stem = key.removesuffix(".lora_A.weight")
            b = tensors[f"{stem}.lora_B.weight"].float()
            yield stem.removeprefix("base_model.model."), scale * (b @ tensors[key].float())
        elif key.endswith(".lora_embedding_A"):  # A [r, vocab], B [h, r]; the table is [vocab, h]
            stem = key.removesuffix(".lora_embedding_A")
            b = tensors[f"{stem}.lora_embedding_B"].float()
            yield stem.removeprefix("base_model.model."), scale * (b @ tensors[key].float()).T


def lengths(adapter: Path) -> Iterator[tuple[str, Tensor]]:
    """(module name, the lengths that its rows are to have) of a DoRA file, in fp32."""
    for key, magnitudes in load_file(adapter / "adapter_model.safetensors").items():
        if key.endswith(".lora_magnitude_vector"):
            yield key.removesuffix(".lora_magnitude_vector").removeprefix("base_model.model."), magnitudes.float()


def module_shapes(model_dir: Path, targets: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """(out, in) of each module of a checkpoint whose last name is a target, by the names on disk (per expert)."""
    shapes: dict[str, tuple[int, int]] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        for key, tensor in load_file(file).items():
            module = key.removesuffix(".weight")
            if key.endswith(".weight") and tensor.ndim == 2 and module.rsplit(".", 1)[-1] in targets:
                shapes[module] = (tensor.shape[0], tensor.shape[1])
    if "lm_head" in targets and "lm_head" not in shapes:  # tied: on disk there is one table for both
        shapes["lm_head"] = module_shapes(model_dir, ("embed_tokens",))["model.embed_tokens"]
    return shapes


def write_adapter(
    out: Path,
    model_dir: Path,
    *,
    rank: int,
    targets: tuple[str, ...],
    seed: int,
    std: float = 0.1,
    alpha: float | None = None,
    dtype: torch.dtype = torch.float32,
    dora: bool = False,
) -> Path:
    """A random adapter as PEFT writes it: neither A nor B is zero, and no magnitude (`dora`) is the row's own."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for module, (n_out, n_in) in sorted(module_shapes(model_dir, targets).items()):
        stem, wide, high, halves = f"base_model.model.{module}", n_in, n_out, ("lora_A.weight", "lora_B.weight")
        if module.endswith("embed_tokens"):  # a table [in, out], and halves of their own names
            wide, high, halves = n_out, n_in, ("lora_embedding_A", "lora_embedding_B")
        tensors[f"{stem}.{halves[0]}"] = torch.randn(rank, wide, generator=generator).mul_(std).to(dtype)
        tensors[f"{stem}.{halves[1]}"] = torch.randn(high, rank, generator=generator).mul_(std).to(dtype)
        if dora:
            tensors[f"{stem}.lora_magnitude_vector"] = torch.rand(high, generator=generator).add_(0.5).to(dtype)
    assert tensors, f"no module of {model_dir} is named one of {targets}"
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_dir),
        "r": rank,
        "lora_alpha": alpha if alpha is not None else 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        "use_dora": dora,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_dropout": 0.0,
    }
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out
