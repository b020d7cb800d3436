"""Class A, beyond plain LoRA: what is not served exactly is refused by name, never served in part."""

import pytest
import torch

from support.cases import PROMPT, Change, Files, config, keyed, modules
from support.worlds import World, each, error_of, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]

QV = modules("q_proj", "v_proj")
EMBED_MODULE = "base_model.model.model.embed_tokens"
TOKENS = "token_adapter.trainable_tokens_delta"
HEAD, EMBED = "base_model.model.lm_head.weight", f"{EMBED_MODULE}.weight"


@on("L")
async def test_a05_a_bias_inside_lora_b(world: World) -> None:
    loras = world.oracle.loras(modules("q_proj"))
    biases = {module: torch.randn(32, generator=torch.Generator().manual_seed(5)) for module in loras}
    tensors = keyed(loras) | {f"base_model.model.{module}.lora_B.bias": bias for module, bias in biases.items()}
    changes = [*world.oracle.merge(loras, 3.0), *(Change(f"{m}.bias", 3 * bias) for m, bias in biases.items())]
    settings = config(lora_alpha=12, target_modules=["q_proj"])
    await each(
        world.exact(Files(settings | {"lora_bias": True}, tensors), changes),
        world.exact(Files(settings | {"lora_bias": False}, keyed(loras)), world.oracle.merge(loras, 3.0)),
        world.refused(Files(settings | {"lora_bias": False}, tensors), "lora_B.bias"),
    )


@on("L-bias")
async def test_a06_biases_that_were_trained(world: World) -> None:
    loras = world.oracle.loras(modules("q_proj"))
    attention = "base_model.model.model.layers.{}.self_attn.{}"
    only = {attention.format(i, "q_proj.base_layer.bias"): torch.ones(32) for i in (0, 1)}
    more = {
        attention.format(i, f"{m}.bias"): torch.ones(n) for i in (0, 1) for m, n in (("k_proj", 16), ("o_proj", 32))
    }
    settings = config(target_modules=["q_proj"])
    await each(
        world.refused(Files(settings | {"bias": "all"}, keyed(loras) | only | more), "bias", "all"),
        world.refused(Files(settings | {"bias": "lora_only"}, keyed(loras) | only), "bias", "lora_only"),
        world.refused(Files(settings, keyed(loras) | only), "bias"),
        world.exact(Files(settings, keyed(loras)), world.oracle.merge(loras, 2.0)),
    )


def trained_rows(world: World, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, Change, Change]:
    """A table for embedding and one for head, with new rows for some tokens; and what these change."""
    weights = world.oracle.model.model.embed_tokens.weight, world.oracle.model.lm_head.weight
    tables = [weight.detach().clone() for weight in weights]
    for seed, table in enumerate(tables):
        table[tokens] += torch.randn(len(tokens), 32, generator=torch.Generator().manual_seed(seed)) * 0.4
    changes = [table - weight.detach() for table, weight in zip(tables, weights, strict=True)]
    return (*tables, Change("model.embed_tokens.weight", changes[0]), Change("lm_head.weight", changes[1]))


@on("L")
async def test_a07_modules_saved_whole(world: World) -> None:
    loras = world.oracle.loras(QV)
    changes = world.oracle.merge(loras, 2.0)
    embedding, head, moves_embedding, moves_head = trained_rows(world, [*range(100), 127])
    whole = {HEAD: head, EMBED: embedding}
    saved = config(modules_to_save=["embed_tokens", "lm_head"])
    twice = whole | {key.replace("weight", "modules_to_save.weight"): table for key, table in whole.items()}
    own = {HEAD: world.oracle.model.lm_head.weight, EMBED: world.oracle.model.model.embed_tokens.weight}
    originals = {key.replace("weight", "original_module.weight"): table.detach() for key, table in own.items()}
    await each(
        world.exact(Files(saved, keyed(loras) | twice | originals), [*changes, moves_embedding, moves_head]),
        world.refused(
            Files(saved, keyed(loras) | whole | dict(zip(originals, twice.values(), strict=False))), "original"
        ),
        world.exact(Files(saved, keyed(loras) | whole), [*changes, moves_embedding, moves_head]),
        world.exact(Files(config(modules_to_save=["lm_head"]), keyed(loras) | {HEAD: head}), [*changes, moves_head]),
        world.exact(Files(config(), keyed(loras) | {EMBED: embedding}), [*changes, moves_embedding]),
        world.refused(Files(saved, keyed(loras) | {HEAD: head}), "modules_to_save", "embed_tokens"),
        world.refused(Files(config(modules_to_save=["score"]), keyed(loras)), "modules_to_save", "score"),
        world.exact(Files(config(modules_to_save=[]), keyed(loras)), changes),
        world.exact(Files(config(modules_to_save=None), keyed(loras)), changes),
    )


