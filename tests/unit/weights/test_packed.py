"""The packed file: exact, deterministic, laid out as promised, verifiable by block."""

import hashlib
import io
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from infinilora.protocol.adapter import BLOCK_ALIGN, BaseCard, Site, block_spans, manifest_digest
from infinilora.protocol.errors import AdapterFailed, AdapterInvalid
from infinilora.weights.check import plan_adapter
from infinilora.weights.config import CONFIG_FILE
from infinilora.weights.ingest import ingest, run
from infinilora.weights.packed import PackedHeader, packed_ranges, read_header, verify, write_packed
from infinilora.weights.peft import TENSORS_FILE, read_adapter
from infinilora.weights.synth import write_peft_adapter, write_tensors
from infinilora.weights.tensorfile import open_tensors
from support.cards import make_card, tiny_cards
from support.deltas import Deltas, ingested_deltas, largest_difference, packed_deltas

CARDS = tiny_cards()


def explicit_deltas(directory: Path) -> Deltas:
    """Scale · B·A of every pair in the directory, for configurations without patterns."""
    config = msgspec.json.decode((directory / CONFIG_FILE).read_bytes())
    scale = config["lora_alpha"] / config["r"]
    file, deltas = open_tensors(directory / TENSORS_FILE), Deltas()
    for key in file.tensors:
        if key.endswith("lora_A.weight"):
            a = file.read(key).astype(np.float64)
            b = file.read(key.replace("lora_A", "lora_B")).astype(np.float64)
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            deltas[module] = scale * (b @ a)
    return deltas


def pack(tmp_path: Path, card: BaseCard, **options: Any) -> Path:
    source = write_peft_adapter(tmp_path / "adapter", card, **({"rank": 4} | options))
    ingest(source, card, tmp_path / "adapter.packed")
    return tmp_path / "adapter.packed"


@pytest.mark.parametrize("family", CARDS)
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_every_delta_is_exactly_that_of_the_file(tmp_path: Path, family: str, dtype: str) -> None:
    card = CARDS[family]
    source = write_peft_adapter(tmp_path / "a", card, rank=5, dtype=dtype, seed=1)
    wanted = explicit_deltas(source)
    other = explicit_deltas(write_peft_adapter(tmp_path / "b", card, rank=5, dtype=dtype, seed=2))
    found = ingested_deltas(source, card, tmp_path / "a.packed")
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) < 1e-14
    assert largest_difference(found, other) > 0.1


@settings(max_examples=40, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9)),
    experts=st.integers(0, 5),
    shared=st.integers(0, 9),
    rank=st.integers(1, 12),
    dtype=st.sampled_from(["F32", "BF16", "F16"]),
    targets=st.none()
    | st.sets(
        st.sampled_from(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]), min_size=1
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_geometry_packs_exactly(
    heads: tuple[int, int],
    sizes: tuple[int, int, int],
    experts: int,
    shared: int,
    rank: int,
    dtype: str,
    targets: set[str] | None,
    seed: int,
) -> None:
    card = make_card(
        "any",
        hidden=sizes[0],
        intermediate=sizes[1],
        head_dim=sizes[2],
        heads=heads[0],
        kv_heads=heads[1],
        num_experts=experts,
        shared_intermediate=shared if experts else 0,
    )
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "adapter"
        chosen = sorted(targets) if targets else None
        write_peft_adapter(source, card, rank=rank, targets=chosen, dtype=dtype, seed=seed, std=0.5)
        found = ingested_deltas(source, card, Path(name) / "packed")
        assert largest_difference(found, explicit_deltas(source)) < 1e-14


# Layout -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CARDS)
def test_the_file_is_laid_out_layer_by_layer_without_holes(tmp_path: Path, family: str) -> None:
    path = pack(tmp_path, CARDS[family])
    with path.open("rb") as file:
        header = read_header(file)
    assert header.data_start % BLOCK_ALIGN == 0
    assert header.file_bytes == path.stat().st_size
    places, end = [], header.data_start
    for layer in range(header.manifest.num_layers):
        for entry, offset, num_bytes in packed_ranges(header, layer):
            _, block_bytes = block_spans(entry.parts, entry.in_dim, header.manifest.dtype)
            assert offset == end
            assert num_bytes == entry.num_blocks * block_bytes == entry.num_bytes
            assert len(entry.sha256) == entry.num_blocks
            end = offset + num_bytes
            places.append((entry.layer, entry.site))
    assert places == sorted(places)
    assert end == header.file_bytes


