"""Ingest as a whole: what it leaves behind, what it warns of, and as a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from infinilora.protocol.adapter import Manifest, manifest_digest
from infinilora.protocol.errors import AdapterFailed, AdapterInvalid, WireError, from_wire
from infinilora.weights.ingest import IngestResult, ingest
from infinilora.weights.packed import packed_ranges, read_header
from infinilora.weights.peft import TENSORS_FILE, read_adapter
from infinilora.weights.selftest import self_test
from infinilora.weights.synth import write_peft_adapter, write_tensors
from infinilora.weights.tensorfile import open_tensors
from support.cards import make_card, tiny_cards

CARD = tiny_cards()["qwen2_moe"]


def test_the_manifest_describes_base_source_and_dtype(tmp_path: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4, dtype="BF16")
    manifest = ingest(source, CARD, tmp_path / "out")
    assert (manifest.base, manifest.dtype, manifest.num_layers) == (CARD.fingerprint, "BF16", 2)
    assert manifest.source_digest == read_adapter(source).source_digest
    assert manifest.max_rank == 4
    assert manifest.warnings == ()


def test_targets_without_tensors_are_a_warning(tmp_path: Path) -> None:
    config = {"target_modules": ["q_proj", "o_proj"]}
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4, targets=["q_proj"], config=config)
    (warning,) = ingest(source, CARD, tmp_path / "out").warnings
    assert warning.startswith("2 targeted modules have no tensors")
    assert "model.layers.0.self_attn.o_proj" in warning


def test_a_file_of_mixed_dtypes_is_widened(tmp_path: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4, targets=["q_proj"], dtype="BF16")
    file = open_tensors(source / TENSORS_FILE)
    tensors = {name: np.array(file.read(name)) for name in file.tensors}
    first = min(tensors)
    tensors[first] = tensors[first].astype(np.float32)
    write_tensors(source / TENSORS_FILE, tensors)
    manifest = ingest(source, CARD, tmp_path / "out")
    assert manifest.dtype == "F32"
    assert "mixes" in manifest.warnings[0]


def test_the_self_test_sees_another_adapters_weights(tmp_path: Path) -> None:
    sources = [write_peft_adapter(tmp_path / str(seed), CARD, rank=4, seed=seed) for seed in (0, 1)]
    ingest(sources[0], CARD, tmp_path / "out")
    assert self_test(read_adapter(sources[0]), CARD, tmp_path / "out") < 1e-12
    assert self_test(read_adapter(sources[1]), CARD, tmp_path / "out") > 0.1


def test_the_self_test_sees_a_missing_site(tmp_path: Path) -> None:
    whole = write_peft_adapter(tmp_path / "whole", CARD, rank=4)
    part = write_peft_adapter(tmp_path / "part", CARD, rank=4, targets=["q_proj"])
    ingest(part, CARD, tmp_path / "out")
    assert self_test(read_adapter(whole), CARD, tmp_path / "out") > 0.5


def test_the_self_test_sees_a_damaged_block(tmp_path: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4)
    ingest(source, CARD, tmp_path / "out")
    data = bytearray((tmp_path / "out").read_bytes())
    with (tmp_path / "out").open("rb") as file:
        _, offset, _ = packed_ranges(read_header(file), 1)[0]
    data[offset] ^= 1
    (tmp_path / "out").write_bytes(data)
    with pytest.raises(AdapterFailed, match="layer 1 site qkv block 0"):
        self_test(read_adapter(source), CARD, tmp_path / "out")


def run_worker(source: Path, card: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infinilora.weights.ingest"]
    command += ["--source", str(source), "--card", str(card), "--out", str(out), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def card_file(tmp_path: Path) -> Path:
    path = tmp_path / "card.json"
    path.write_bytes(msgspec.json.encode(CARD))
    return path


def test_the_worker_prints_manifest_and_digest(tmp_path: Path, card_file: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4)
    done = run_worker(source, card_file, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    result = msgspec.json.decode(done.stdout, type=IngestResult)
    assert isinstance(result.manifest, Manifest)
    assert result.digest == manifest_digest(result.manifest)
    with (tmp_path / "out").open("rb") as file:
        assert read_header(file).digest == result.digest


def test_the_worker_prints_why_not(tmp_path: Path, card_file: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", make_card("llama"), rank=4)
    done = run_worker(source, card_file, tmp_path / "out")
    assert (done.returncode, done.stderr) == (3, "")
    error = from_wire(msgspec.convert(json.loads(done.stdout)["error"], WireError))
    assert isinstance(error, AdapterInvalid)
    assert "mlp.down_proj" in error.message
    assert not (tmp_path / "out").exists()


def test_the_worker_obeys_the_rank_limit(tmp_path: Path, card_file: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4)
    done = run_worker(source, card_file, tmp_path / "out", "--max-rank", "2")
    assert done.returncode == 3
    assert "found 4; wanted at most 2" in done.stdout


def test_the_room_does_not_need_torch() -> None:
    code = "import sys, infinilora.weights.ingest, infinilora.weights.synth; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
