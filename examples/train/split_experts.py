"""Give a Mixtral model one linear layer for each projection of each expert, as its checkpoint has them.

transformers 5 fuses the experts of a layer into two tensors, and PEFT then adapts gate and up as one matrix
of twice the rank, rebuilding every expert's whole weight in each forward pass. With separate layers each
projection has its own rank, an expert costs what it is used, and the names are those of the checkpoint.
"""

from typing import Any

import torch
from torch import Tensor, nn

EXPERTS_IN_MODEL = ".mlp.experts."
EXPERTS_IN_CHECKPOINT = ".block_sparse_moe.experts."


class Expert(nn.Module):
    """w2(act(w1 x) * w3 x): one expert with the names of a Mixtral checkpoint."""

    def __init__(self, gate_up: Tensor, down: Tensor, act: nn.Module) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        self.w1, self.w3, self.w2 = _linear(gate), _linear(up), _linear(down)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(self.act(self.w1(x)) * self.w3(x))
        return y


class SplitExperts(nn.ModuleList):
    """Stands where the fused experts stood: same call, same result."""

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """y[t] = sum over k of topk_weights[t, k] * expert[topk_ids[t, k]](x[t]);  x, y [T, h]; topk_* [T, k]."""
        y = torch.zeros_like(x)
        for index, expert in enumerate(self):
            rows, choice = torch.where(topk_ids == index)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * topk_weights[rows, choice, None])
        return y


def split_experts(model: Any) -> Any:
    """Replace the fused experts of every Mixtral layer of `model`, in place; other models are left as they are."""
    if model.config.model_type != "mixtral":
        return model
    for layer in model.model.layers:
        fused = layer.mlp.experts
        layer.mlp.experts = SplitExperts(
            Expert(gate_up.detach(), down.detach(), fused.act_fn)
            for gate_up, down in zip(fused.gate_up_proj, fused.down_proj, strict=True)
        )
    model.config.model_type = "mixtral_split"  # PEFT rewrites the targets of a `mixtral` for fused experts
    return model


def checkpoint_name(name: str) -> str:
    """The name of an adapter tensor by the module names of the checkpoint on disk."""
    return name.replace(EXPERTS_IN_MODEL, EXPERTS_IN_CHECKPOINT)


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.contiguous())
    return layer
