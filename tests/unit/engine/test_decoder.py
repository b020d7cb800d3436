"""Every family against transformers: log-probabilities and greedy tokens, whatever shares the step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infinilora.engine.assemble import LoadedModel
from infinilora.engine.lora.interface import COMPUTED_SITES
from infinilora.engine.sched.scheduler import Limits
from infinilora.protocol.sites import site_mask
from support.engines import Heard, TestEngine, load_tiny
from support.oracle import ATTENTION, MLP, Oracle
from support.plain_lora import PlainLora
from support.tiny_models import CONFIGS, DENSE, MOE, VOCAB, TinyModel, make_tiny_model

TOLERANCE = 1e-4
EXPERTS = {"mixtral": ("w1", "w2", "w3"), "qwen2_moe": MLP, "qwen3_moe": MLP, "olmoe": MLP}


def prompt(length: int, seed: int = 0) -> list[int]:
    source = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB, (length,), generator=source).tolist()


def error_of(heard: Heard, prompt_ids: list[int], oracle: Oracle, adapter: Path | None = None) -> float:
    """Largest difference of any reported log-probability from the oracle's, prompt and produced tokens."""
    logprobs = torch.log_softmax(oracle.logits(prompt_ids + heard.tokens, adapter), -1)
    worst = 0.0
    for at, score in enumerate((*heard.prompt_scores, *heard.scores), start=0):
        for token, logprob in ((score.token_id, score.logprob), *score.top):
            worst = max(worst, abs(float(logprobs[at, token]) - logprob))
    return worst


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_family_equals_transformers_in_a_mixed_chunked_batch(
    name: str, loaded: Callable[[str], LoadedModel], oracle: Callable[[str], Oracle]
) -> None:
    engine = TestEngine(loaded(name), PlainLora(loaded(name).card), limits=Limits(max_running=8, step_tokens=9))
    prompts = [prompt(n) for n in (1, 5, 16, 41)]
    heard = [engine.ask(p, max_tokens=7, logprobs=3, prompt_logprobs=2) for p in prompts]

    engine.run()

    for ids, told in zip(prompts, heard, strict=True):
        assert len(told.tokens) == 7
        assert len(told.prompt_scores) == len(ids) - 1
        assert error_of(told, ids, oracle(name)) < TOLERANCE
        assert oracle(name).shortfall(ids, told.tokens) < TOLERANCE


OUTER = [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head"), (*ATTENTION, "lm_head"), ATTENTION]


def targets_in(name: str) -> list[tuple[str, ...]]:
    """Of the adapters of one step: attention, MLP, both and, where there is one, the router."""
    mlp = EXPERTS.get(name, MLP)
    return [ATTENTION, mlp, (*ATTENTION, *mlp), *([("gate",)] if name in MOE else [])]


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *(pytest.param(name, targets_in(name), id=name) for name in (*DENSE, *MOE)),
        *(pytest.param(name, OUTER, id=f"{name}-outer") for name in ("llama", "llama-tied", "qwen2_moe")),
    ],
)
def test_adapters_of_different_ranks_and_targets_share_a_step_with_the_base(
    name: str,
    targets: list[tuple[str, ...]],
    loaded: Callable[[str], LoadedModel],
    oracle: Callable[[str], Oracle],
    adapter: Callable[..., Path],
) -> None:
    directories = [adapter(name, 3 + 2 * i, t, 11 + i) for i, t in enumerate(targets)]
    lora = PlainLora(loaded(name).card)
    digests = [lora.register(d) for d in directories]
    engine = TestEngine(loaded(name), lora, limits=Limits(max_running=8, step_tokens=16))
    ids = prompt(13)
    asked: list[tuple[Path | None, Heard]] = [
        (directory, engine.ask(ids, digest=digest, max_tokens=5, logprobs=1, prompt_logprobs=1))
        for directory, digest in zip(directories, digests, strict=True)
    ]
    asked.append((None, engine.ask(ids, max_tokens=5, logprobs=1, prompt_logprobs=1)))

    engine.run()

    for directory, told in asked:
        assert error_of(told, ids, oracle(name), directory) < TOLERANCE
        if directory is not None:
            assert oracle(name).effect(ids, directory) > 0.3
            assert error_of(told, ids, oracle(name), None) > 100 * TOLERANCE


def test_shared_expert_takes_its_adapter(
    loaded: Callable[[str], LoadedModel], oracle: Callable[[str], Oracle], adapter: Callable[..., Path]
) -> None:
    directory = adapter("qwen2_moe", 8, MLP, 31)
    lora = PlainLora(loaded("qwen2_moe").card)
    engine = TestEngine(loaded("qwen2_moe"), lora, limits=Limits(max_running=2, step_tokens=64))
    told = engine.ask(prompt(9), digest=lora.register(directory), max_tokens=3, logprobs=0, prompt_logprobs=0)

    engine.run()

    assert any("shared_expert." in m for m in lora._pairs[next(iter(lora._pairs))])
    assert error_of(told, prompt(9), oracle("qwen2_moe"), directory) < TOLERANCE


def test_the_shared_experts_gate_takes_its_adapter_before_the_sigmoid(
    loaded: Callable[[str], LoadedModel], oracle: Callable[[str], Oracle], adapter: Callable[..., Path]
) -> None:
    directory = adapter("qwen2_moe", 8, ("shared_expert_gate",), 32)
    lora = PlainLora(loaded("qwen2_moe").card)
    engine = TestEngine(loaded("qwen2_moe"), lora, limits=Limits(max_running=2, step_tokens=64))
    told = engine.ask(prompt(9), digest=lora.register(directory), max_tokens=3, logprobs=0, prompt_logprobs=0)

    engine.run()

    assert error_of(told, prompt(9), oracle("qwen2_moe"), directory) < TOLERANCE
    assert error_of(told, prompt(9), oracle("qwen2_moe"), None) > 20 * TOLERANCE


