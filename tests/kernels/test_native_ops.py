"""The engine's CPU operations: maths in float64 = torch fallback = compiled, on every instruction set."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from infinilora.kernels import cpu_ops, native
from infinilora.kernels.cpu_ops import PackedWeight, linear, paged_attention, rms_norm, rope_, silu_mul
from infinilora.kernels.settings import LEVELS
from support.instruction_sets import limited_to

Array = npt.NDArray[np.float64]


@pytest.fixture(params=[*LEVELS, "torch"], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every instruction set (conftest.py leaves out those that this processor has not got), and the fallback."""
    torch.manual_seed(11)
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: None)
        yield request.param
        return
    with limited_to(request.param):
        cpu_ops.set_threads(2)
        yield request.param


def wide(t: Tensor) -> Array:
    return t.detach().double().numpy()


def worst(found: Tensor, wanted: Array) -> float:
    return float(np.abs(wide(found) - wanted).max())


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.parametrize(("out_dim", "in_dim"), [(960, 576), (33, 7), (5, 64), (1, 1), (4100, 40)])
def test_linear_is_the_product_at_any_number_of_rows(out_dim: int, in_dim: int, storage: cpu_ops.Storage) -> None:
    weight, bias = torch.randn(out_dim, in_dim), torch.randn(out_dim)
    packed = PackedWeight.pack(weight, storage=storage)
    kept = weight if storage == "fp32" else weight.bfloat16().float()
    for rows in (0, 1, 2, 3, 5, 8, 13, 32, 100, 331):
        x = torch.randn(rows, in_dim + 3)[:, :in_dim]
        wanted = wide(x) @ wide(kept).T
        tolerance = 4e-7 * in_dim * 4
        assert worst(linear(x, packed), wanted) < tolerance if rows else not linear(x, packed).numel()
        out = torch.full((rows, out_dim + 2), float("nan"))
        linear(x, packed, bias, out=out[:, :out_dim])
        if rows:
            assert worst(out[:, :out_dim], wanted + wide(bias)) < tolerance
        assert out[:, out_dim:].isnan().all()


def test_linear_notices_another_weight() -> None:
    weight, x = torch.randn(64, 96), torch.randn(4, 96)
    wrong = weight.clone()
    wrong[40, 3] += 0.5
    assert worst(linear(x, PackedWeight.pack(wrong)), wide(x) @ wide(weight).T) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bit_are_widened_exactly(dtype: torch.dtype) -> None:
    weight, x = torch.randn(70, 50).to(dtype), torch.randn(9, 50)
    assert worst(linear(x, PackedWeight.pack(weight)), wide(x) @ wide(weight).T) < 1e-4


def test_linear_refuses_what_does_not_fit() -> None:
    packed = PackedWeight.pack(torch.randn(8, 4))
    with pytest.raises(ValueError, match="x is fp32"):
        linear(torch.randn(2, 5), packed)
    with pytest.raises(ValueError, match="x is fp32"):
        linear(torch.randn(2, 4).double(), packed)
    with pytest.raises(ValueError, match="out has 3 rows"):
        linear(torch.randn(2, 4), packed, out=torch.empty(3, 8))
    with pytest.raises(ValueError, match="bias"):
        linear(torch.randn(2, 4), packed, torch.zeros(7))
    with pytest.raises(ValueError, match="weight"):
        PackedWeight.pack(torch.randn(8))


@pytest.mark.parametrize(("rows", "n"), [(1, 576), (40, 77), (3, 1), (200, 1536)])
def test_rms_norm_with_and_without_residual(rows: int, n: int) -> None:
    x, residual, weight, eps = torch.randn(rows, n + 2)[:, :n] * 7, torch.randn(rows, n), torch.randn(n), 1e-5
    plain = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + eps) * wide(weight)
    assert worst(rms_norm(x, weight, eps), plain) < 2e-5
    total = wide(x) + wide(residual)
    normed = total / np.sqrt((total**2).mean(-1, keepdims=True) + eps) * wide(weight)
    assert worst(rms_norm(x, weight, eps, residual), normed) < 2e-5
    assert worst(residual, total) < 2e-6


def test_silu_mul_from_deep_negative_to_large() -> None:
    gate_up = torch.randn(64, 2 * 77 + 1)[:, : 2 * 77] * 40
    gate_up[0, :6] = torch.tensor([-1e4, -100.0, -88.5, 0.0, 88.5, 1e4])
    gate, up = wide(gate_up[:, :77]), wide(gate_up[:, 77:])
    wanted = gate / (1 + np.exp(-np.clip(gate, -700, 700))) * up
    found = wide(silu_mul(gate_up))
    assert np.abs((found - wanted) / (np.abs(wanted) + 1e-3)).max() < 3e-6