def test_the_file_is_a_safetensors_file_that_names_dense_factors(tmp_path: Path) -> None:
    card = CARDS["llama"]
    path = pack(tmp_path, card, rank=3)
    original = open_tensors(tmp_path / "adapter" / TENSORS_FILE)
    with safe_open(path, "np") as file:
        a, bt = file.get_tensor("1.qkv.v.a"), file.get_tensor("1.qkv.v.bt")
        manifest = file.metadata()["infinilora"]
    module = "base_model.model.model.layers.1.self_attn.v_proj"
    np.testing.assert_array_equal(a, original.read(f"{module}.lora_A.weight"))
    np.testing.assert_array_equal(bt, original.read(f"{module}.lora_B.weight").T)
    with path.open("rb") as raw:
        assert read_header(raw).digest == "sha256:" + hashlib.sha256(manifest.encode()).hexdigest()


def test_experts_are_one_tensor_of_equal_blocks(tmp_path: Path) -> None:
    path = pack(tmp_path, CARDS["mixtral"])
    with safe_open(path, "np") as file:
        region = file.get_tensor("0.moe_gate_up")
    with path.open("rb") as raw:
        entry = next(e for e in read_header(raw).manifest.sites if e.site is Site.MOE_GATE_UP)
    assert region.nbytes == entry.num_bytes
    assert hashlib.sha256(region.reshape(4, -1)[2].data).hexdigest() == entry.sha256[2]


def test_only_adapted_parts_are_stored_at_their_columns(tmp_path: Path) -> None:
    path = pack(tmp_path, CARDS["llama"], targets=["q_proj", "v_proj"])
    with path.open("rb") as file:
        manifest = read_header(file).manifest
    assert {e.site for e in manifest.sites} == {Site.QKV}
    parts = manifest.sites[0].parts
    assert [(p.name, p.out_dim, p.out_offset, p.rank, p.scale) for p in parts] == [
        ("q", 32, 0, 4, 2.0),
        ("v", 16, 48, 4, 2.0),
    ]
    assert manifest.layer_sites() == (1, 1, 0)


# Identity -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_the_same_files_give_the_same_bytes(tmp_path: Path, family: str) -> None:
    first = pack(tmp_path / "one", CARDS[family], seed=7).read_bytes()
    assert pack(tmp_path / "two", CARDS[family], seed=7).read_bytes() == first


def test_each_thing_that_matters_changes_the_digest(tmp_path: Path) -> None:
    card = CARDS["llama"]
    other_base = msgspec.structs.replace(card, fingerprint="sha256:" + "0" * 64)
    variants: list[tuple[BaseCard, dict[str, Any]]] = [
        (card, {}),
        (card, {"seed": 1}),
        (card, {"rank": 3}),
        (card, {"dtype": "BF16"}),
        (card, {"config": {"lora_alpha": 9}}),
        (card, {"config": {"use_rslora": True}}),
        (other_base, {}),
    ]
    digests = set()
    for number, (base, options) in enumerate(variants):
        source = write_peft_adapter(tmp_path / str(number), base, **({"rank": 4} | options))
        digests.add(manifest_digest(ingest(source, base, tmp_path / "out")))
    digests.add(manifest_digest(ingest(tmp_path / "0", card, tmp_path / "out", narrow="BF16")))
    assert len(digests) == len(variants) + 1


def test_the_digest_in_the_file_is_the_manifests(tmp_path: Path) -> None:
    card = CARDS["llama"]
    source = write_peft_adapter(tmp_path / "a", card, rank=4)
    out = io.BytesIO()
    manifest = write_packed(plan_adapter(read_adapter(source), card), out)
    header = PackedHeader.parse(out.getvalue())
    assert header.manifest == manifest
    assert header.digest == manifest_digest(manifest)
    assert PackedHeader.num_bytes(out.getvalue()[:8]) == header.data_start


# Damage -------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_found_in_its_block(tmp_path: Path) -> None:
    path = pack(tmp_path, CARDS["mixtral"])
    with path.open("rb") as file:
        header = read_header(file)
    entry, offset, num_bytes = next(r for r in packed_ranges(header, 1) if r[0].site is Site.MOE_DOWN)
    data = bytearray(path.read_bytes())
    block_bytes = num_bytes // 4
    data[offset + 2 * block_bytes + 5] ^= 1
    for block in (0, 1, 3):
        at = offset + block * block_bytes
        verify(entry, block, data[at : at + block_bytes])
    at = offset + 2 * block_bytes
    with pytest.raises(AdapterFailed, match="layer 1 site moe_down block 2"):
        verify(entry, 2, data[at : at + block_bytes])


