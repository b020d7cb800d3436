"""Adapters that replace rows, drawn at random, some with a fault: packed as the oracle has the tables, or refused."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.packed import part_arrays, read_header
from support.asked import AskedBase
from support.explicit_rows import NAMES, NoMeaningError, Tables, tables_of
from support.tiny_models import VOCAB, make_tiny_model

WIDTH = 32
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
Tensors = dict[str, torch.Tensor]


class Base:
    """A tiny model, its tables, and an engine's answers about them."""

    def __init__(self, name: str, root: Path) -> None:
        model = make_tiny_model(name, root / "model")
        self.is_tied = name == "llama-tied"
        heads = (model.hf.get_input_embeddings(), model.hf.get_output_embeddings())
        self.tables = Tables(*(head.weight.detach().double().numpy() for head in heads))
        self.asked = AskedBase(model.directory, root)
        self.root, self._count = root, 0

    def write(self, config: dict[str, Any], tensors: Tensors) -> Path:
        self._count += 1
        directory = self.root / f"adapter-{self._count}"
        directory.mkdir()
        (directory / "adapter_config.json").write_text(json.dumps(config))
        save_file({key: t.clone() for key, t in tensors.items()}, directory / "adapter_model.safetensors")
        return directory

    def packed(self, directory: Path) -> Tables:
        """The base's tables with what was packed. Raises AdapterInvalid."""
        self.asked.ingest(directory, directory / "packed")
        tables = {Site.EMBED: self.tables.embed_tokens.copy(), Site.LM_HEAD: self.tables.lm_head.copy()}
        with (directory / "packed").open("rb") as file:
            header = read_header(file)
            for entry in header.manifest.sites:
                if entry.site in tables:
                    file.seek(header.data_start + entry.offset)
                    raw = np.frombuffer(file.read(entry.num_bytes), np.uint8)
                    ((a, bt),) = part_arrays(entry, header.manifest.dtype, raw)
                    added = entry.parts[0].scale * (bt.astype(np.float64).T @ a.astype(np.float64))
                    tables[entry.site] += added.T if entry.site is Site.EMBED else added
        return Tables(tables[Site.EMBED], tables[Site.LM_HEAD])


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Base]:
    return cache(lambda name: Base(name, tmp_path_factory.mktemp(name)))


@st.composite
def adapters(draw: st.DrawFn, tables: Tables) -> tuple[dict[str, Any], Tensors]:
    """A configuration and tensors; each table is left alone, replaced in one way, or, seldom, in two."""
    dice = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    kind = draw(st.sampled_from(DTYPES))
    config: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 3.0, "target_modules": ["q_proj"]}
    tensors: Tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight": torch.randn(shape, generator=dice)
        for layer in range(2)
        for half, shape in (("A", (2, WIDTH)), ("B", (WIDTH, 2)))
    }
    tokens: dict[str, list[int]] = {}
    for name, table in tables._asdict().items():
        for way in draw(
            st.lists(st.sampled_from(("tokens", "whole", "lora")), max_size=2 if draw(st.integers(0, 9)) == 0 else 1)
        ):
            rows = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6, unique=True))
            new = torch.randn(len(rows), WIDTH, generator=dice)
            if way == "tokens":
                tokens[name] = rows
                tensors[f"{NAMES[name]}.token_adapter.trainable_tokens_delta"] = new
            elif way == "whole":
                whole = torch.from_numpy(table.astype(np.float32)).clone()
                whole[rows] = new
                tensors[f"{NAMES[name]}.weight"] = whole
                if draw(st.integers(0, 3)):
                    config.setdefault("modules_to_save", []).append(draw(st.sampled_from((name, NAMES[name][17:]))))
            else:
                config["target_modules"].append(name)
                halves = (
                    ("lora_embedding_A", "lora_embedding_B")
                    if name == "embed_tokens"
                    else ("lora_A.weight", "lora_B.weight")
                )
                tensors[f"{NAMES[name]}.{halves[0]}"] = torch.randn(
                    2, len(table) if name == "embed_tokens" else WIDTH, generator=dice
                )
                tensors[f"{NAMES[name]}.{halves[1]}"] = torch.randn(
                    WIDTH if name == "embed_tokens" else len(table), 2, generator=dice
                )
    if tokens.keys() == {"embed_tokens"} and draw(st.booleans()):
        config["trainable_token_indices"] = tokens["embed_tokens"]
    elif tokens:
        config["trainable_token_indices"] = tokens
    if draw(st.integers(0, 4)) == 0:
        _same_tables(config, tensors, draw)
    config["ensure_weight_tying"] = draw(st.integers(0, 4)) == 0
    if draw(st.integers(0, 5)) == 0:
        _one_fault(draw, config, tensors)
    # What is no half of a pair stays as it is: in another dtype a whole table would be another table, all of it.
    return config, {key: t.to(kind) if ".lora_" in key or "token_adapter" in key else t for key, t in tensors.items()}


def _same_tables(config: dict[str, Any], tensors: Tensors, draw: st.DrawFn) -> None:
    """As a tied pair is saved: the same table twice, or trained tokens that both name."""
    embed, head = (f"{NAMES[name]}.weight" for name in ("embed_tokens", "lm_head"))
    if embed in tensors and head not in tensors:
        tensors[head] = tensors[embed]
    said = config.get("trainable_token_indices")
    if isinstance(said, dict) and said.keys() == {"embed_tokens"} and draw(st.booleans()):
        said["lm_head"] = list(said["embed_tokens"])


def _one_fault(draw: st.DrawFn, config: dict[str, Any], tensors: Tensors) -> None:
    own = sorted(key for key in tensors if ".lora_" not in key)
    if not own:
        config["modules_to_save"] = [draw(st.sampled_from(("lm_head", "embed_tokens", "norm")))]
        return
    key = draw(st.sampled_from(own))
    match draw(st.sampled_from(("drop", "row", "column", "unsaid", "moved"))):
        case "drop":
            del tensors[key]
        case "row":
            tensors[key] = tensors[key][:-1]
        case "column":
            tensors[key] = tensors[key][:, :-1]
        case "unsaid":
            config.pop("trainable_token_indices", None)
        case _:
            config["trainable_token_indices"] = [1, 2, VOCAB + 5]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_rows_are_packed_as_the_oracle_has_the_tables(base_of: Callable[[str], Base], name: str) -> None:
    base = base_of(name)
    served = 0

    @settings(
        max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
    )
    @given(adapters(base.tables))
    def check(drawn: tuple[dict[str, Any], Tensors]) -> None:
        nonlocal served
        directory = base.write(*drawn)
        try:
            wanted: Tables | NoMeaningError = tables_of(directory, base.tables, is_tied=base.is_tied)
        except NoMeaningError as none:
            wanted = none
        try:
            found = base.packed(directory)
        except AdapterInvalid as refused:
            assert isinstance(wanted, NoMeaningError), f"refused: {refused.message}"
            return
        assert not isinstance(wanted, NoMeaningError), f"served, although {wanted}"
        for mine, theirs in zip(found, wanted, strict=True):
            assert np.abs(mine - theirs).max() < 1e-5
        served += 1

    check()
    assert served >= 40
