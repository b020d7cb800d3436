"""Trained tokens and tables saved whole: packed as PEFT's own model has them, or refused by name."""

import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import AdapterInvalid, Internal
from infinilora.weights import replaced
from infinilora.weights.facts import Facts, FactsWanted
from infinilora.weights.ingest import run
from infinilora.weights.packed import part_arrays, read_header
from infinilora.weights.tensorfile import Array
from support.asked import AskedBase
from support.tiny_models import TinyModel, make_tiny_model

EMBED, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
PREFIX = "base_model.model."
DELTA = "token_adapter.trainable_tokens_delta"
Tables = tuple[Array, Array]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    root = tmp_path_factory.mktemp("tiny")
    return cache(lambda name: make_tiny_model(name, root / name))


class Trained:
    """An adapter that PEFT has made of a tiny model, and the base that it is for."""

    def __init__(self, model: TinyModel, root: Path) -> None:
        self.model, self.root = model, root
        self.base = AskedBase(model.directory, root)
        self.directory = root / "adapter"

    def train(
        self,
        *,
        also: tuple[str, ...] = (),
        dtype: torch.dtype = torch.float32,
        saves_tables: bool = False,
        **settings: Any,
    ) -> "Trained":
        """Every trained parameter moves in some rows. `saves_tables`: with `save_embedding_layers=True`."""
        fresh = make_tiny_model(self.model.name, self.root / "fresh").hf
        config = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", *also], task_type="CAUSAL_LM", **settings)
        dice = torch.Generator().manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft = get_peft_model(fresh, config)
            with torch.no_grad():
                for name, parameter in peft.named_parameters():
                    if parameter.requires_grad:
                        rows = slice(40, 44) if len(parameter) == 128 and "lora" not in name else slice(None)
                        parameter[rows] += torch.randn(parameter[rows].shape, generator=dice) * 0.3
            peft.save_pretrained(self.directory, save_embedding_layers=True if saves_tables else "auto")
        if dtype is not torch.float32:
            self.change(lambda tensors: tensors.update({key: t.to(dtype) for key, t in tensors.items()}))
        return self

    def change(self, change: Callable[[dict[str, torch.Tensor]], object], **settings: Any) -> "Trained":
        path = self.directory / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, path)
        config = json.loads((self.directory / "adapter_config.json").read_text())
        (self.directory / "adapter_config.json").write_text(json.dumps(config | settings))
        return self

    def tables_of_peft(self) -> Tables:
        """Embedding and head [vocabulary, width] of PEFT's own model, by what it makes of every token and direction."""
        fresh = make_tiny_model(self.model.name, self.root / "again").hf
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            peft = PeftModel.from_pretrained(fresh, self.directory).base_model.model
            return self._tables(peft)

    def _tables(self, model: Any) -> Tables:
        with torch.no_grad():
            embedding: Array = model.get_input_embeddings()(torch.arange(128)).double().numpy()
            head: Array = model.get_output_embeddings()(torch.eye(32)).T.double().numpy()
        return embedding, head

    def tables_packed(self, **options: Any) -> Tables:
        """The same of the base and the packed adapter."""
        report = self.base.ingest(self.directory, self.root / "packed", **options)
        tables = [table.copy() for table in self._tables(self.model.hf)]
        with (self.root / "packed").open("rb") as file:
            header = read_header(file)
            for entry in header.manifest.sites:
                file.seek(header.data_start + entry.offset)
                raw = np.frombuffer(file.read(entry.num_bytes), np.uint8)
                if entry.site in (Site.EMBED, Site.LM_HEAD):
                    ((a, bt),) = part_arrays(entry, header.manifest.dtype, raw)
                    added = entry.parts[0].scale * (bt.astype(np.float64).T @ a.astype(np.float64))
                    tables[entry.site is Site.LM_HEAD] += added.T if entry.site is Site.EMBED else added
        assert report.self_test_error < 2**-20 or options
        return tables[0], tables[1]

    def refused(self, match: str, **options: Any) -> None:
        with pytest.raises(AdapterInvalid, match=match):
            self.base.ingest(self.directory, self.root / "packed", **options)
        assert not (self.root / "packed").exists()