@on("L")
async def test_a07_trained_tokens(world: World) -> None:
    loras = world.oracle.loras(QV)
    changes, tokens = world.oracle.merge(loras, 2.0), [PROMPT[2], 90, PROMPT[0]]
    embedding, head, moves_embedding, moves_head = trained_rows(world, tokens)
    rows, of_head = (
        {f"{EMBED_MODULE}.{TOKENS}": embedding[tokens]},
        {f"base_model.model.lm_head.{TOKENS}": head[tokens]},
    )
    both = config(trainable_token_indices={"embed_tokens": tokens, "lm_head": tokens})
    await each(
        world.exact(Files(config(trainable_token_indices=tokens), keyed(loras) | rows), [*changes, moves_embedding]),
        world.exact(Files(both, keyed(loras) | rows | of_head), [*changes, moves_embedding, moves_head]),
        world.refused(Files(config(trainable_token_indices=[128]), keyed(loras) | rows), "128"),
        world.refused(Files(config(), keyed(loras) | rows), "trainable_token_indices"),
    )


@on("LT")
async def test_a07_trained_tokens_of_a_tied_embedding_move_the_head(world: World) -> None:
    loras = world.oracle.loras(QV)
    tokens = [PROMPT[2], 90, PROMPT[0]]
    embedding, _, moves_embedding, _ = trained_rows(world, tokens)
    changes = [*world.oracle.merge(loras, 2.0), moves_embedding, Change("lm_head.weight", moves_embedding.delta)]
    rows = {f"{EMBED_MODULE}.{TOKENS}": embedding[tokens]}
    await world.exact(Files(config(trainable_token_indices=tokens), keyed(loras) | rows), changes)


@on("L")
async def test_a08_a_vocabulary_that_grew(world: World) -> None:
    tensors = keyed(world.oracle.loras(QV)) | {HEAD: torch.ones(131, 32), EMBED: torch.ones(131, 32)}
    more = {"added_tokens.json": b'{"<a>": 128, "<b>": 129, "<c>": 130}'}
    await world.refused(Files(config(), tensors, more), "131", "128")
    for model in ("good", "tiny"):
        answer = await world.api.http.post("/v1/completions", json={"model": model, "prompt": [*PROMPT, 129]})
        assert "129" in error_of(answer, [400])["message"]


async def moves_the_embedding(world: World) -> None:
    loras = world.oracle.loras(modules("q_proj"))
    dice = torch.Generator().manual_seed(12)
    a, b = torch.randn(4, 128, generator=dice) * 0.2, torch.randn(32, 4, generator=dice) * 0.2
    tensors = keyed(loras) | {f"{EMBED_MODULE}.lora_embedding_A": a, f"{EMBED_MODULE}.lora_embedding_B": b}
    changes = [*world.oracle.merge(loras, 2.0), Change("model.embed_tokens.weight", 2 * (b @ a).T)]
    await world.exact(Files(config(target_modules=["embed_tokens", "q_proj"]), tensors), changes)


@on("L")
async def test_a12_lora_on_the_embedding(world: World) -> None:
    await moves_the_embedding(world)


@on("LT")
async def test_a12_lora_on_a_tied_embedding_leaves_the_head_alone(world: World) -> None:
    await moves_the_embedding(world)


@on("L")
async def test_a12_a_copy_of_the_base_is_no_adapter(world: World) -> None:
    copied = keyed(world.oracle.loras(QV)) | {f"{EMBED_MODULE}.base_layer.weight": torch.ones(128, 32)}
    await world.refused(Files(config(), copied), "embed_tokens.base_layer.weight")
