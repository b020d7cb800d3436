"""The products of a layer's experts. Knows rows and weights, not who chose (moe.py).

A *pair* is a (token, choice); pair t * k + j is choice j of token t. Pairs are sorted by expert, computed, and put back
in their order. `EachExpert` gives each expert its rows as a slice, for which the host must know the counts: of a device
it waits. `StackedExperts` makes one product of all, whose shapes do not depend on the routing: nobody waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from infinilora.engine.model.ops import Linear, Stack


class SortedPairs(Protocol):
    """The pairs of a step, by expert. A pair that has no expert here gets zeros."""

    def gate_up(self, x: Tensor) -> Tensor:
        """Each pair's expert on its token's row: x [T, h] -> [T * k, 2f]."""
        ...

    def down(self, act: Tensor) -> Tensor:
        """Each pair's expert on its own row: act [T * k, f] -> [T * k, h]."""
        ...


class Experts(Protocol):
    """The experts that are here, of one layer. `how` they are computed, for the log."""

    @property
    def how(self) -> str: ...

    def __len__(self) -> int: ...

    def sort(self, places: Tensor) -> SortedPairs:
        """Places int32 [T, k]: which of the experts here, or their number for one that is not."""
        ...


@dataclass(frozen=True, slots=True)
class EachExpert:
    """A product an expert: gate_up [h -> 2f], down [f -> h] of each."""

    products: Sequence[tuple[Linear, Linear]]
    hidden_dim: int
    expert_dim: int
    how: str

    def __len__(self) -> int:
        return len(self.products)

    def sort(self, places: Tensor) -> SortedPairs:
        return _Slices(self, places)


class _Slices:
    """`order` lists the pairs that have an expert here, `tokens` their rows."""

    def __init__(self, experts: EachExpert, places: Tensor) -> None:
        self._experts = experts
        flat = places.flatten()
        self._num_pairs = len(flat)
        self._counts: list[int] = torch.bincount(flat, minlength=len(experts)).tolist()[: len(experts)]
        self._order = flat.argsort(stable=True)[: sum(self._counts)]
        self._tokens = self._order // places.shape[1]

    def gate_up(self, x: Tensor) -> Tensor:
        products = [gate_up for gate_up, _ in self._experts.products]
        return self._apply(products, x[self._tokens], width=2 * self._experts.expert_dim)

    def down(self, act: Tensor) -> Tensor:
        products = [down for _, down in self._experts.products]
        return self._apply(products, act[self._order], width=self._experts.hidden_dim)

    def _apply(self, products: list[Linear], x_sorted: Tensor, *, width: int) -> Tensor:
        """Run each expert on its slice of x_sorted [pairs here, in] -> [T * k, width], in the order of pairs."""
        pieces, at = [], 0
        for product, count in zip(products, self._counts, strict=True):
            if count:
                pieces.append(product(x_sorted[at : at + count]))
                at += count
        is_full = at == self._num_pairs
        make = x_sorted.new_empty if is_full else x_sorted.new_zeros
        out = make(self._num_pairs, width)
        return out.index_copy_(0, self._order, torch.cat(pieces)) if pieces else out


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """One product of all experts here: gate_up [E, 2f, h], down [E, h, f]. `is_all`: the layer has no others."""

    gate_up: Stack
    down: Stack
    is_all: bool
    how: str = "grouped"

    def __len__(self) -> int:
        return len(self.gate_up.weights)

    def sort(self, places: Tensor) -> SortedPairs:
        return _Groups(self, places)


class _Groups:
    """All pairs, those of no expert here last; `ends` int32 [E], where each expert's end. All of it on the device."""

    def __init__(self, experts: StackedExperts, places: Tensor) -> None:
        self._experts = experts
        found, self._order = places.flatten().sort(stable=True)
        self._tokens = self._order // places.shape[1]
        numbers = torch.arange(len(experts), dtype=found.dtype, device=found.device)
        self._ends = torch.searchsorted(found, numbers, right=True, out_int32=True)
        self._is_here = None if experts.is_all else (found < len(experts))[:, None]

    def gate_up(self, x: Tensor) -> Tensor:
        return self._apply(self._experts.gate_up, x[self._tokens])

    def down(self, act: Tensor) -> Tensor:
        return self._apply(self._experts.down, act[self._order])

    def _apply(self, stack: Stack, x_sorted: Tensor) -> Tensor:
        y = stack(x_sorted, self._ends)
        if self._is_here is not None:
            y = torch.where(self._is_here, y, 0)  # beyond the last end there is whatever was in memory
        return y.new_empty(y.shape).index_copy_(0, self._order, y)