@pytest.fixture
def trained(tiny: Callable[[str], TinyModel], tmp_path: Path) -> Callable[[str], Trained]:
    return lambda name: Trained(tiny(name), tmp_path)


SERVED: dict[str, dict[str, Any]] = {
    "tokens": {"trainable_token_indices": [7, 3, 100]},
    "tokens of the embedding by name": {"trainable_token_indices": {"embed_tokens": [5]}},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [9, 8]}},
    "embedding and head": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "the embedding": {"modules_to_save": ["embed_tokens"]},
    "the head": {"modules_to_save": ["lm_head"]},
    "the head, targeted too": {"modules_to_save": ["lm_head"], "also": ("lm_head",)},
    "LoRA on the head, an embedding": {"modules_to_save": ["embed_tokens"], "also": ("lm_head",)},
    "tokens of tables that shall be tied": {"trainable_token_indices": [3], "ensure_weight_tying": True},
    "tables that shall be tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens of both, alike": {"trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [3, 5]}},
}
UNTIED: dict[str, dict[str, Any]] = {
    "tokens of both": {"trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [7]}},
    "tokens, and LoRA on the head": {"trainable_token_indices": [3], "also": ("lm_head",)},
    "tokens, and the head": {"trainable_token_indices": [3], "modules_to_save": ["lm_head"]},
    "LoRA on both, which shall be tied and are not": {"also": ("embed_tokens", "lm_head"), "ensure_weight_tying": True},
}
WITH_TABLES = [
    ("llama", "tokens"),
    ("llama", "tokens of both"),
    ("llama", "the head"),
    ("llama-tied", "embedding and head"),
    ("llama-tied", "the embedding"),
    ("llama-tied", "the head"),
    ("llama-tied", "LoRA on the head, an embedding"),
    ("llama-tied", "tables that shall be tied"),
    ("llama-tied", "tokens"),
    ("llama-tied", "tokens of both, alike"),
    ("llama-tied", "tokens of tables that shall be tied"),
]


@pytest.mark.parametrize(("name", "case"), WITH_TABLES)
def test_all_that_peft_saves_of_the_tables_is_read(trained: Callable[[str], Trained], name: str, case: str) -> None:
    adapter = trained(name).train(saves_tables=True, **(SERVED | UNTIED)[case])
    held = load_file(adapter.directory / "adapter_model.safetensors")
    assert [key for key in held if key.endswith((".original_module.weight", "base_layer.weight"))]
    for mine, theirs in zip(adapter.tables_packed(), adapter.tables_of_peft(), strict=True):
        assert np.abs(mine - theirs).max() < 2e-6


@pytest.mark.parametrize(
    ("name", "case"), [("llama-tied", case) for case in SERVED] + [("llama", case) for case in SERVED | UNTIED]
)
def test_tables_are_those_of_pefts_own_model(trained: Callable[[str], Trained], name: str, case: str) -> None:
    adapter = trained(name).train(**(SERVED | UNTIED)[case])
    wanted, found = adapter.tables_of_peft(), adapter.tables_packed()
    base = adapter._tables(adapter.model.hf)
    assert any(not np.allclose(mine, own) for mine, own in zip(wanted, base, strict=True))
    for mine, theirs in zip(found, wanted, strict=True):
        assert np.abs(mine - theirs).max() < 2e-6


def test_rows_that_are_the_bases_take_no_rank(trained: Callable[[str], Trained]) -> None:
    adapter = trained("llama").train(modules_to_save=["embed_tokens", "lm_head"])
    report = adapter.base.ingest(adapter.directory, adapter.root / "packed")
    ranks = {row.module: row.rank for row in report.plan if row.site in ("embed", "lm_head")}
    assert ranks == {"model.embed_tokens": 4, "lm_head": 4}
    assert [row.num_bytes for row in report.plan if row.site == "embed"] == [4 * (4 * 128 + 4 * 32)]


def test_the_same_files_and_base_give_the_same_digest(trained: Callable[[str], Trained]) -> None:
    adapter = trained("llama-tied").train(trainable_token_indices=[7, 3, 100])
    digests = {adapter.base.ingest(adapter.directory, adapter.root / name).digest for name in ("one", "two")}
    assert len(digests) == 1


def test_a_16_bit_file_is_widened_with_a_word(trained: Callable[[str], Trained]) -> None:
    adapter = trained("llama").train(trainable_token_indices=[7], dtype=torch.bfloat16)
    report = adapter.base.ingest(adapter.directory, adapter.root / "packed")
    assert report.manifest.dtype == "F32"
    assert report.manifest.narrowed_from == ""
    assert ["differences" in note.text for note in report.warnings] == [True]
    narrow = adapter.base.ingest(adapter.directory, adapter.root / "narrow", narrow="BF16")
    assert (narrow.manifest.dtype, narrow.manifest.narrowed_from) == ("BF16", "F32")
    assert 0.0 < narrow.narrow_error < 2**-6


def test_a_table_that_is_the_bases_asks_nobody(trained: Callable[[str], Trained]) -> None:
    adapter = trained("llama").train()
    own = adapter.model.hf.lm_head.weight.detach()
    adapter.change(lambda tensors: tensors.update({f"{HEAD}.weight": own}), modules_to_save=["lm_head"])
    report = adapter.base.ingest(adapter.directory, adapter.root / "packed")
    assert adapter.base.num_asked == 0
    assert {row.site for row in report.plan if row.verdict == "packed"} == {"qkv"}


def test_copies_of_both_tables_are_served_as_what_they_hold(trained: Callable[[str], Trained]) -> None:
    """`save_embedding_layers=True` after the vocabulary was resized to this size: no word of it in the config."""
    adapter = trained("llama-tied").train()
    table = adapter.model.hf.lm_head.weight.detach().clone()
    table[100] *= -1.5
    copies = {f"{HEAD}.weight": table, f"{EMBED}.weight": table}
    wanted = adapter.change(lambda tensors: tensors.update(copies)).tables_of_peft()
    for mine, theirs in zip(adapter.tables_packed(), wanted, strict=True):
        assert np.abs(mine - theirs).max() < 2e-6


def whole(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, float(value))


UNTOLD: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    # base, tensors beside a pair of q_proj, config, what the refusal says
    "a larger vocabulary": ("llama", {f"{HEAD}.weight": whole(1, 131, 32)}, {}, r"lm_head, \[131, 32\].*\[128, 32\]"),
    "another module": ("llama", {}, {"modules_to_save": ["norm"]}, r"modules_to_save: found 'norm'"),
    "none of it": ("llama", {}, {"modules_to_save": ["lm_head"]}, r"modules_to_save: found 'lm_head', and no tensor"),
    "tokens without a tensor": (
        "llama",
        {},
        {"trainable_token_indices": [3]},
        "tokens of model.embed_tokens: found no",
    ),
    "a tensor without tokens": (
        "llama",
        {f"{EMBED}.{DELTA}": whole(1, 2, 32)},
        {},
        "found no tokens; wanted .* 2 rows",
    ),
    "fewer tokens than rows": (
        "llama",
        {f"{EMBED}.{DELTA}": whole(1, 2, 32)},
        {"trainable_token_indices": [3]},
        "found 1 tokens; wanted .* 2 rows",
    ),
    "a token twice": (
        "llama",
        {f"{EMBED}.{DELTA}": whole(1, 2, 32)},
        {"trainable_token_indices": [3, 3]},
        "1 tokens a second time",
    ),
    "a token beyond the vocabulary": (
        "llama",
        {f"{EMBED}.{DELTA}": whole(1, 1, 32)},
        {"trainable_token_indices": [128]},
        "token 128; wanted .*128",
    ),
    "a token before it": (
        "llama",
        {f"{EMBED}.{DELTA}": whole(1, 1, 32)},
        {"trainable_token_indices": [-1]},
        "token -1",
    ),
    "tokens of another module": (
        "llama",
        {f"{EMBED}.{DELTA}": whole(1, 1, 32)},
        {"trainable_token_indices": {"wte": [1]}},
        "'wte'; wanted embed_tokens and lm_head",
    ),
    "tokens of another width": (
        "llama",
        {f"{EMBED}.{DELTA}": whole(1, 1, 31)},
        {"trainable_token_indices": [1]},
        r"shape: found \[1, 31\]",
    ),
    "tokens and the whole": (
        "llama",
        {f"{EMBED}.{DELTA}": whole(1, 1, 32), f"{EMBED}.weight": whole(1, 128, 32)},
        {"trainable_token_indices": [1], "modules_to_save": ["embed_tokens"]},
        "both of model.embed_tokens",
    ),
    "LoRA and tokens on one": (
        "llama",
        {
            f"{EMBED}.{DELTA}": whole(1, 1, 32),
            f"{EMBED}.lora_embedding_A": whole(1, 2, 128),
            f"{EMBED}.lora_embedding_B": whole(1, 32, 2),
        },
        {"trainable_token_indices": [1], "target_modules": ["q_proj", "embed_tokens"]},
        "beside LoRA on it",
    ),
    "a whole that is told in two ways": (
        "llama",
        {f"{HEAD}.weight": whole(1, 128, 32), f"{HEAD}.modules_to_save.weight": whole(2, 128, 32)},
        {"modules_to_save": ["lm_head"]},
        "two tables of one module",
    ),
    "a whole by its inner name only": (
        "llama",
        {f"{HEAD}.modules_to_save.weight": whole(2, 128, 32)},
        {},
        "a name of a whole module that PEFT does not load",
    ),
    "the whole of another base": (
        "llama",
        {f"{HEAD}.weight": whole(1, 128, 32), f"{HEAD}.original_module.weight": whole(2, 128, 32)},
        {"modules_to_save": ["lm_head"]},
        "original_module.weight: found a table .*not llama's own",
    ),
    "another prefix": ("llama", {"lm_head.weight": whole(1, 128, 32)}, {}, "names that begin with"),
    "another place of the layers": (
        "llama",
        {f"{PREFIX}language_model.embed_tokens.weight": whole(1, 128, 32)},
        {},
        "layers below 'language_model.' and 'model.'",
    ),
    "another place of the language model": (
        "llama",
        {f"{PREFIX}language_model.lm_head.weight": whole(1, 128, 32)},
        {},
        "its layers or its head, below 'language_model.' and ''",
    ),
    "another adapter's tokens": (
        "llama",
        {f"{EMBED}.{DELTA}.second": whole(1, 1, 32)},
        {"trainable_token_indices": [1]},
        "tensors of the adapter named 'second' and ''",
    ),
    "one of a tied pair, unnamed": (
        "llama-tied",
        {f"{HEAD}.weight": whole(1, 128, 32)},
        {},
        "wanted two that are equal",
    ),
    "a tied pair that is none": (
        "llama-tied",
        {f"{HEAD}.weight": whole(1, 128, 32), f"{EMBED}.weight": whole(2, 128, 32)},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        "wanted two that are equal",
    ),
    "tokens of a tied embedding, and LoRA on the head": (
        "llama-tied",
        {
            f"{EMBED}.{DELTA}": whole(1, 1, 32),
            f"{HEAD}.lora_A.weight": whole(1, 2, 32),
            f"{HEAD}.lora_B.weight": whole(1, 128, 2),
        },
        {"trainable_token_indices": [1], "target_modules": ["q_proj", "lm_head"]},
        "ties to its head, and a head of its own",
    ),
    "tokens of both of a tied pair": (
        "llama-tied",
        {f"{EMBED}.{DELTA}": whole(1, 1, 32), f"{HEAD}.{DELTA}": whole(1, 1, 32)},
        {"trainable_token_indices": {"embed_tokens": [1], "lm_head": [2]}},
        "ties to its head, and a head of its own",
    ),
    "tokens of both of a tied pair, unlike": (
        "llama-tied",
        {f"{EMBED}.{DELTA}": whole(1, 1, 32), f"{HEAD}.{DELTA}": whole(2, 1, 32)},
        {"trainable_token_indices": [1]},
        "trainable_token_indices of lm_head: found no tokens",
    ),
    "tokens of both of a pair that is not tied": (
        "llama",
        {f"{EMBED}.{DELTA}": whole(1, 1, 32), f"{HEAD}.{DELTA}": whole(1, 1, 32)},
        {"trainable_token_indices": [1]},
        "trainable_token_indices of lm_head: found no tokens",
    ),
    "tokens of a head that is not tied, without a tensor": (
        "llama",
        {f"{EMBED}.{DELTA}": whole(1, 1, 32)},
        {"trainable_token_indices": {"embed_tokens": [1], "lm_head": [1]}},
        "tokens of lm_head: found no tensor",
    ),
    "a number that is none": (
        "llama",
        {f"{EMBED}.{DELTA}": whole(float("nan"), 1, 32)},
        {"trainable_token_indices": [1]},
        "NaN or infinite",
    ),
}