def test_only_adapters_of_lm_head_cost_a_second_plan(
    loaded: Callable[[str], LoadedModel], adapter: Callable[..., Path]
) -> None:
    plans = []
    for targets in (ATTENTION, ("lm_head",)):
        lora = PlainLora(loaded("llama").card)
        engine = TestEngine(loaded("llama"), lora, limits=Limits(max_running=2, step_tokens=64))
        engine.ask(prompt(9), digest=lora.register(adapter("llama", 4, targets, 61)), max_tokens=4)
        engine.run()
        plans.append(lora.begun)
    assert plans == [4, 8]


@pytest.mark.parametrize("scored", [False, True], ids=["sampled", "prompt scored"])
def test_a_delta_of_lm_head_that_is_lost_costs_its_own_rows_only(
    *,
    scored: bool,
    loaded: Callable[[str], LoadedModel],
    oracle: Callable[[str], Oracle],
    adapter: Callable[..., Path],
) -> None:
    directories = [adapter("llama", 4, ("lm_head",), seed) for seed in (71, 72)]
    lora = PlainLora(loaded("llama").card)
    first, second = (lora.register(d) for d in directories)
    engine = TestEngine(loaded("llama"), lora, limits=Limits(max_running=4, step_tokens=64))
    options: dict[str, Any] = {"max_tokens": 4, "logprobs": 1, "prompt_logprobs": 1 if scored else None}
    lost = engine.ask(prompt(9), digest=first, **options)
    kept = engine.ask(prompt(10), digest=second, **options)
    base = engine.ask(prompt(11), **options)
    lora.lose_heads[first] = 1

    engine.turn()

    assert (len(lost.tokens), len(kept.tokens), len(base.tokens)) == (0, 1, 1)
    engine.run()
    for told, ids, directory in ((lost, 9, directories[0]), (kept, 10, directories[1]), (base, 11, None)):
        assert len(told.tokens) == 4
        assert oracle("llama").shortfall(prompt(ids), told.tokens, directory) < TOLERANCE
        if scored:
            assert error_of(told, prompt(ids), oracle("llama"), directory) < TOLERANCE


def test_a_base_offers_exactly_the_sites_that_engines_compute(loaded: Callable[[str], LoadedModel]) -> None:
    offered = {site.site for name in CONFIGS for site in loaded(name).card.sites}
    assert site_mask(offered) == COMPUTED_SITES


def test_base_rows_never_reach_the_lora_interface(loaded: Callable[[str], LoadedModel]) -> None:
    lora = PlainLora(loaded("llama").card)
    engine = TestEngine(loaded("llama"), lora, limits=Limits(max_running=4, step_tokens=32))
    engine.ask(prompt(6), max_tokens=4)

    engine.run()

    assert (lora.submits, lora.ever_wanted) == (0, [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_are_widened_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_tiny_model("llama", tmp_path / "m", dtype=dtype)
    loaded = load_tiny(model.directory)
    engine = TestEngine(loaded, PlainLora(loaded.card), limits=Limits(max_running=2, step_tokens=64))
    told = engine.ask(prompt(12), max_tokens=4, logprobs=2, prompt_logprobs=1)

    engine.run()

    assert error_of(told, prompt(12), Oracle(model.directory)) < TOLERANCE


def test_a_sharded_checkpoint_reads_like_a_whole_one(tmp_path: Path, tiny: Callable[[str], TinyModel]) -> None:
    model = tiny("qwen3_moe")
    model.hf.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1

    whole, sharded = load_tiny(model.directory), load_tiny(tmp_path / "sharded")

    assert whole.card.fingerprint == sharded.card.fingerprint
    outputs = []
    for each in (whole, sharded):
        engine = TestEngine(each, PlainLora(each.card), limits=Limits(max_running=2, step_tokens=64))
        outputs.append(engine.ask(prompt(8), max_tokens=6, logprobs=1))
        engine.run()
    assert outputs[0].scores == outputs[1].scores


def test_fused_expert_tensors_on_disk_are_read(tmp_path: Path, tiny: Callable[[str], TinyModel]) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny("qwen3_moe")
    tensors: dict[str, Any] = load_file(model.directory / "model.safetensors")
    per_expert = [k for k in tensors if ".experts." in k]
    params = dict(model.hf.named_parameters())
    for key in per_expert:
        del tensors[key]
    for name, value in params.items():
        if ".experts." in name:
            tensors[name] = value.detach().clone()
    target = tmp_path / "fused"
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((model.directory / "config.json").read_bytes())
    loaded = load_tiny(target)
    engine = TestEngine(loaded, PlainLora(loaded.card), limits=Limits(max_running=2, step_tokens=64))
    told = engine.ask(prompt(10), max_tokens=4, logprobs=1, prompt_logprobs=1)

    engine.run()

    assert error_of(told, prompt(10), Oracle(model.directory)) < TOLERANCE


def test_dummy_weights_have_true_shapes_and_run(tmp_path: Path, tiny: Callable[[str], TinyModel]) -> None:
    (tmp_path / "config.json").write_bytes((tiny("mixtral").directory / "config.json").read_bytes())
    loaded = load_tiny(tmp_path, load_format="dummy")
    engine = TestEngine(loaded, PlainLora(loaded.card), limits=Limits(max_running=2, step_tokens=64))
    told = engine.ask(prompt(10), max_tokens=4)

    engine.run()

    assert len(told.tokens) == 4
    assert loaded.card.sites == load_tiny(tiny("mixtral").directory).card.sites
