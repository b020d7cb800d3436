"""What a LoRA delta is, in float64 numpy, and random adapters to try it on. Shares no code with the kernels."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infinilora.kernels.batch import Part, SiteWeights

Array = npt.NDArray[np.float64]
Rows = Sequence[tuple[int, int, int]]


def wide(t: Tensor) -> Array:
    return t.detach().double().numpy()


def delta(x: Array, part: Part, expert: int | None = None) -> Array:
    """PEFT's formula: scale * B (A x) (+ bias) for each row x, with B = Bt^T."""
    a, bt = wide(part.a), wide(part.bt)
    if expert is not None:
        a, bt = a[expert], bt[expert]
    b = bt.T
    bias = 0.0 if part.bias is None else wide(part.bias)
    return np.stack([part.scale * (b @ (a @ row)) + bias for row in x]) if len(x) else np.zeros((0, b.shape[0]))


def dense(bound: Mapping[int, SiteWeights], segments: Rows, x: Tensor, out_dim: int) -> Array:
    y = np.zeros((x.shape[0], out_dim))
    for start, rows, slot in segments:
        for part in bound.get(slot, ()):
            y[start : start + rows, part.out_offset : part.out_offset + part.out_dim] += delta(
                wide(x)[start : start + rows], part
            )
    return y


def moe_gate_up(bound: Mapping[int, SiteWeights], segments: Rows, x: Tensor, ids: Tensor, out_dim: int) -> Array:
    tokens, k = ids.shape
    y = np.zeros((tokens, k, out_dim))
    for start, rows, slot in segments:
        for part in bound.get(slot, ()):
            for t in range(start, start + rows):
                for j in range(k):
                    if 0 <= (e := int(ids[t, j])) < part.num_experts:
                        y[t, j, part.out_offset : part.out_offset + part.out_dim] += delta(wide(x)[t : t + 1], part, e)[
                            0
                        ]
    return y


def moe_down(
    bound: Mapping[int, SiteWeights], segments: Rows, act: Tensor, ids: Tensor, weights: Tensor, out_dim: int
) -> Array:
    tokens, k = ids.shape
    y = np.zeros((tokens, out_dim))
    for start, rows, slot in segments:
        for part in bound.get(slot, ()):
            for t in range(start, start + rows):
                for j in range(k):
                    if 0 <= (e := int(ids[t, j])) < part.num_experts:
                        here = slice(part.out_offset, part.out_offset + part.out_dim)
                        y[t, here] += float(weights[t, j]) * delta(wide(act)[t, j : j + 1], part, e)[0]
    return y


def random_part(
    rng: torch.Generator,
    *,
    rank: int,
    in_dim: int,
    out_dim: int,
    out_offset: int = 0,
    experts: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Part:
    """Deltas come out near 1 for activations near 1, whatever the rank. Expert blocks lie a little apart."""
    lead = (experts,) if experts else ()

    def blocks(columns: int, size: float) -> Tensor:
        flat = torch.randn(*lead, rank * columns + 3, generator=rng) * size
        return flat.to(dtype)[..., : rank * columns].view(*lead, rank, columns)

    scale = 0.5 + float(torch.rand(1, generator=rng))
    return Part(blocks(in_dim, in_dim**-0.5), blocks(out_dim, rank**-0.5), scale, out_offset)


def random_site(
    rng: torch.Generator,
    ranks: Sequence[int],
    outs: Sequence[int],
    *,
    in_dim: int,
    experts: int = 0,
    dtype: torch.dtype = torch.float32,
    gap: int = 0,
) -> SiteWeights:
    """One part for each rank, side by side; rank 0 leaves its columns unadapted; `gap` columns before each."""
    parts, at = [], 0
    for rank, out_dim in zip(ranks, outs, strict=True):
        at += gap
        if rank:
            parts.append(
                random_part(rng, rank=rank, in_dim=in_dim, out_dim=out_dim, out_offset=at, experts=experts, dtype=dtype)
            )
        at += out_dim
    return tuple(parts)