@pytest.mark.parametrize("case", UNTOLD)
def test_what_peft_does_not_say_in_one_way_is_refused(trained: Callable[[str], Trained], case: str) -> None:
    name, tensors, settings, match = UNTOLD[case]
    trained(name).train().change(lambda held: held.update(tensors), **settings).refused(match)


def test_more_rows_than_ranks_are_refused_with_both_numbers(trained: Callable[[str], Trained]) -> None:
    adapter = trained("llama").train(modules_to_save=["lm_head"])
    adapter.refused(r"4 of 128 rows that are not .*wanted at most 3 \(INFINILORA_MAX_RANK\)", max_rank=3)
    adapter.base.ingest(adapter.directory, adapter.root / "packed", max_rank=4)


def test_more_tokens_than_ranks_are_refused_before_anybody_is_asked(trained: Callable[[str], Trained]) -> None:
    adapter = trained("llama").train(trainable_token_indices=[1, 2, 3])
    adapter.refused(r"3 trained tokens.*wanted at most 2 \(INFINILORA_MAX_RANK\)", max_rank=2)
    assert adapter.base.num_asked == 0


def test_the_self_test_hears_of_a_row_in_another_ones_place(
    trained: Callable[[str], Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = trained("llama").train(trainable_token_indices=[1, 2, 3])
    real = replaced._differing

    def swapped(key: str, indices: Array, new: Array, base: Array) -> tuple[str, Array, Array]:
        name, numbers, difference = real(key, indices, new, base)
        return name, numbers[::-1].copy(), difference

    monkeypatch.setattr(replaced, "_differing", swapped)
    with pytest.raises(Internal, match="self-test: layer 0 site embed"):
        adapter.base.ingest(adapter.directory, adapter.root / "packed")


def test_the_self_test_hears_of_a_tied_head_that_stayed_behind(
    trained: Callable[[str], Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = trained("llama-tied").train(trainable_token_indices=[1, 2, 3])
    monkeypatch.setattr(Facts, "is_tied", False)
    with pytest.raises(Internal, match="self-test: layer 2 site lm_head"):
        adapter.base.ingest(adapter.directory, adapter.root / "packed")


def test_without_answers_it_says_what_it_wants_and_writes_nothing(trained: Callable[[str], Trained]) -> None:
    adapter = trained("llama").train(trainable_token_indices={"embed_tokens": [3], "lm_head": [4]})
    with pytest.raises(FactsWanted) as wanted:
        run(adapter.directory, adapter.base.card, adapter.root / "packed", narrow=None, max_rank=8)
    assert {(q.ask.kind, q.ask.module) for q in wanted.value.questions.values()} == {
        ("rows", "model.embed_tokens"),
        ("rows", "lm_head"),
    }
    assert not list(adapter.root.glob("packed*"))
