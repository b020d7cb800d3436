"""The two implementations of the decoder's arithmetic compute the same."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from infinilora.engine.model.checkpoint import Checkpoint
from infinilora.engine.model.cpu import CpuOps
from infinilora.engine.model.decoder import Decoder
from infinilora.engine.model.kv import KvCache
from infinilora.engine.model.ops import Ops, Paging, TorchOps
from infinilora.engine.model.spec import read_spec
from infinilora.engine.model.weights import load_weights, rope_table
from infinilora.engine.sched.scheduler import Limits
from infinilora.engine.sizes import Sizes
from support.engines import TestEngine, load_tiny
from support.large_pages import LARGE_PAGES, flags_of
from support.oracle import Oracle
from support.plain_lora import PlainLora
from support.tiny_models import TinyModel

_LIMITS = Limits(max_running=4, step_tokens=16)
TORCH, CPU = TorchOps(torch.device("cpu"), torch.float32), CpuOps()


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def same(op: Callable[[Ops], Tensor]) -> None:
    torch.testing.assert_close(op(CPU), op(TORCH), rtol=1e-5, atol=1e-5)


def test_products_norms_and_activations_agree() -> None:
    x, w, b, norm = rand(5, 48), rand(70, 48), rand(70), rand(48).abs()
    same(lambda ops: ops.linear(w, b)(x))
    same(lambda ops: ops.rms_norm(x, norm, 1e-5))
    same(lambda ops: ops.silu_mul(rand(5, 96)))
    residuals = [rand(5, 48, seed=1), rand(5, 48, seed=1)]
    same(lambda ops: ops.add_rms_norm(x, residuals[int(ops is CPU)], norm, 1e-5))
    torch.testing.assert_close(residuals[0], residuals[1])
    torch.testing.assert_close(residuals[0], rand(5, 48, seed=1) + x)


def test_weights_on_a_processor_lie_side_by_side_in_large_pages() -> None:
    ops, memory = CpuOps(), set[int]()
    for out_dim in (70, 96, 33):
        linear = ops.linear(rand(out_dim, 48))
        assert isinstance(linear, partial)
        panels: Tensor = linear.keywords["w"].panels
        assert ("hg" in flags_of(panels)) == LARGE_PAGES.exists()
        memory.add(panels.untyped_storage().data_ptr())
    assert len(memory) == 1


def test_rotations_agree_on_views_of_one_fused_tensor(tiny: Callable[[str], TinyModel]) -> None:
    cos, sin = rope_table(read_spec(tiny("llama-rope3").directory), max_len=64)
    turned = []
    for ops in (CPU, TORCH):
        fused = rand(6, 8 * 8)
        q, k = fused[:, :32].view(6, 4, 8), fused[:, 32:48].view(6, 2, 8)
        ops.rope(q, k, torch.tensor([0, 1, 2, 30, 31, 63]), cos, sin)
        turned.append(fused)
    torch.testing.assert_close(turned[0], turned[1], rtol=1e-5, atol=1e-5)
    assert not torch.equal(turned[0][:, :48], rand(6, 64)[:, :48])
    assert torch.equal(turned[0][:, 48:], rand(6, 64)[:, 48:])


@pytest.mark.parametrize("query_lens", [(1, 1, 1), (1, 4, 7), (9,)])
def test_attention_agrees_for_decode_prefill_and_both(query_lens: tuple[int, ...]) -> None:
    contexts = [n + 3 * i for i, n in enumerate(query_lens, start=1)]
    blocks = torch.randperm(16, generator=torch.Generator().manual_seed(1)).int()
    tables = torch.zeros(len(query_lens), 5, dtype=torch.int32)
    for i, context in enumerate(contexts):
        count = -(-context // 4)
        tables[i, :count] = blocks[5 * i : 5 * i + count]
    paging = Paging(
        query_start=torch.tensor([0, *query_lens]).cumsum(0).int(),
        context_len=torch.tensor(contexts).int(),
        block_tables=tables,
        slots=torch.zeros(sum(query_lens), dtype=torch.int64),
        query_lens=query_lens,
        max_context=max(contexts),
    )
    keys, values = rand(16, 4, 2, 8), rand(16, 4, 2, 8, seed=5)
    same(lambda ops: ops.attention(rand(sum(query_lens), 4, 8), keys, values, paging, 0.35))


@pytest.mark.parametrize("name", ["qwen3", "qwen2_moe"])
def test_a_whole_model_in_plain_torch_equals_the_oracle(name: str, tiny: Callable[[str], TinyModel]) -> None:
    directory = tiny(name).directory
    loaded = load_tiny(directory)
    spec = read_spec(directory)
    weights = load_weights(spec, Checkpoint(directory, spec), TORCH, max_len=256)
    kv = KvCache.allocate(spec, num_blocks=64, block_size=4, device=TORCH.device, dtype=TORCH.dtype)
    plain = type(loaded)(Decoder(spec, weights, TORCH, kv), spec, loaded.card, Sizes(256, 64, 4, 0), loaded.source)
    engine = TestEngine(plain, PlainLora(loaded.card), limits=_LIMITS)
    prompts = [list(range(5, 5 + n)) for n in (3, 20)]
    heard = [engine.ask(p, max_tokens=5) for p in prompts]
    engine.run()
    for prompt, told in zip(prompts, heard, strict=True):
        assert Oracle(directory).shortfall(prompt, told.tokens) < 1e-4


def test_bf16_storage_stays_near_and_is_not_fp32(tiny: Callable[[str], TinyModel]) -> None:
    directory = tiny("llama").directory
    loaded = load_tiny(directory, dtype="bf16")
    engine = TestEngine(loaded, PlainLora(loaded.card), limits=_LIMITS)
    heard = engine.ask(list(range(5, 25)), max_tokens=0, prompt_logprobs=0)
    engine.run()
    expected = Oracle(directory).logprobs(list(range(5, 25)))
    errors = [abs(s.logprob - e) for s, e in zip(heard.prompt_scores, expected, strict=True)]
    assert 1e-4 < max(errors) < 0.3
