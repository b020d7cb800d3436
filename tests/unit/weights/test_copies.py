"""Copies of the base's tables in an adapter's file: left out where they are the base's, refused where they are not."""

import hashlib
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest

from infinilora.protocol.adapter import BaseCard, Table
from infinilora.protocol.errors import AdapterInvalid
from infinilora.protocol.ingest import IngestReport
from infinilora.weights.ingest import run
from infinilora.weights.peft import TENSORS_FILE
from infinilora.weights.synth import write_peft_adapter, write_tensors
from infinilora.weights.tensorfile import NUMPY_DTYPES, Array, open_tensors
from support.cards import make_card

EMBED = "base_model.model.model.embed_tokens.base_layer.weight"
HEAD = "base_model.model.lm_head.base_layer.weight"
VALUES = np.random.default_rng(7).standard_normal((128, 32), np.float32)


def base(dtype: str) -> tuple[BaseCard, Array]:
    """A base whose embedding and head have these values, kept in this dtype."""
    table = VALUES.astype(NUMPY_DTYPES[dtype])
    sha256 = hashlib.sha256(table.tobytes()).hexdigest()
    known = Table(dtype=dtype, shape=table.shape, sha256=sha256)
    card = make_card("llama", outer=True)
    return msgspec.structs.replace(card, tables={"model.embed_tokens": known, "lm_head": known}), table


def ingested(directory: Path, card: BaseCard, copies: dict[str, Array]) -> IngestReport:
    source = write_peft_adapter(directory / "a", card, rank=3, targets=["embed_tokens", "lm_head", "q_proj"])
    file = open_tensors(source / TENSORS_FILE)
    tensors = {name: np.array(file.read(name)) for name in file.tensors}
    write_tensors(source / TENSORS_FILE, tensors | copies)
    return run(source, card, directory / "packed", narrow=None, max_rank=64)


@pytest.mark.parametrize(("kept", "saved"), [("F32", "F32"), ("BF16", "BF16"), ("BF16", "F32"), ("F16", "F32")])
def test_a_copy_of_the_same_values_is_left_out_whatever_its_dtype(kept: str, saved: str, tmp_path: Path) -> None:
    card, table = base(kept)
    copy = table.astype(NUMPY_DTYPES[saved])

    report = ingested(tmp_path, card, {EMBED: copy, HEAD: copy})

    (tmp_path / "plain").mkdir()
    plain = ingested(tmp_path / "plain", card, {})
    assert report.manifest.dtype == "F32"
    assert [site.sha256 for site in report.manifest.sites] == [site.sha256 for site in plain.manifest.sites]
    assert report.manifest.source_digest != plain.manifest.source_digest


def test_a_copy_that_differs_in_one_value_is_refused(tmp_path: Path) -> None:
    card, table = base("F32")
    trained = table.copy()
    trained[77, 3] = np.nextafter(trained[77, 3], np.float32(9))
    with pytest.raises(AdapterInvalid, match=f"{HEAD}: found a table .*128, 32.* not tiny-llama's own"):
        ingested(tmp_path, card, {EMBED: table, HEAD: trained})


def test_a_copy_that_a_narrower_base_rounds_is_not_taken_for_it(tmp_path: Path) -> None:
    card, _ = base("BF16")
    assert (VALUES.astype(ml_dtypes.bfloat16) == base("BF16")[1]).all()
    with pytest.raises(AdapterInvalid, match=EMBED):
        ingested(tmp_path, card, {EMBED: VALUES})


def test_a_table_that_grew_is_refused_with_both_sizes(tmp_path: Path) -> None:
    card, table = base("F32")
    with pytest.raises(AdapterInvalid, match=r"\[131, 32\].* resized.*\[128, 32\]: .* a vocabulary of 128"):
        ingested(tmp_path, card, {EMBED: np.concatenate([table, table[:3]])})


def test_a_copy_may_lie_behind_the_wrappers_of_a_trainer(tmp_path: Path) -> None:
    card, table = base("F32")
    key = HEAD.replace("lm_head", "_orig_mod.lm_head._fsdp_wrapped_module")
    assert ingested(tmp_path, card, {key: table}).manifest.sites


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (HEAD.removeprefix("base_model.model."), "names that begin with '' and 'base_model.model.'"),
        (
            EMBED.replace("model.embed", "model.language_model.embed"),
            "layers below 'model.language_model.' and 'model.'",
        ),
    ],
)
def test_a_copy_that_is_spelled_otherwise_than_the_pairs_is_refused(key: str, says: str, tmp_path: Path) -> None:
    card, table = base("F32")
    with pytest.raises(AdapterInvalid) as refused:
        ingested(tmp_path, card, {key: table})
    assert says in refused.value.message


def test_a_copy_that_nothing_is_known_of_is_refused(tmp_path: Path) -> None:
    card, table = base("F32")
    old = msgspec.structs.replace(card, tables={})
    for card_of, key in ((old, EMBED), (card, "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight")):
        with pytest.raises(AdapterInvalid, match="a copy of base weights"):
            ingested(tmp_path, card_of, {key: table})
