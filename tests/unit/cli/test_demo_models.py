"""The demo MoE is the dense demo model until an adapter makes its experts differ; preparing it is all or nothing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from infinilora.engine import demo
from infinilora.protocol.errors import InvalidRequest

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}


def dense_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def upcycled(dense: LlamaForCausalLM, directory: Path) -> MixtralForCausalLM:
    config = MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    config.rope_parameters = dense.config.rope_parameters
    config.save_pretrained(directory)
    weights = {n: t for n, t in dense.state_dict().items() if n != "lm_head.weight"}
    save_file(
        {n: t.contiguous() for n, t in demo.upcycle(weights, 4, lambda *_: None).items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return MixtralForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def test_equal_experts_write_what_the_dense_model_writes(tmp_path: Path) -> None:
    dense = dense_model()
    moe = upcycled(dense, tmp_path)
    prompt = torch.arange(12)[None] * 5
    torch.testing.assert_close(moe(prompt).logits, dense(prompt).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_router_chooses_by_token_and_not_always_the_same(tmp_path: Path) -> None:
    moe = upcycled(dense_model(), tmp_path)
    router = moe.model.layers[0].mlp.gate.weight
    tokens = torch.nn.functional.normalize(moe.model.embed_tokens.weight, dim=-1)
    chosen = (tokens @ router.T).topk(2, dim=-1).indices
    assert set(chosen.flatten().tolist()) == {0, 1, 2, 3}


def test_routers_are_drawn_from_a_fixed_seed() -> None:
    weights = {n: t for n, t in dense_model().state_dict().items() if n != "lm_head.weight"}
    first, second = (demo.upcycle(weights, 4, lambda *_: None) for _ in range(2))
    gate = "model.layers.1.block_sparse_moe.gate.weight"
    assert torch.equal(first[gate], second[gate])
    assert not torch.equal(first[gate], first[gate.replace(".1.", ".0.")])


def test_a_prepared_model_is_left_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "smollm2-135m"
    out.mkdir()
    (out / "config.json").write_text("{}")
    demo.prepare("smollm2-135m", out, lambda *_: pytest.fail("there was nothing to do"))
    assert (out / "config.json").read_text() == "{}"


def test_an_unknown_name_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="smollm2-135m, smollm2-moe"):
        demo.prepare("gpt-5", tmp_path / "x", lambda *_: None)
