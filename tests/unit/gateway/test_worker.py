"""The confined worker: what it takes, and how it ends."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from infinilora.gateway import confine
from infinilora.gateway.ingest import IngestLimits, pack_adapter
from infinilora.protocol.adapter import BaseCard, manifest_digest
from infinilora.protocol.errors import AdapterInvalid, InfiniLoraError, InvalidRequest, TooLarge, Unavailable
from infinilora.weights.ingest import ingest
from infinilora.weights.synth import write_peft_adapter
from support.asked import AskedBase
from support.cards import make_card
from support.tiny_models import make_tiny_model

CARD = make_card("llama")


def adapter(tmp_path: Path) -> Path:
    return write_peft_adapter(tmp_path / "a", CARD, rank=4)


async def test_a_directory_and_its_archive_give_one_digest(tmp_path: Path) -> None:
    source = adapter(tmp_path)
    with tarfile.open(tmp_path / "archive", "w:xz") as archive:
        archive.add(source, arcname="run")
    from_directory, path = await pack_adapter(source, CARD, tmp_path, IngestLimits())
    from_archive, _ = await pack_adapter(tmp_path / "archive", CARD, tmp_path, IngestLimits())
    assert from_directory.digest == from_archive.digest == manifest_digest(ingest(source, CARD, tmp_path / "out"))
    assert path.stat().st_size > from_directory.manifest.data_bytes
    assert from_directory.declared_base == "tiny-llama"


async def test_narrowing_is_part_of_the_digest_and_measured(tmp_path: Path) -> None:
    source = adapter(tmp_path)
    exact, _ = await pack_adapter(source, CARD, tmp_path, IngestLimits())
    narrow, _ = await pack_adapter(source, CARD, tmp_path, IngestLimits(), narrow="bf16")
    assert narrow.digest != exact.digest
    assert exact.narrow_error == 0.0
    assert 1e-4 < narrow.narrow_error < 2**-6
    with pytest.raises(InvalidRequest, match="narrow 'int4': wanted BF16 or F16"):
        await pack_adapter(source, CARD, tmp_path, IngestLimits(), narrow="int4")


async def test_the_operators_limit_of_rank_is_kept_by_the_worker_and_named(tmp_path: Path) -> None:
    source = adapter(tmp_path)
    taken, _ = await pack_adapter(source, CARD, tmp_path, IngestLimits(max_rank=4))
    assert taken.manifest.max_rank == 4
    with pytest.raises(AdapterInvalid, match=r"rank: found 4; wanted at most 3 \(INFINILORA_MAX_RANK\)"):
        await pack_adapter(source, CARD, tmp_path, IngestLimits(max_rank=3))


class Asked:
    """The road to an engine, of one checkpoint. Counts what it was asked."""

    def __init__(self, root: Path) -> None:
        self.base = AskedBase(make_tiny_model("llama", root / "model").directory, root)
        self.num_asked = 0

    async def __call__(self, card: BaseCard, request: Path, answer: Path) -> None:
        self.num_asked += 1
        assert card == self.base.card
        await asyncio.to_thread(self.base.answer, request, answer)


def with_trained_tokens(root: Path, card: BaseCard, tokens: list[int]) -> Path:
    source = write_peft_adapter(root, card, rank=2, config={"trainable_token_indices": tokens})
    tensors = load_file(source / "adapter_model.safetensors")
    key = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    save_file(
        tensors | {key: np.ones((len(tokens), card.hidden_dim), np.float32)}, source / "adapter_model.safetensors"
    )
    return source


async def test_what_depends_on_the_base_is_asked_once_and_is_part_of_the_digest(tmp_path: Path) -> None:
    ask = Asked(tmp_path)
    card = ask.base.card
    source = with_trained_tokens(tmp_path / "a", card, [3, 9])
    with tarfile.open(tmp_path / "archive", "w:xz") as archive:
        archive.add(source, arcname="run")
    digests = set()
    for files in (source, tmp_path / "archive"):
        report, _ = await pack_adapter(files, card, tmp_path, IngestLimits(), ask=ask)
        digests.add(report.digest)
        assert [(row.module, row.rank) for row in report.plan if row.site == "embed"] == [("model.embed_tokens", 2)]
    assert digests == {ask.base.ingest(source, tmp_path / "out").digest}
    assert ask.num_asked == 2


async def test_where_nobody_can_be_asked_it_is_unavailable_and_nothing_is_packed(tmp_path: Path) -> None:
    card = Asked(tmp_path).base.card
    with pytest.raises(Unavailable, match=r"facts of base model"):
        await pack_adapter(with_trained_tokens(tmp_path / "a", card, [3]), card, tmp_path, IngestLimits())
    assert not (tmp_path / "packed.safetensors").exists()


async def test_files_that_change_between_question_and_answer_are_named_as_such(tmp_path: Path) -> None:
    ask = Asked(tmp_path)
    card = ask.base.card
    source = with_trained_tokens(tmp_path / "a", card, [3, 9])

    async def change(card: BaseCard, request: Path, answer: Path) -> None:
        await ask(card, request, answer)
        with_trained_tokens(source, card, [3, 10])

    with pytest.raises(Unavailable, match="changed while they were read"):
        await pack_adapter(source, card, tmp_path, IngestLimits(), ask=change)
    assert not (tmp_path / "packed.safetensors").exists()


async def test_an_answer_that_is_damaged_is_no_fault_of_the_adapter(tmp_path: Path) -> None:
    ask = Asked(tmp_path)
    card = ask.base.card

    async def cut(card: BaseCard, request: Path, answer: Path) -> None:
        await ask(card, request, answer)
        await asyncio.to_thread(os.truncate, answer, 400)

    with pytest.raises(InfiniLoraError, match="facts") as raised:
        await pack_adapter(with_trained_tokens(tmp_path / "a", card, [3]), card, tmp_path, IngestLimits(), ask=cut)
    assert raised.value.code == "internal"


async def test_an_archive_is_held_against_the_limit_in_the_worker(tmp_path: Path) -> None:
    source = adapter(tmp_path)
    with tarfile.open(tmp_path / "archive", "w:gz") as archive:
        archive.add(source, arcname="run")
        info = tarfile.TarInfo("run/optimizer.pt")
        info.size = 50 << 20
        archive.addfile(info, io.BytesIO(bytes(info.size)))
    with pytest.raises(TooLarge, match="more than 1048576 bytes"):
        await pack_adapter(tmp_path / "archive", CARD, tmp_path, IngestLimits(max_bytes=1 << 20))


async def test_a_worker_that_needs_more_memory_than_it_may_have_is_refused(tmp_path: Path) -> None:
    """A header that is as long as one may be, and takes several times as much once it is read."""
    source = adapter(tmp_path)
    words = " ".join(f'"{number}":1,' for number in range(5_000_000))
    header = f'{{"__metadata__":{{{words}"":1}}}}'.encode()
    (source / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(AdapterInvalid, match=r"128 MB and 600 s .*INFINILORA_INGEST_MEMORY_MB"):
        await pack_adapter(source, CARD, tmp_path, IngestLimits(memory_mb=128))


async def test_files_that_are_larger_than_a_workers_memory_are_read(tmp_path: Path) -> None:
    source, num_bytes = adapter(tmp_path), 2 << 30
    table = {"x": {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}}
    header = json.dumps(table).encode()
    with (source / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)  # a hole: it costs no disk
    with pytest.raises(AdapterInvalid, match=r"tensor x: found no LoRA weight"):
        await pack_adapter(source, CARD, tmp_path, IngestLimits(memory_mb=1024))


CUT_UNDER_THE_READER = """
import mmap, sys
from pathlib import Path
file = open(sys.argv[1], "r+b")
pages = mmap.mmap(file.fileno(), 0)
file.truncate(0)
pages[100000]
"""


async def test_a_file_that_is_cut_while_it_is_mapped_is_not_a_fault_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "big").write_bytes(bytes(1 << 20))
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{CUT_UNDER_THE_READER}' {tmp_path}/big\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(Unavailable, match="changed while they were read"):
        await pack_adapter(adapter(tmp_path), CARD, tmp_path, IngestLimits())


PARENT = """
import os, signal, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-IS", sys.argv[1], str(os.getpid()), "512", "60", "64", sys.executable, "-c",
     "import signal; print('up', flush=True); signal.pause()"],
)
print(child.pid, flush=True)
signal.pause()
"""


def test_the_worker_dies_with_its_gateway(tmp_path: Path) -> None:
    """It waits for a signal that nobody sends: only the kernel can end it."""
    read, write = os.pipe()
    with subprocess.Popen([sys.executable, "-c", PARENT, confine.__file__], stdout=write) as parent:
        os.close(write)
        with os.fdopen(read) as said:
            assert {said.readline().strip() for _ in range(2)} > {"up"}
            parent.send_signal(signal.SIGKILL)
            assert said.read() == ""  # the end of the pipe: nobody holds its other end any more


def test_a_worker_whose_gateway_is_gone_does_not_begin() -> None:
    command = [sys.executable, "-IS", confine.__file__, "1", "512", "60", "64", sys.executable, "-c", "print('began')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, "")