@pytest.mark.parametrize("keep", [0, 4, 8, 64])
def test_a_short_header_is_refused(tmp_path: Path, keep: int) -> None:
    data = pack(tmp_path, CARDS["llama"]).read_bytes()
    with pytest.raises(AdapterFailed, match="packed file: header"):
        PackedHeader.parse(data[:keep])


@pytest.mark.parametrize("body", [b"{}", b"not json", b'{"__metadata__": {"infinilora": "{}"}}'])
def test_a_header_without_a_manifest_is_refused(body: bytes) -> None:
    with pytest.raises(AdapterFailed, match="wanted an infinilora manifest"):
        PackedHeader.parse(len(body).to_bytes(8, "little") + body)


def test_a_later_pack_version_is_refused(tmp_path: Path) -> None:
    data = pack(tmp_path, CARDS["llama"]).read_bytes()
    later = data.replace(rb"\"pack_version\":2", rb"\"pack_version\":3", 1)
    assert later != data
    with pytest.raises(AdapterFailed, match="pack_version: found 3; wanted 1 or 2"):
        PackedHeader.parse(later)


# Dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "most"), [("BF16", 2**-7), ("F16", 2**-10)])
def test_narrowing_is_measured_and_said(tmp_path: Path, kind: str, most: float) -> None:
    card = CARDS["llama"]
    source = write_peft_adapter(tmp_path / "a", card, rank=4)
    report = run(source, card, tmp_path / "out", narrow=kind, max_rank=64)
    error = largest_difference(packed_deltas(tmp_path / "out", card), explicit_deltas(source))
    assert (report.manifest.dtype, report.manifest.narrowed_from) == (kind, "F32")
    assert f"narrowed F32 -> {kind}" in report.warnings[0].text
    assert most / 64 < error < most
    assert most / 64 < report.narrow_error < most


def test_a_file_that_is_narrow_already_is_not_narrowed(tmp_path: Path) -> None:
    card = CARDS["llama"]
    source = write_peft_adapter(tmp_path / "a", card, rank=4, dtype="BF16")
    plain = ingest(source, card, tmp_path / "out")
    assert manifest_digest(ingest(source, card, tmp_path / "out", narrow="BF16")) == manifest_digest(plain)


def test_factors_that_cancel_are_not_narrowed(tmp_path: Path) -> None:
    """What PiSSA leaves: two large products whose difference is small."""
    card = CARDS["llama"]
    source = write_peft_adapter(tmp_path / "a", card, rank=2, targets=["o_proj"])
    file = open_tensors(source / TENSORS_FILE)
    tensors = {name: np.array(file.read(name)) for name in file.tensors}
    for name, tensor in tensors.items():
        if "lora_A" in name:
            tensor[1] = tensor[0] * np.float32(1 + 1e-3)
        else:
            tensor[:, 1] = -tensor[:, 0]
    write_tensors(source / TENSORS_FILE, tensors)
    ingest(source, card, tmp_path / "out")
    with pytest.raises(AdapterInvalid, match=r"narrow to BF16: found a delta that differs by .*part o"):
        ingest(source, card, tmp_path / "out", narrow="BF16")


# Old versions -------------------------------------------------------------------------------------

GOLDEN = Path(__file__).parents[2] / "data" / "packed-v1"
"""Written by the first version of the writer; never to be written again."""
GOLDEN_CARDS = {
    "dense": make_card("llama", num_layers=1, hidden=8, intermediate=8, heads=2, kv_heads=1, head_dim=4),
    "moe": make_card(
        "qwen2_moe",
        num_layers=1,
        hidden=8,
        intermediate=8,
        heads=2,
        kv_heads=1,
        head_dim=4,
        num_experts=2,
        shared_intermediate=8,
    ),
}
GOLDEN_DIGESTS = {
    "dense": "sha256:c6066a1c6df3a16a4f917e5ec83ed563e93d55086e62e7322ed46673007837bf",
    "moe": "sha256:4cc8d8c76e87fc76f768fa2899fd0c2b9505d05b42dfdb64318a551e414f5fa8",
}


@pytest.mark.parametrize("name", GOLDEN_DIGESTS)
def test_version_1_stays_readable_and_keeps_its_digest(name: str) -> None:
    with (GOLDEN / name / "packed.safetensors").open("rb") as file:
        header = read_header(file)
    assert header.manifest.pack_version == 1
    assert header.digest == manifest_digest(header.manifest) == GOLDEN_DIGESTS[name]
    found = packed_deltas(GOLDEN / name / "packed.safetensors", GOLDEN_CARDS[name])
    wanted = explicit_deltas(GOLDEN / name)
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) < 1e-14
