"""The arithmetic that a decoder needs, on one device. Knows tensors, not models.

`TorchOps` runs anywhere and is what CUDA uses; `CpuOps` (cpu.py) is compiled. Both keep norms, softmax and
rotations in fp32. Attention reads a paged cache: S sequences, each a run of query rows, causal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

Linear = Callable[[Tensor], Tensor]
"""y [T, out] = x [T, in] W^T + b. Weights are packed inside, in a layout of the device's own."""


class Ungrouped(NamedTuple):
    """A device has no product of a whole stack; `reason`, for the log."""

    reason: str


GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """y[i] = x[i] W[g]^T for ends[g - 1] <= i < ends[g]; x [P, in], weights [E, out, in], ends int32 [E] -> [P, out].

    Rows from the last end on are undefined. Rows of y may lie wider apart than they are long.
    """
    return functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)


@dataclass(frozen=True, slots=True)
class Stack:
    """Weights [E, out, in] of E products, to be filled one by one, and called with sorted rows and their ends."""

    weights: Tensor
    product: GroupedProduct = grouped_product

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.product(x, self.weights, ends)


@dataclass(frozen=True, slots=True)
class Paging:
    """Where each sequence's keys are. query_start int32 [S+1] cuts the rows; context_len int32 [S] counts keys.

    block_tables int32 [S, max_blocks]; slots int64 [T]: each row's place in the cache, block * size + offset.
    """

    query_start: Tensor
    context_len: Tensor
    block_tables: Tensor
    slots: Tensor
    query_lens: tuple[int, ...]
    max_context: int


class Ops(Protocol):
    """One device's operations. Tensors given stay the caller's; `rope` and `add_rms_norm` write in place."""

    device: torch.device
    dtype: torch.dtype

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear: ...

    def stacks(self, num: int, *shapes: tuple[int, int]) -> list[Stack] | Ungrouped:
        """For each [out, in]: room for `num` weights, whose products are one, without any wait of the host."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Residual += x, in place; the norm of the sum."""
        ...

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate q [T, Hq, D] and k [T, Hkv, D] in place; cos, sin fp32 [positions, D/2], halves paired."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, paging: Paging, scale: float) -> Tensor:
        """Attend q [T, Hq, D] to the cached keys [blocks, size, Hkv, D] of each row's sequence."""
        ...


def why_ungrouped(dtype: torch.dtype, capability: tuple[int, int] | None, in_dims: Sequence[int]) -> str:
    """Why torch's grouped product is not used; empty where it is. `capability` is a CUDA device's, None elsewhere.

    On other CUDA devices, and there in fp32, torch reads the ends on the host and computes group by group (torch 2.13).
    """
    if odd := [width for width in in_dims if width * dtype.itemsize % 16]:
        return f"one product each: a grouped one wants rows of whole 16 bytes, not {odd[0]} numbers of {dtype}"
    if capability is None:
        return ""
    if dtype is not torch.bfloat16:
        return f"one product each: a grouped one wants torch.bfloat16, not {dtype}"
    if capability[0] not in (9, 10):
        return f"one product each: a grouped one wants compute capability 9 or 10, not {capability[0]}.{capability[1]}"
    return ""


class TorchOps:
    """Plain torch: the definition, and the CUDA path."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        w = weight.to(self.device, self.dtype)
        b = None if bias is None else bias.to(self.device, self.dtype)
        return lambda x: functional.linear(x, w, b)

    def stacks(self, num: int, *shapes: tuple[int, int]) -> list[Stack] | Ungrouped:
        capability = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None
        if reason := why_ungrouped(self.dtype, capability, [width for _, width in shapes]):
            return Ungrouped(reason)
        return [Stack(torch.empty(num, *shape, dtype=self.dtype, device=self.device)) for shape in shapes]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        c, s = cos[positions][:, None], sin[positions][:, None]
        half = c.shape[-1]
        for x in (q, k):
            first, second = x[..., :half].float(), x[..., half:].float()
            rotated = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
            x.copy_(rotated)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, paging: Paging, scale: float) -> Tensor:
        if all(n == 1 for n in paging.query_lens):
            return self._decode(q, k_cache, v_cache, paging, scale)
        out = torch.empty_like(q)
        start = 0
        for i, rows in enumerate(paging.query_lens):
            here = slice(start, start + rows)
            out[here] = self._one(q[here], k_cache, v_cache, paging, i, scale)
            start += rows
        return out

    def _decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, paging: Paging, scale: float) -> Tensor:
        """One row a sequence: contexts padded to the longest, all in one product."""
        size = k_cache.shape[1]
        tables = paging.block_tables[:, : -(-paging.max_context // size)].long()
        keys = k_cache[tables].flatten(1, 2).transpose(1, 2)
        values = v_cache[tables].flatten(1, 2).transpose(1, 2)
        seen = torch.arange(keys.shape[2], device=q.device) < paging.context_len[:, None]
        out: Tensor = functional.scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=seen[:, None, None], scale=scale, enable_gqa=True
        )
        return out[:, :, 0]

    def _one(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, paging: Paging, index: int, scale: float) -> Tensor:
        """The rows of one sequence: the last of its context."""
        size, rows = k_cache.shape[1], q.shape[0]
        context = int(paging.context_len[index])
        table = paging.block_tables[index, : -(-context // size)].long()
        keys = k_cache[table].flatten(0, 1)[:context].transpose(0, 1)
        values = v_cache[table].flatten(0, 1)[:context].transpose(0, 1)
        at = torch.arange(context - rows, context, device=q.device)
        seen = torch.arange(context, device=q.device) <= at[:, None]
        out: Tensor = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None], values[None], attn_mask=seen, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