@pytest.mark.parametrize("positions_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (8, 4), (10, 5), (64, 16)])
def test_rope_turns_pairs_of_a_fused_tensor(head_dim: int, half: int, positions_dtype: torch.dtype) -> None:
    rows, q_heads, kv_heads = 21, 3, 2
    fused = torch.randn(rows, (q_heads + 2 * kv_heads) * head_dim)
    q_end, k_end = q_heads * head_dim, (q_heads + kv_heads) * head_dim
    positions = torch.randint(0, 40, (rows,)).to(positions_dtype)
    angles = torch.rand(40, half) * 6
    before = wide(fused).copy()
    q = fused[:, :q_end].view(rows, q_heads, head_dim)
    k = fused[:, q_end:k_end].view(rows, kv_heads, head_dim)
    rope_(q, k, positions, angles.cos(), angles.sin())
    turned = before.copy().reshape(rows, -1, head_dim)
    pairs = before.reshape(rows, -1, head_dim)
    turn = np.exp(1j * wide(angles)[positions.numpy()])[:, None]
    z = (pairs[..., :half] + 1j * pairs[..., half : 2 * half]) * turn
    turned[:, : q_heads + kv_heads, :half] = z.real[:, : q_heads + kv_heads]
    turned[:, : q_heads + kv_heads, half : 2 * half] = z.imag[:, : q_heads + kv_heads]
    assert worst(fused, turned.reshape(rows, -1)) < 3e-6


AttentionCase = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k_cache, v_cache, block_tables, query_start, context_len."""


def attention_case(
    *, head_dim: int, heads: int, kv_heads: int, block: int, rows: list[int], contexts: list[int]
) -> AttentionCase:
    """A cache that is NaN wherever no position was written."""
    needed = [-(-n // block) for n in contexts]
    caches = torch.full((2, sum(needed) + 3, block, kv_heads, head_dim), float("nan"))
    free = torch.randperm(sum(needed) + 3).tolist()
    tables = torch.full((len(rows), max(needed)), -1, dtype=torch.int32)
    for s, (context, count) in enumerate(zip(contexts, needed, strict=True)):
        for b in range(count):
            at = free.pop()
            tables[s, b] = at
            caches[:, at, : min(block, context - b * block)] = torch.randn(
                2, min(block, context - b * block), kv_heads, head_dim
            )
    query_start = torch.tensor([0, *np.cumsum(rows)], dtype=torch.int32)
    fused = torch.randn(sum(rows), (heads + 2) * head_dim) * 2
    q = fused[:, : heads * head_dim].view(sum(rows), heads, head_dim)
    return q, caches[0], caches[1], tables, query_start, torch.tensor(contexts, dtype=torch.int32)


def attention_maths(
    q: Tensor, k: Tensor, v: Tensor, tables: Tensor, query_start: Tensor, contexts: Tensor, scale: float
) -> Array:
    out = np.zeros(tuple(q.shape))
    group = q.shape[1] // k.shape[2]
    for s in range(len(contexts)):
        context, first = int(contexts[s]), int(query_start[s])
        rows = int(query_start[s + 1]) - first
        where = [(int(tables[s, p // k.shape[1]]), p % k.shape[1]) for p in range(context)]
        keys, values = (np.stack([wide(c[b, o]) for b, o in where]) for c in (k, v))
        for i in range(rows):
            seen = context - rows + i + 1
            for h in range(q.shape[1]):
                scores = keys[:seen, h // group] @ wide(q[first + i, h]) * scale
                p = np.exp(scores - scores.max())
                out[first + i, h] = p @ values[:seen, h // group] / p.sum()
    return out


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "block"),
    [(64, 9, 3, 16), (8, 4, 2, 4), (80, 2, 2, 16), (20, 3, 1, 5), (128, 8, 1, 8)],
)
def test_attention_of_mixed_prefill_chunks_and_decodes(head_dim: int, heads: int, kv_heads: int, block: int) -> None:
    case = attention_case(
        head_dim=head_dim,
        heads=heads,
        kv_heads=kv_heads,
        block=block,
        rows=[1, 1, 5, 33, 1, 20],
        contexts=[1, 37, 5, 40, 17, 65],
    )
    found = paged_attention(*case, head_dim**-0.5)
    assert worst(found, attention_maths(*case, head_dim**-0.5)) < 1e-5


def test_attention_reads_its_own_sequences_blocks_only() -> None:
    case = attention_case(head_dim=16, heads=2, kv_heads=1, block=4, rows=[1, 1], contexts=[9, 9])
    q, k, v, tables, query_start, contexts = case
    wanted = attention_maths(*case, 0.25)
    swapped = paged_attention(q, k, v, tables.flip(0).contiguous(), query_start, contexts, 0.25)
    assert worst(swapped, wanted) > 0.05


def test_attention_with_scores_far_apart_stays_finite() -> None:
    case = attention_case(head_dim=32, heads=2, kv_heads=2, block=8, rows=[40], contexts=[90])
    case[0].mul_(200)
    # Scores of some thousands are themselves rounded to about 2e-4.
    assert worst(paged_attention(*case, 1.0), attention_maths(*case, 1.0)) < 2e-3


def test_attention_refuses_what_does_not_fit() -> None:
    q, k, v, tables, query_start, contexts = attention_case(
        head_dim=16, heads=3, kv_heads=1, block=4, rows=[1], contexts=[9]
    )
    with pytest.raises(ValueError, match="fp32"):
        paged_attention(q.double(), k, v, tables, query_start, contexts, 1.0)
    with pytest.raises(ValueError, match="int32"):
        paged_attention(q, k, v, tables.long(), query_start, contexts, 1.0)
    with pytest.raises(ValueError, match="fit a cache"):
        paged_attention(q[..., :8], k, v, tables, query_start, contexts, 1.0)
    with pytest.raises(ValueError, match="entry"):
        paged_attention(q, k, v, tables, query_start[:1], contexts, 1.0)
