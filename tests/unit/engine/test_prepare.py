"""The base card: its sites are those of the checkpoint, its fingerprint that of the weights."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from infinilora.engine.model.checkpoint import Checkpoint
from infinilora.engine.model.spec import read_spec
from infinilora.engine.prepare import fingerprint
from infinilora.engine.publish import publish
from infinilora.engine.sizes import derive_sizes
from infinilora.protocol import keys
from infinilora.protocol.adapter import PARTS, BaseCard, Site
from infinilora.protocol.errors import InvalidRequest
from infinilora.runtime.blobs import DirectoryBlobs
from support.engines import load_tiny
from support.tiny_models import TinyModel, make_tiny_model


@pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_sites_name_the_modules_of_the_checkpoint(name: str, tiny: Callable[[str], TinyModel]) -> None:
    card = load_tiny(tiny(name).directory).card
    modules = dict[str, tuple[int, int]]()
    for site in card.sites:
        assert [p.name for p in site.parts] == list(PARTS[site.site])
        for expert in range(site.num_experts or 1):
            for part in site.parts:
                modules[part.module.replace("{expert}", str(expert))] = (part.out_dim, site.in_dim)
        assert site.out_dim == sum(p.out_dim for p in site.parts)
    on_disk = {key.removesuffix(".weight"): shape for key, shape in _linear_shapes(tiny(name).directory).items()}
    on_disk.setdefault("lm_head", on_disk["model.embed_tokens"])  # tied: one table for both
    on_disk["model.embed_tokens"] = on_disk["model.embed_tokens"][::-1]
    assert modules == on_disk
    assert {s.site for s in card.sites} >= {Site.QKV, Site.O}


@pytest.mark.parametrize(("name", "kept"), [("llama", torch.bfloat16), ("llama-tied", torch.float32)])
def test_tables_are_those_of_embedding_and_head_by_their_bytes(name: str, kept: torch.dtype, tmp_path: Path) -> None:
    directory = make_tiny_model(name, tmp_path, dtype=kept).directory
    tables = load_tiny(directory).card.tables
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    wanted = {"model.embed_tokens": embedding, "lm_head": tensors.get("lm_head.weight", embedding)}
    assert tables.keys() == wanted.keys()
    for module, tensor in wanted.items():
        data = tensor.view(torch.uint8).numpy().tobytes()
        assert tables[module].sha256 == hashlib.sha256(data).hexdigest()
        assert (tables[module].dtype, tables[module].shape) == ("BF16" if kept is torch.bfloat16 else "F32", (128, 32))


def _linear_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    return {k: tuple(t.shape) for k, t in load_file(directory / "model.safetensors").items() if t.dim() == 2}


def test_the_fingerprint_follows_the_weights_and_nothing_else(tmp_path: Path) -> None:
    first = make_tiny_model("llama", tmp_path / "a", seed=1).directory
    same = make_tiny_model("llama", tmp_path / "b", seed=1).directory
    other = make_tiny_model("llama", tmp_path / "c", seed=2).directory
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps({**config, "eos_token_id": 9, "max_position_embeddings": 128}))
    prints = [load_tiny(d).card.fingerprint for d in (first, same, other)]
    assert prints[0] == prints[1]
    assert prints[0] != prints[2]

    narrow = make_tiny_model("llama", tmp_path / "d", seed=1, dtype=torch.bfloat16).directory
    biased = json.loads((first / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (first / "config.json").write_text(json.dumps(biased))
    assert load_tiny(narrow).card.fingerprint != prints[0]
    assert load_tiny(first).card.fingerprint != prints[0]


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Copies, so that the file may be written anew."""
    return {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2_moe"])
def test_bases_that_differ_in_one_element_of_any_tensor_have_unlike_fingerprints(name: str, tmp_path: Path) -> None:
    directory = make_tiny_model(name, tmp_path, seed=1).directory
    whole = _tensors(directory)
    spec = read_spec(directory)
    prints = {fingerprint(spec, Checkpoint(directory, spec))}
    for tensor, values in whole.items():
        at = values.numel() * 5 // 7  # in no tensor of these an element that a sparse sample begins or ends with
        nudged = values.clone()
        nudged.view(-1)[at] = torch.nextafter(nudged.view(-1)[at], torch.tensor(9.0))
        save_file({**whole, tensor: nudged}, directory / "model.safetensors")
        prints.add(fingerprint(spec, Checkpoint(directory, spec)))
    assert len(prints) == 1 + len(whole)


def test_a_base_saved_again_in_other_files_and_another_order_is_the_same(tmp_path: Path) -> None:
    directory = make_tiny_model("llama", tmp_path, seed=1).directory
    before = load_tiny(directory).card
    tensors = _tensors(directory)
    names = sorted(tensors, key=lambda name: hashlib.sha256(name.encode()).digest())
    shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "model.safetensors").unlink()
    assert load_tiny(directory).card == before


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_in_one_tensor_or_one_by_one_are_the_same_base(name: str, tmp_path: Path) -> None:
    directory = make_tiny_model(name, tmp_path, seed=1).directory
    before = load_tiny(directory).card
    tensors = _tensors(directory)
    gate, up, down = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    blocks = sorted({key.partition(".0.")[0] for key in tensors if key.partition(".0.")[0].endswith(".experts")})
    for block in blocks:
        stacks = {part: [tensors.pop(f"{block}.{e}.{part}.weight") for e in range(4)] for part in (gate, up, down)}
        tensors[f"{block}.gate_up_proj"] = torch.cat([torch.stack(stacks[gate]), torch.stack(stacks[up])], dim=1)
        tensors[f"{block}.down_proj"] = torch.stack(stacks[down])
    save_file(tensors, directory / "model.safetensors")
    assert blocks
    assert load_tiny(directory).card == before


