"""What is kept of an adapter's files: enough to see that a packed file is read otherwise than they were meant."""

import hashlib
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from infinilora.protocol.adapter import BaseCard, Manifest, SiteEntry
from infinilora.protocol.errors import AdapterFailed
from infinilora.weights.ingest import ingest
from infinilora.weights.packed import read_header
from infinilora.weights.reference import Reference, Retest, decode_reference, reference_file
from infinilora.weights.synth import write_peft_adapter
from support.cards import make_card

DENSE, MOE = make_card("llama"), make_card("qwen3_moe", num_experts=4)


def noise(name: str, *shape: int) -> np.ndarray:
    """What docs/packed-format.md says of inputs and directions, by other means."""
    raw = hashlib.shake_256(f"infinilora 1 {name}".encode()).digest(4 * math.prod(shape))
    numbers = [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)]
    return np.array([(2 * number + 1) / 2**32 - 1 for number in numbers]).reshape(shape)


def packed(root: Path, card: BaseCard, **options: object) -> tuple[Path, Reference]:
    source = write_peft_adapter(root / "files", card, **{"rank": 3, **options})  # type: ignore[arg-type]
    ingest(source, card, root / "packed")
    return source, decode_reference(reference_file(root / "packed").read_bytes())


def retested(path: Path, reference: Reference, change: dict[str, object] | None = None) -> tuple[list[str], Retest]:
    """Every block of a packed file held against a reference; `change`: of how every part is understood."""
    with path.open("rb") as file:
        header = read_header(file)
        retest, faults = Retest(header.manifest, reference), list[str]()
        for entry in header.manifest.sites:
            file.seek(header.data_start + entry.offset)
            for block in range(entry.num_blocks):
                data = file.read(entry.num_bytes // entry.num_blocks)
                faults += retest.faults(understood(entry, change or {}), block, data)
    return faults + retest.missing(), retest


def understood(entry: SiteEntry, change: dict[str, object]) -> SiteEntry:
    parts = tuple(msgspec.structs.replace(part, **change) for part in entry.parts)
    return msgspec.structs.replace(entry, parts=parts)


@pytest.mark.parametrize(("card", "module"), [(DENSE, "model.layers.0.self_attn.v_proj"),
                                              (MOE, "model.layers.0.mlp.experts.2.down_proj")])  # fmt: skip
def test_answers_are_those_of_the_files_by_the_definition(card: BaseCard, module: str, tmp_path: Path) -> None:
    source, reference = packed(tmp_path, card)
    tensors = load_file(source / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{module}.lora_{half}.weight"].astype(float) for half in "AB")
    x, u = noise(f"inputs {a.shape[1]}", a.shape[1], 4), noise(f"direction {len(b)}", len(b))
    site, part = next(
        (site, part) for site in card.sites for part in site.parts
        if site.layer == 0 and module.rpartition(".")[2] == part.module.rpartition(".")[2]
    )  # fmt: skip
    kept = {(each.layer, each.site, each.begin): each.blocks for each in reference.parts}
    block = kept[0, site.site, part.out_offset][2 if site.num_experts else 0]
    np.testing.assert_allclose(block.answers, 2.0 * (u @ b @ a @ x), rtol=1e-12)
    assert block.size >= np.linalg.norm(2.0 * (b @ a @ x)) > 0


@pytest.mark.parametrize("card", [DENSE, MOE])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_what_was_packed_computes_what_is_kept(card: BaseCard, dtype: str, tmp_path: Path) -> None:
    _, reference = packed(tmp_path, card, dtype=dtype)
    faults, retest = retested(tmp_path / "packed", reference)
    assert faults == []
    assert retest.num_compared == sum(len(site.parts) * (site.num_experts or 1) for site in card.sites)
    assert retest.error < 1e-12


@pytest.mark.parametrize("card", [DENSE, MOE])
def test_another_adapters_blocks_are_seen_part_by_part(card: BaseCard, tmp_path: Path) -> None:
    packed(tmp_path / "one", card, seed=1)
    _, other = packed(tmp_path / "two", card, seed=2)
    faults, retest = retested(tmp_path / "one" / "packed", other)
    assert len(faults) == retest.num_compared
    assert "found a delta that is off by" in faults[0]


@pytest.mark.parametrize("change", [{"scale": 2.001}, {"scale": -2.0}])
def test_a_reader_that_understands_the_same_bytes_otherwise_is_seen(change: dict[str, object], tmp_path: Path) -> None:
    _, reference = packed(tmp_path, DENSE)
    faults, retest = retested(tmp_path / "packed", reference, change)
    assert len(faults) == retest.num_compared


def test_a_part_that_is_lost_is_missing_and_one_too_many_is_infinitely_wrong(tmp_path: Path) -> None:
    _, whole = packed(tmp_path / "whole", DENSE)
    _, half = packed(tmp_path / "half", DENSE, targets=["q_proj"])
    faults, _ = retested(tmp_path / "half" / "packed", whole)
    assert any("wanted the delta of the files" in fault for fault in faults)
    faults, retest = retested(tmp_path / "whole" / "packed", half)
    assert retest.error == math.inf
    assert any("off by inf" in fault for fault in faults)


def test_an_adapter_without_effect_has_nothing_to_keep(tmp_path: Path) -> None:
    _, reference = packed(tmp_path, DENSE, std=0.0)
    assert reference.parts == ()
    assert retested(tmp_path / "packed", reference)[0] == []


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"digest":"sha256:x","parts":[[0]]}',
                                  b'{"version":2,"digest":"sha256:x","parts":[]}'])  # fmt: skip
def test_what_is_no_reference_is_refused(data: bytes) -> None:
    with pytest.raises(AdapterFailed, match="reference answers"):
        decode_reference(data)


def test_the_same_files_leave_the_same_answers(tmp_path: Path) -> None:
    made = [packed(tmp_path / name, MOE)[1] for name in ("one", "two")]
    assert made[0] == made[1]
    manifest: Manifest = ingest(tmp_path / "one" / "files", MOE, tmp_path / "again")
    assert made[0].digest == decode_reference(reference_file(tmp_path / "again").read_bytes()).digest
    assert manifest.sites
