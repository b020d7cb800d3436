"""What a launch is given: the weights of a site, and which rows use which slot. Knows no kernel.

    x [T, in] --- A [r, in] ---> v [T, r] --- Bt [r, out] ---> delta [T, out]     delta = scale * (x A^T) Bt (+ bias)
                   shrink                       expand

The parts of one site (q, k, v; gate, up) share x and write neighbouring columns of the output.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NUM_SITES = 16
"""Room for every site number that the wire can name; `protocol.adapter.Site` uses the first twelve."""

MOE_GATE_UP = 4
MOE_DOWN = 5
"""The two sites whose weights have an expert axis: the numbers of `protocol.adapter.Site` (tested equal)."""

EMBED = 10
"""The site whose input is token ids; the number of `protocol.adapter.Site` (tested equal)."""

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Part:
    """One projection of a site: a [r, in] and bt [r, out], or [E, r, in] and [E, r, out]; one dtype.

    `scale` is alpha / rank, fp32, applied once. Columns [out_offset, out_offset + out) of the site are its.
    Along the last two axes the tensors are contiguous; experts may lie any distance apart. A dense part may have
    a `bias`, fp32 [out], which is added as it is.
    """

    a: Tensor
    bt: Tensor
    scale: float
    out_offset: int
    bias: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    @property
    def out_dim(self) -> int:
        return self.bt.shape[-1]

    @property
    def num_experts(self) -> int:
        """0 for a dense part."""
        return self.a.shape[0] if self.a.dim() == 3 else 0


SiteWeights = tuple[Part, ...]
"""The parts of one site of one adapter in one layer."""


class Segment(NamedTuple):
    """Rows [row_start, row_start + rows) of a batch use `slot`."""

    row_start: int
    rows: int
    slot: int


def segment_table(segments: Iterable[Segment | tuple[int, int, int]]) -> Tensor:
    """Int32 [n, 3] of (row_start, rows, slot), as every kernel takes it. Built once a step."""
    rows = [tuple(s) for s in segments]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), 3)


def check_parts(parts: SiteWeights, *, in_dim: int, out_dim: int) -> None:
    """Raise ValueError unless the parts fit a site of this width, are of one kind and do not overlap."""
    if not parts:
        raise ValueError("a site needs at least one part; leave it unbound instead")
    if in_dim < 1 or out_dim < 1:
        raise ValueError(f"a site has inputs and outputs; found {in_dim} -> {out_dim}")
    columns_taken: list[tuple[int, int]] = []
    first = parts[0]
    for part in parts:
        _check_part(part, first, in_dim=in_dim, out_dim=out_dim)
        columns_taken.append((part.out_offset, part.out_offset + part.out_dim))
    columns_taken.sort()
    for (_, end), (start, _) in itertools.pairwise(columns_taken):
        if start < end:
            raise ValueError(f"parts overlap: one ends at column {end}, the next starts at {start}")


def _check_part(part: Part, first: Part, *, in_dim: int, out_dim: int) -> None:
    a, bt = part.a, part.bt
    if a.dim() not in (2, 3) or bt.dim() != a.dim() or a.shape[:-1] != bt.shape[:-1]:
        raise ValueError(f"a and bt must be [r, in] and [r, out], or [E, ...]: found {a.shape} and {bt.shape}")
    if a.shape[-1] != in_dim:
        raise ValueError(f"a reads {a.shape[-1]} columns, the site has {in_dim}")
    if part.out_offset < 0 or part.out_offset + part.out_dim > out_dim:
        end = part.out_offset + part.out_dim
        raise ValueError(f"columns {part.out_offset}..{end} lie outside the site's 0..{out_dim}")
    if a.dtype not in WEIGHT_DTYPES or bt.dtype != a.dtype or a.dtype != first.a.dtype:
        raise ValueError(f"one dtype of fp32, bf16, fp16 for a site: found {a.dtype}, {bt.dtype}, {first.a.dtype}")
    if a.device != bt.device or a.device != first.a.device:
        raise ValueError(f"parts on different devices: {a.device}, {bt.device}, {first.a.device}")
    if part.num_experts != first.num_experts:
        raise ValueError(f"parts of one site have {part.num_experts} and {first.num_experts} experts")
    if not _rows_contiguous(a) or not _rows_contiguous(bt):
        raise ValueError(f"a and bt must be contiguous along their last two axes: strides {a.stride()}, {bt.stride()}")
    if part.bias is not None:
        _check_bias(part, part.bias)


def _check_bias(part: Part, bias: Tensor) -> None:
    if part.num_experts:
        raise ValueError("a part with experts has a bias; only dense parts may")
    if bias.shape != (part.out_dim,) or bias.dtype != torch.float32 or bias.device != part.bt.device:
        raise ValueError(
            f"a bias is fp32 [{part.out_dim}] beside its bt: found {bias.dtype} {list(bias.shape)} on {bias.device}"
        )


def _rows_contiguous(t: Tensor) -> bool:
    return t.stride(-1) == 1 and (t.shape[-2] <= 1 or t.stride(-2) == t.shape[-1])
