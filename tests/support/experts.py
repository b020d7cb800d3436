"""A small layer of experts, and what it computes by definition."""

import torch
from torch import Tensor

from infinilora.engine.model.experts import StackedExperts
from infinilora.engine.model.ops import TorchOps, Ungrouped
from infinilora.engine.model.spec import MoeSpec

HIDDEN, FF, EXPERTS, TOP_K = 40, 24, 5, 2
SPEC = MoeSpec(EXPERTS, TOP_K, FF, renormalise=True)


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stacked(dtype: torch.dtype, *, is_all: bool, device: str = "cpu") -> StackedExperts:
    stacks = TorchOps(torch.device(device), dtype).stacks(EXPERTS, (2 * FF, HIDDEN), (HIDDEN, FF))
    assert not isinstance(stacks, Ungrouped)
    for seed, stack in enumerate(stacks):
        stack.weights.copy_(rand(*stack.weights.shape, seed=seed) / stack.weights.shape[-1] ** 0.5)
    gate_up, down = stacks
    return StackedExperts(gate_up, down, is_all=is_all)


def by_definition(weights: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """Pair by pair, in fp64."""
    out = torch.zeros(places.numel(), weights.shape[1], dtype=torch.float64)
    for pair, place in enumerate(places.flatten().tolist()):
        if place < EXPERTS:
            out[pair] = weights[place].double() @ rows[pair].double()
    return out