def test_publishing_puts_the_card_after_its_files(tmp_path: Path, tiny: Callable[[str], TinyModel]) -> None:
    directory = tmp_path / "m"
    directory.mkdir()
    for file in tiny("llama").directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ x }}")
    card = load_tiny(directory).card
    store = DirectoryBlobs(tmp_path / "store")

    publish(store, card, directory)

    assert set(card.tokenizer_files) >= {"tokenizer.json", "chat_template.jinja"}
    assert msgspec.json.decode(store.get(keys.base_card(card.fingerprint)), type=BaseCard) == card
    assert store.get(keys.base_file(card.fingerprint, "chat_template.jinja")) == b"{{ x }}"


def test_the_command_prints_a_card_or_says_what_is_wrong(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "infinilora.engine.prepare"]
    good = subprocess.run([*command, str(tiny("qwen2").directory), "--name", "q"], capture_output=True, check=True)
    card = msgspec.json.decode(good.stdout, type=BaseCard)
    assert (card.name, card.model_type, card.max_model_len) == ("q", "qwen2", 256)
    bad = subprocess.run([*command, str(tmp_path)], capture_output=True, check=False)
    assert bad.returncode == 1
    assert b"no config.json" in bad.stderr


@pytest.mark.parametrize(
    ("wanted_len", "kv_bytes", "expected"),
    [
        (0, 0, (256, 16 * 64 // 4)),
        (100, 0, (100, 16 * 25 // 4)),
        (0, 10_000, (40, 10)),
        (64, 20_000, (64, 20)),
    ],
)
def test_sizes_follow_memory_and_length(wanted_len: int, kv_bytes: int, expected: tuple[int, int]) -> None:
    sizes = derive_sizes(
        max_exact_len=256,
        wanted_len=wanted_len,
        bytes_per_block=1000,
        block_size=4,
        wanted_kv_bytes=kv_bytes,
        max_running=16,
    )
    assert (sizes.max_model_len, sizes.num_blocks) == expected


@pytest.mark.parametrize(
    ("wanted_len", "kv_bytes", "words"),
    [(300, 0, "exactly up to 256"), (100, 10_000, "needs 25 blocks"), (0, 900, "holds 0 blocks")],
)
def test_sizes_that_cannot_be_are_refused_with_their_numbers(wanted_len: int, kv_bytes: int, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        derive_sizes(
            max_exact_len=256,
            wanted_len=wanted_len,
            bytes_per_block=1000,
            block_size=4,
            wanted_kv_bytes=kv_bytes,
            max_running=4,
        )
