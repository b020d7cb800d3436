"""Uploaded files: what is written, and what hostile archives do not get to do."""

import io
import os
import random
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from infinilora.gateway.__main__ import use_scratch
from infinilora.gateway.uploads import Upload, UploadLimits, adapter_directory, store_uploads
from infinilora.protocol.errors import InvalidRequest, TooLarge

LIMITS = UploadLimits(max_bytes=10_000, max_files=5)
Change = Callable[[tarfile.TarInfo], None]


def tar_of(*members: tuple[str, bytes], change: Change = lambda _: None) -> Upload:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            change(info)
            archive.addfile(info, io.BytesIO(data))
    return Upload("a.tar.gz", io.BytesIO(buffer.getvalue()))


def zip_of(*members: tuple[str, bytes]) -> Upload:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return Upload("a.zip", io.BytesIO(buffer.getvalue()))


def file_of(name: str, data: bytes = b"x") -> Upload:
    return Upload(name, io.BytesIO(data))


def written(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_files_are_written_under_their_names(tmp_path: Path) -> None:
    store_uploads([file_of("adapter_config.json", b"{}"), file_of("adapter_model.safetensors")], tmp_path, LIMITS)
    assert written(tmp_path) == {"adapter_config.json", "adapter_model.safetensors"}
    assert (tmp_path / "adapter_config.json").read_bytes() == b"{}"


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_an_archive_is_unpacked_and_its_single_directory_found(tmp_path: Path, pack: Callable[..., Upload]) -> None:
    store_uploads([pack(("./a/adapter_config.json", b"{}"), ("a/x.safetensors", b"x"))], tmp_path, LIMITS)
    assert adapter_directory(tmp_path) == tmp_path / "a"
    assert written(tmp_path) == {"a/adapter_config.json", "a/x.safetensors"}


@pytest.mark.parametrize(
    "name", ["../x", "/abs", "a/../../x", "a\\..\\b", "a\0b", "", ".hidden", "x" * 300, "a/b/c/d/e"]
)
@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str, pack: Callable[..., Upload]) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    with pytest.raises(InvalidRequest):
        store_uploads([file_of(name), file_of("b")], inside, LIMITS)
    if "\0" not in name and name:
        with pytest.raises(InvalidRequest):
            store_uploads([pack((name, b"x"))], inside, LIMITS)
    assert written(tmp_path) == set()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    def change(info: tarfile.TarInfo) -> None:
        info.type, info.linkname, info.size = kind, "/etc/passwd", 0

    with pytest.raises(InvalidRequest, match="wanted plain files"):
        store_uploads([tar_of(("adapter_config.json", b""), change=change)], tmp_path, LIMITS)


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo("adapter_config.json")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(InvalidRequest, match="is a link"):
        store_uploads([Upload("a.zip", io.BytesIO(buffer.getvalue()))], tmp_path, LIMITS)


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_a_bomb_stops_at_the_limit(tmp_path: Path, pack: Callable[..., Upload]) -> None:
    with pytest.raises(TooLarge):
        store_uploads([pack(("x.safetensors", b"\0" * 5_000_000))], tmp_path, LIMITS)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) <= LIMITS.max_bytes


def test_too_many_files_and_twins_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TooLarge):
        store_uploads([tar_of(*((f"f{i}", b"x") for i in range(9)))], tmp_path, LIMITS)
    with pytest.raises(InvalidRequest, match="comes twice"):
        store_uploads([file_of("a.json"), file_of("a.json")], tmp_path / "b", LIMITS)


def test_a_broken_archive_is_the_clients_fault(tmp_path: Path) -> None:
    whole = zip_of(("x.json", b"y" * 500)).data.read()
    for data in (whole[:40] + b"\xff" * 20 + whole[60:],):
        with pytest.raises(InvalidRequest, match="cannot be read"):
            store_uploads([Upload("a.zip", io.BytesIO(data))], tmp_path, LIMITS)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("seed", range(8))
def test_an_archive_with_a_broken_middle_is_the_clients_fault(tmp_path: Path, method: int, seed: int) -> None:
    dice, buffer = random.Random(seed), io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("a.bin", dice.randbytes(3000))
    data = bytearray(buffer.getvalue())
    for _ in range(50):
        data[dice.randrange(100, 2500)] ^= 1 + dice.randrange(255)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        store_uploads([Upload("a.zip", io.BytesIO(bytes(data)))], tmp_path, LIMITS)


def test_uploads_wait_in_the_scratch_directory_and_not_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    scratch = tmp_path / "gateway" / "g0"
    (scratch / "ingest-left-over").mkdir(parents=True)
    use_scratch(scratch)
    with tempfile.SpooledTemporaryFile(max_size=1) as upload:
        upload.write(b"more than one byte")
        assert os.fstat(upload.fileno()).st_dev == scratch.stat().st_dev
        assert tempfile.gettempdir() == str(scratch)
    assert list(scratch.iterdir()) == []
    (tmp_path / "file").touch()
    use_scratch(tmp_path / "file" / "below")
    assert tempfile.gettempdir() == str(scratch)


def test_an_empty_upload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no file"):
        store_uploads([], tmp_path, LIMITS)
