"""Ingest as a whole: what it leaves behind, what it warns of, and as a process of its own."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import msgspec
import numpy as np
import pytest

from infinilora.protocol.adapter import Manifest, encode_manifest, manifest_digest
from infinilora.protocol.errors import AdapterInvalid, StoreFull, Unavailable, WireError, from_wire
from infinilora.protocol.ingest import IngestReport
from infinilora.weights.config import CONFIG_FILE
from infinilora.weights.ingest import ingest, run
from infinilora.weights.packed import read_header
from infinilora.weights.peft import TENSORS_FILE, PeftAdapter, read_adapter
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


def test_the_report_says_module_by_module_what_was_packed(tmp_path: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4, targets=["q_proj", "down_proj"], dtype="BF16")
    report = run(source, CARD, tmp_path / "out", narrow=None, max_rank=64)
    rows = {(row.layer, row.site, row.module): row for row in report.plan}
    assert rows[1, "qkv", "model.layers.1.self_attn.q_proj"].num_bytes == 4 * (32 + 32) * 2
    down = rows[0, "moe_down", "model.layers.0.mlp.experts.{expert}.down_proj"]
    assert (down.rank, down.scale, down.experts, down.num_bytes) == (4, 2.0, 4, 4 * 4 * (24 + 32) * 2)
    assert {row.verdict for row in report.plan} == {"packed"}
    assert (report.num_pairs, report.warnings, report.narrow_error) == (2 * (1 + 4 + 1), (), 0.0)
    assert report.self_test_error < 1e-12


def test_targets_without_tensors_are_a_warning(tmp_path: Path) -> None:
    config = {"target_modules": ["q_proj", "o_proj"]}
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4, targets=["q_proj"], config=config)
    (warning,) = run(source, CARD, tmp_path / "out", narrow=None, max_rank=64).warnings
    assert warning.text.startswith("2 targeted modules have no tensors")
    assert "model.layers.0.self_attn.o_proj" in warning.text


def test_a_file_of_mixed_dtypes_is_widened(tmp_path: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4, targets=["q_proj"], dtype="BF16")
    file = open_tensors(source / TENSORS_FILE)
    tensors = {name: np.array(file.read(name)) for name in file.tensors}
    first = min(tensors)
    tensors[first] = tensors[first].astype(np.float32)
    write_tensors(source / TENSORS_FILE, tensors)
    report = run(source, CARD, tmp_path / "out", narrow=None, max_rank=64)
    assert (report.manifest.dtype, report.manifest.narrowed_from) == ("F32", "")
    assert "mixes" in report.warnings[0].text


@pytest.mark.parametrize(("config", "std"), [({"lora_alpha": 3e38}, 0.02), ({}, 1e15)])
def test_finite_weights_whose_delta_overflows_are_refused(tmp_path: Path, config: dict[str, float], std: float) -> None:
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4, targets=["q_proj"], config=config, std=std)
    with pytest.raises(AdapterInvalid, match=r"layers\.\d\.self_attn\.q_proj: found .* delta of \d.*at most 1e\+18"):
        ingest(source, CARD, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """JSON's readers take either; which one was meant nobody knows."""
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4, targets=["q_proj"], dtype="F16")
    config, weights = source / CONFIG_FILE, source / TENSORS_FILE
    text, data = config.read_text(), weights.read_bytes()
    config.write_text('{"lora_alpha": 99,' + text.lstrip()[1:])
    with pytest.raises(AdapterInvalid, match=r"adapter_config\.json: JSON: found 'lora_alpha' twice"):
        ingest(source, CARD, tmp_path / "out")
    config.write_text(text)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    name, entry = next((name, entry) for name, entry in header.items() if name != "__metadata__")
    twice = json.dumps({name: entry | {"dtype": "BF16"}})[:-1].encode() + b"," + data[8:end].lstrip()[1:]
    weights.write_bytes(len(twice).to_bytes(8, "little") + twice + data[end:])
    with pytest.raises(AdapterInvalid, match=rf"adapter_model\.safetensors: JSON: found '{re.escape(name)}' twice"):
        ingest(source, CARD, tmp_path / "out")


def test_the_words_of_a_warning_are_no_part_of_the_digest(tmp_path: Path) -> None:
    config = {"target_modules": ["q_proj", "o_proj"]}
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4, targets=["q_proj"], config=config)
    report = run(source, CARD, tmp_path / "out", narrow=None, max_rank=64)
    assert report.warnings
    with (tmp_path / "out").open("rb") as file:
        assert read_header(file).manifest == report.manifest
    assert "tensors" not in encode_manifest(report.manifest).decode()


def test_a_source_that_changes_while_it_is_read_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4)

    def read_and_touch(directory: Path) -> PeftAdapter:
        adapter = read_adapter(directory)
        os.utime(directory / TENSORS_FILE, ns=(1, 1))
        return adapter

    monkeypatch.setattr("infinilora.weights.ingest.read_adapter", read_and_touch)
    with pytest.raises(Unavailable, match="changed while they were read"):
        ingest(source, CARD, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


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
    result = msgspec.json.decode(done.stdout, type=IngestReport)
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


def test_the_worker_reads_an_archive(tmp_path: Path, card_file: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4)
    (tmp_path / "work").mkdir()
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        archive.add(source, arcname="run1")
        info = tarfile.TarInfo("run1/optimizer.pt")
        info.size = 100
        archive.addfile(info, io.BytesIO(b"x" * 100))
    done = run_worker(tmp_path / "a.tgz", card_file, tmp_path / "work" / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert msgspec.json.decode(done.stdout, type=IngestReport).digest == manifest_digest(
        ingest(source, CARD, tmp_path / "out")
    )
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"out", "out.reference"}
    done = run_worker(tmp_path / "a.tgz", card_file, tmp_path / "work" / "out2", "--max-bytes", "50")
    assert "request_too_large" in done.stdout


def test_a_source_that_is_not_there_is_not_found(tmp_path: Path, card_file: Path) -> None:
    done = run_worker(tmp_path / "nothing", card_file, tmp_path / "out")
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (3, "source_not_found")


def test_a_full_disk_is_not_the_adapters_fault(tmp_path: Path, card_file: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4)
    (tmp_path / "out.part").symlink_to("/dev/full")
    done = run_worker(source, card_file, tmp_path / "out")
    error = from_wire(msgspec.convert(json.loads(done.stdout)["error"], WireError))
    assert isinstance(error, StoreFull)
    assert "no room on disk" in error.message


def test_the_room_does_not_need_torch() -> None:
    code = "import sys, infinilora.weights.ingest, infinilora.weights.synth; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
