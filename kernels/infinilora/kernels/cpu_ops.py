"""The engine's operations on the CPU: compiled where the native library is, plain torch otherwise.

Every function computes the same with and without the library; activations are fp32. Outputs are new unless
`out` is given; an operation named with a trailing underscore works in place.
"""

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from infinilora.kernels import native
from infinilora.kernels.abi import DTYPE_CODES, AttentionCall
from infinilora.kernels.large_pages import SideBySide

PANEL = 32
"""Outputs in a packed panel (`kPanel` of cpu/kernels.h)."""

Storage = Literal["fp32", "bf16"]


def set_threads(num_threads: int) -> int:
    """Set the width of the process's one native pool, the calling thread included; returns the width it has."""
    if num_threads < 1:
        raise ValueError(f"at least one thread is needed; found {num_threads}")
    library = native.load()
    return 1 if library is None else int(library.il_set_threads(num_threads))


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [out, in] laid out for `linear`. Immutable; `panels` belongs to it alone.

    fp32 panels are [panel, in, 32]. bf16 panels are [panel, in, 16, 2]: outputs j and j + 16 side by side, so that
    one 32-bit word widens to two floats by a shift and a mask. Without the library `panels` is the plain matrix.
    """

    panels: Tensor
    out_dim: int
    in_dim: int
    is_packed: bool

    @staticmethod
    def pack(weight: Tensor, *, storage: Storage = "fp32", memory: SideBySide | None = None) -> "PackedWeight":
        """Copy `weight` [out, in] of any float dtype, into `memory` beside others. Raises ValueError for another shape.

        A product takes up to a fifth less time with weights in large pages (Zen 5, 2026-12-01).
        """
        if weight.dim() != 2 or weight.numel() == 0:
            raise ValueError(f"a weight is [out, in], not empty; found {list(weight.shape)}")
        out_dim, in_dim = weight.shape
        stored = weight.detach().to("cpu", torch.float32 if storage == "fp32" else torch.bfloat16)
        if native.load() is None:
            return PackedWeight(stored.contiguous(), out_dim, in_dim, is_packed=False)
        num_panels = -(-out_dim // PANEL)
        padded = stored.new_zeros(num_panels * PANEL, in_dim)
        padded[:out_dim] = stored
        if storage == "fp32":
            panels = padded.view(num_panels, PANEL, in_dim).transpose(1, 2)
        else:
            panels = padded.view(num_panels, 2, PANEL // 2, in_dim).permute(0, 3, 2, 1)
        own = panels.contiguous() if memory is None else memory.empty(panels.shape, panels.dtype).copy_(panels)
        return PackedWeight(own, out_dim, in_dim, is_packed=True)


def linear(x: Tensor, w: PackedWeight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Compute y = x W^T + bias. x fp32 [T, in], rows may be strided; bias fp32 [out]; out fp32 [T, out], rows too."""
    _check_rows(x, w.in_dim, "x")
    rows = x.shape[0]
    if out is None:
        out = torch.empty(rows, w.out_dim)
    else:
        _check_rows(out, w.out_dim, "out")
        if out.shape[0] != rows:
            raise ValueError(f"out has {out.shape[0]} rows, x has {rows}")
    if bias is not None:
        bias = _vector(bias, w.out_dim, "bias")
    library = native.load() if w.is_packed else None
    if library is None:
        return out.copy_(functional.linear(x, w.panels.float(), bias))
    library.il_linear(
        x.data_ptr(),
        x.stride(0),
        w.panels.data_ptr(),
        DTYPE_CODES[w.panels.dtype],
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        rows,
        w.in_dim,
        w.out_dim,
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Compute y[t] = weight * x[t] / sqrt(mean(x[t]^2) + eps); with a residual, residual += x first and y is of it.

    x and residual fp32 [T, h], rows may be strided; weight [h].
    """
    n = x.shape[-1]
    _check_rows(x, n, "x")
    weight = _vector(weight, n, "weight")
    if residual is not None:
        _check_rows(residual, n, "residual")
        if residual.shape != x.shape:
            raise ValueError(f"residual is {list(residual.shape)}, x is {list(x.shape)}")
    library = native.load()
    if library is None:
        wide = x if residual is None else residual.add_(x)
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    y = torch.empty(x.shape[0], n)
    library.il_rms_norm(
        x.data_ptr(),
        x.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        weight.data_ptr(),
        eps,
        y.data_ptr(),
        x.shape[0],
        n,
    )
    return y


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute y[t] = silu(gate_up[t, :f]) * gate_up[t, f:]. gate_up fp32 [T, 2f], rows may be strided."""
    _check_rows(gate_up, gate_up.shape[-1], "gate_up")
    width, odd = divmod(gate_up.shape[1], 2)
    if odd:
        raise ValueError(f"gate_up has gate and up side by side; found {gate_up.shape[1]} columns")
    library = native.load()
    if library is None:
        return functional.silu(gate_up[:, :width]) * gate_up[:, width:]
    y = torch.empty(gate_up.shape[0], width)
    library.il_silu_mul(gate_up.data_ptr(), gate_up.stride(0), y.data_ptr(), gate_up.shape[0], width)
    return y


def rope_(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn the pairs (i, i + half) of every head by its row's angles, in place. HF Llama's pairing.

    q fp32 [T, Hq, D] and k [T, Hkv, D], may be views of one fused tensor; positions int32 or int64 [T];
    cos, sin fp32 [max_position, half], half <= D / 2: later channels of a head stay as they are.
    """
    half = cos.shape[1]
    if cos.shape != sin.shape or not cos.is_contiguous() or not sin.is_contiguous() or cos.dtype != torch.float32:
        raise ValueError(f"cos and sin are contiguous fp32 [positions, half]; found {cos.shape} and {sin.shape}")
    if positions.dtype not in (torch.int32, torch.int64) or not positions.is_contiguous():
        raise ValueError(f"positions are contiguous int32 or int64; found {positions.dtype}")
    library = native.load()
    for x in (q, k):
        _check_heads(x, half, positions.shape[0])
        if library is None:
            _turn(x, half, cos[positions][:, None], sin[positions][:, None])
            continue
        library.il_rope(
            x.data_ptr(),
            x.stride(0),
            x.shape[1],
            x.shape[2],
            positions.data_ptr(),
            positions.dtype == torch.int64,
            cos.data_ptr(),
            sin.data_ptr(),
            half,
            x.shape[0],
        )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    scale: float,
) -> Tensor:
    """Attend each query row to its own sequence's past: softmax(scale * q K^T) V, causal, grouped heads.

    q fp32 [T, Hq, D], heads contiguous; k_cache, v_cache fp32 [blocks, block, Hkv, D]; block_tables int32
    [S, max_blocks]; query_start int32 [S+1]: rows of sequence s are query_start[s] .. query_start[s+1]; they
    are its last ones of context_len[s] (int32 [S]). Returns [T, Hq, D]. Positions beyond a context are not read.
    """
    rows, heads, head_dim = q.shape
    num_sequences = context_len.shape[0]
    _check_paging(q, k_cache, v_cache, block_tables, query_start, context_len)
    library = native.load()
    if library is None:
        return _attend_in_torch(q, k_cache, v_cache, block_tables, query_start, context_len, scale)
    out = torch.empty(rows, heads, head_dim)
    call = AttentionCall(
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        out.data_ptr(),
        block_tables.data_ptr(),
        query_start.data_ptr(),
        context_len.data_ptr(),
        q.stride(0),
        num_sequences,
        block_tables.shape[1],
        k_cache.shape[1],
        heads,
        k_cache.shape[2],
        head_dim,
        scale,
    )
    library.il_paged_attention(ctypes.byref(call))
    return out


def _attend_in_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    scale: float,
) -> Tensor:
    out = torch.empty(q.shape)
    starts, contexts = query_start.tolist(), context_len.tolist()
    for s, context in enumerate(contexts):
        here = slice(starts[s], starts[s + 1])
        blocks = block_tables[s, : -(-context // k_cache.shape[1])].long()
        keys, values = (c[blocks].flatten(0, 1)[:context].transpose(0, 1) for c in (k_cache, v_cache))
        own = torch.arange(context - (here.stop - here.start), context)
        seen = torch.arange(context) <= own[:, None]
        attended = functional.scaled_dot_product_attention(
            q[here].transpose(0, 1)[None], keys[None], values[None], attn_mask=seen, scale=scale, enable_gqa=True
        )
        out[here] = attended[0].transpose(0, 1)
    return out


def _turn(x: Tensor, half: int, cos: Tensor, sin: Tensor) -> None:
    a, b = x[..., :half].clone(), x[..., half : 2 * half].clone()
    x[..., :half] = a * cos - b * sin
    x[..., half : 2 * half] = b * cos + a * sin


def _check_rows(x: Tensor, columns: int, name: str) -> None:
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != columns or x.stride(1) != 1:
        raise ValueError(f"{name} is fp32 [T, {columns}], contiguous in its rows; found {x.dtype} {list(x.shape)}")


def _vector(v: Tensor, size: int, name: str) -> Tensor:
    if v.shape != (size,):
        raise ValueError(f"{name} is [{size}]; found {list(v.shape)}")
    return v.float().contiguous()


def _check_heads(x: Tensor, half: int, rows: int) -> None:
    is_laid_out = x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]
    if not is_laid_out or x.dtype != torch.float32 or x.shape[0] != rows or x.shape[2] < 2 * half:
        raise ValueError(f"q and k are fp32 [{rows}, heads, >= {2 * half}], heads contiguous; found {list(x.shape)}")


def _check_paging(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, query_start: Tensor, context_len: Tensor
) -> None:
    if not (q.dtype == k_cache.dtype == v_cache.dtype == torch.float32):
        raise ValueError(f"attention is fp32 here; found {q.dtype}, {k_cache.dtype}, {v_cache.dtype}")
    if k_cache.shape != v_cache.shape or not k_cache.is_contiguous() or not v_cache.is_contiguous():
        raise ValueError(f"caches are contiguous and alike; found {list(k_cache.shape)}, {list(v_cache.shape)}")
    if q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"q {list(q.shape)} does not fit a cache of {list(k_cache.shape[2:])} heads and channels")
    if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
        raise ValueError(f"the heads of a row of q lie side by side; found strides {q.stride()}")
    for table, name in ((block_tables, "block_tables"), (query_start, "query_start"), (context_len, "context_len")):
        if table.dtype != torch.int32 or not table.is_contiguous():
            raise ValueError(f"{name} is contiguous int32; found {table.dtype}")
    if not query_start.shape[0] - 1 == context_len.shape[0] == block_tables.shape[0]:
        raise ValueError("query_start has one entry more than there are sequences, block_tables a row for each")
