"""Archives: what is taken out of them, and what hostile ones do not get to do."""

import gzip
import io
import json
import random
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typing_extensions import override

from infinilora.protocol.errors import AdapterInvalid, InvalidRequest, SourceNotFound, TooLarge
from infinilora.weights.tensorfile import open_tensors
from infinilora.weights.unpack import FileLimits, unpack_file

LIMITS = FileLimits(max_bytes=10_000, max_entries=8)


def tensor_file(num_bytes: int) -> bytes:
    """A safetensors file of one tensor."""
    header = json.dumps({"x": {"dtype": "F16", "shape": [num_bytes // 2], "data_offsets": [0, num_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


GOOD = (("adapter_config.json", b"{}"), ("adapter_model.safetensors", tensor_file(300)))
Members = tuple[tuple[str, bytes], ...]
Pack = Callable[..., io.BytesIO]


def tar_of(
    *members: tuple[str, bytes], mode: str = "w:gz", change: Callable[[tarfile.TarInfo], None] | None = None
) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if change:
                change(info)
            archive.addfile(info, io.BytesIO(data))
    buffer.seek(0)
    return buffer


def zip_of(*members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> io.BytesIO:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    buffer.seek(0)
    return buffer


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(
    "archive",
    [*(tar_of(*GOOD, mode=f"w:{kind}") for kind in ("", "gz", "bz2", "xz")), zip_of(*GOOD), zip_of(*GOOD, method=0)],
    ids=["tar", "tar.gz", "tar.bz2", "tar.xz", "zip", "zip stored"],
)
def test_every_kind_of_archive_is_told_by_its_content(tmp_path: Path, archive: io.BytesIO) -> None:
    assert content(unpack_file(archive, tmp_path, LIMITS)) == dict(GOOD)


@pytest.mark.parametrize("harm", [lambda data: data[:-6] + b"flip" + data[-2:], lambda data: data[:-6]])
def test_a_checksum_at_the_end_of_an_archive_is_looked_at(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    """Of gzip: what flipped before it may well be unpacked without a complaint."""
    with pytest.raises(InvalidRequest, match=r"cannot be read: (CRC check failed|.*end-of-stream)"):
        unpack_file(io.BytesIO(harm(tar_of(*GOOD).getvalue())), tmp_path, LIMITS)


SIDE_FILES = (
    ("run/checkpoint-5/adapter_config.json", b'{"of": "a checkpoint"}'),
    ("run/checkpoint-5/optimizer.pt", b"o" * 2000),
    ("run/.gitattributes", b"*"),
    ("run/._adapter_config.json", b"resource fork"),
    ("run/.cache/huggingface/download/x.lock", b""),
    ("run/ünï 适配器.md", b"a name that nobody needs"),
)


def test_a_directory_may_be_packed_from_within(tmp_path: Path) -> None:
    """As `tar -C DIR .` does it."""
    for name, data in GOOD:
        (tmp_path / name).write_bytes(data)
    buffer, target = io.BytesIO(), tmp_path / "out"
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(tmp_path, arcname=".")
    target.mkdir()
    assert content(unpack_file(buffer, target, LIMITS)) == dict(GOOD)


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_only_what_is_needed_is_taken_from_the_topmost_directory(tmp_path: Path, pack: Pack) -> None:
    members = (*SIDE_FILES, *((f"run/{name}", data) for name, data in GOOD))
    assert content(unpack_file(pack(*members), tmp_path, LIMITS)) == dict(GOOD)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}


def test_two_adapters_side_by_side_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"holds 2 adapters \(a, b\)"):
        unpack_file(tar_of(("a/adapter_config.json", b"{}"), ("b/adapter_config.json", b"{}")), tmp_path, LIMITS)


def test_an_archive_without_a_config_holds_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match=r"adapter_config\.json: found none among 1 files"):
        unpack_file(zip_of(("README.md", b"x")), tmp_path, LIMITS)


def test_of_a_pickle_only_the_name_is_kept(tmp_path: Path) -> None:
    found = content(unpack_file(zip_of(GOOD[0], ("adapter_model.bin", b"\x80\x04")), tmp_path, LIMITS))
    assert found == {"adapter_config.json": b"{}", "adapter_model.bin": b""}


@pytest.mark.parametrize("name", ["../adapter_config.json", "/adapter_config.json", "a/../../adapter_config.json",
                                  "..", "a\\..\\adapter_config.json", "/".join("a" * 20)])  # fmt: skip
@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, pack: Pack, name: str) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(InvalidRequest, match="is not allowed"):
        unpack_file(pack((name, b"x")), tmp_path / "in", LIMITS)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    def change(info: tarfile.TarInfo) -> None:
        info.type, info.linkname, info.size = kind, "/etc/passwd", 0

    with pytest.raises(InvalidRequest, match="wanted plain files"):
        unpack_file(tar_of(("adapter_config.json", b""), change=change), tmp_path, LIMITS)


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo("adapter_config.json")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    buffer.seek(0)
    with pytest.raises(InvalidRequest, match="is a link"):
        unpack_file(buffer, tmp_path, LIMITS)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_a_bomb_is_not_inflated_whether_it_is_wanted_or_not(tmp_path: Path, pack: Pack, name: str) -> None:
    with pytest.raises(TooLarge, match="more than 10000 bytes"):
        unpack_file(pack((name, b"\0" * 5_000_000)), tmp_path, LIMITS)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= LIMITS.max_bytes


def test_a_zip_entry_that_holds_more_than_it_says_is_refused(tmp_path: Path) -> None:
    data = zip_of(("adapter_config.json", b"\0" * 5_000_000)).getvalue()
    lying = data.replace(struct.pack("<L", 5_000_000), struct.pack("<L", 100))
    assert lying != data
    with pytest.raises(InvalidRequest):
        unpack_file(io.BytesIO(lying), tmp_path, LIMITS)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 100


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_methods_that_inflate_without_bound_are_refused(tmp_path: Path, method: int) -> None:
    with pytest.raises(InvalidRequest, match="is a file compressed by method"):
        unpack_file(zip_of(*GOOD, method=method), tmp_path, LIMITS)


def test_a_tars_own_header_cannot_take_memory(tmp_path: Path) -> None:
    """A pax header of 500 MB, a few hundred KB when compressed: the library would read it in one piece."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 500 << 20
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz", compresslevel=1) as archive:
        archive.fileobj.write(info.tobuf())
        for _ in range(64):
            archive.fileobj.write(bytes(1 << 20))
    raw.seek(0)
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match="a table of more than"):
        unpack_file(raw, tmp_path, LIMITS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_zips_own_directory_cannot_take_memory(tmp_path: Path) -> None:
    archive = zip_of(*((f"{number:0100}", b"") for number in range(12_000)))
    with pytest.raises(InvalidRequest, match="a table of more than"):
        unpack_file(archive, tmp_path, LIMITS)


def test_a_tar_that_leads_backwards_ends(tmp_path: Path) -> None:
    """A negative size in base 256 would send the reader round for ever."""
    info = tarfile.TarInfo("adapter_config.json")
    block = bytearray(info.tobuf())
    block[124:136] = b"\xff" * 10 + (65536 - 1024).to_bytes(2, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        unpack_file(io.BytesIO(bytes(block) + bytes(2048)), tmp_path, LIMITS)


def test_too_many_files_and_twins_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TooLarge, match="more than 8 files"):
        unpack_file(tar_of(*((f"f{i}", b"x") for i in range(9))), tmp_path, LIMITS)
    directories = tar_of(
        *((f"d{i}", b"") for i in range(9)), change=lambda info: setattr(info, "type", tarfile.DIRTYPE)
    )
    with pytest.raises(TooLarge, match="more than 8 files"):
        unpack_file(directories, tmp_path, LIMITS)
    with pytest.raises(InvalidRequest, match="comes twice"):
        unpack_file(tar_of(GOOD[0], GOOD[0]), tmp_path, LIMITS)


def test_what_is_no_archive_is_said_to_be_none(tmp_path: Path) -> None:
    for data in (b"", b"<html>", b"x" * 1000):
        with pytest.raises(InvalidRequest, match="is no archive; wanted zip, tar"):
            unpack_file(io.BytesIO(data), tmp_path, LIMITS)


@pytest.mark.parametrize("pack", [tar_of, zip_of])
@pytest.mark.parametrize("seed", range(8))
def test_an_archive_with_a_broken_middle_is_the_senders_fault(tmp_path: Path, pack: Pack, seed: int) -> None:
    dice = random.Random(seed)
    data = bytearray(pack((GOOD[1][0], dice.randbytes(3000))).getvalue())
    for _ in range(50):
        data[dice.randrange(100, 2500)] ^= 1 + dice.randrange(255)
    with pytest.raises((InvalidRequest, SourceNotFound)):
        unpack_file(io.BytesIO(bytes(data)), tmp_path, LIMITS)


@pytest.mark.parametrize("magic", [b"BZh", b"BZh9" + b"x" * 600, b"\x1f\x8b", b"\xfd7zXZ\0" + b"x" * 600])
def test_a_broken_stream_is_the_senders_fault(tmp_path: Path, magic: bytes) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        unpack_file(io.BytesIO(magic), tmp_path, LIMITS)


def test_a_zip_entry_without_a_name_is_refused(tmp_path: Path) -> None:
    packed = zip_of(*GOOD, ("?", b"x")).getvalue().replace(b"?", b"\0")
    with pytest.raises(InvalidRequest, match="file name ''"):
        unpack_file(io.BytesIO(packed), tmp_path, LIMITS)


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_a_cut_archive_is_the_senders_fault(tmp_path: Path, pack: Pack, keep: float) -> None:
    data = pack((GOOD[1][0], random.Random(0).randbytes(3000)), GOOD[0]).getvalue()
    with pytest.raises((InvalidRequest, SourceNotFound)):
        unpack_file(io.BytesIO(data[: int(len(data) * keep)]), tmp_path, LIMITS)


class Member(NamedTuple):
    """A file of an archive: what it begins with, and its size; the rest is zeros."""

    name: str
    num_bytes: int
    head: bytes = b""

    def pieces(self) -> Iterator[bytes]:
        yield self.head
        left = self.num_bytes - len(self.head)
        for start in range(0, left, 1 << 20):
            yield bytes(min(1 << 20, left - start))


def long_tar(*members: Member) -> io.BytesIO:
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1) as out:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.size = member.num_bytes
            out.write(info.tobuf())
            out.writelines(member.pieces())
            out.write(bytes(-member.num_bytes % 512))
        out.write(bytes(1024))
    return raw


def long_zip(*members: Member) -> io.BytesIO:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for member in members:
            with archive.open(member.name, "w") as out:
                out.writelines(member.pieces())
    return raw


def bytes_on_disk(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


NESTED = [Member(f"{'d/' * depth}adapter_model.safetensors", 20 << 20, tensor_file(2)) for depth in range(10)]


@pytest.mark.parametrize("pack", [long_tar, long_zip])
@pytest.mark.parametrize(
    "members", [[Member("adapter_model.safetensors", 200 << 20)], [Member("optimizer.pt", 200 << 20)], NESTED],
    ids=["wanted", "not wanted", "nested"],
)  # fmt: skip
def test_an_archive_may_not_hold_a_hundred_times_its_own_bytes(
    tmp_path: Path, pack: Callable[..., io.BytesIO], members: list[Member]
) -> None:
    archive = pack(*members)
    assert archive.seek(0, io.SEEK_END) < 2 << 20
    with pytest.raises(TooLarge, match=r"more than \d+ bytes, 100 times what the archive is"):
        unpack_file(archive, tmp_path, FileLimits())
    assert bytes_on_disk(tmp_path) < 1 << 20


@pytest.mark.parametrize("pack", [long_tar, long_zip])
@pytest.mark.parametrize(
    "head",
    [
        b"",
        (20 << 20).to_bytes(8, "little"),
        (1 << 60).to_bytes(8, "little"),
        tensor_file(2),
        b"version https://git-lfs",
    ],
    ids=["no header", "a header as long as the file", "a longer one", "another size", "a pointer"],
)
def test_no_more_of_a_weight_file_is_written_than_shows_that_it_is_none(
    tmp_path: Path, pack: Callable[..., io.BytesIO], head: bytes
) -> None:
    weights = Member("adapter_model.safetensors", 20 << 20, head)
    chosen = unpack_file(pack(weights, Member("adapter_config.json", 2, b"{}")), tmp_path, FileLimits())
    assert bytes_on_disk(tmp_path) < 1 << 20
    assert (chosen / weights.name).stat().st_size == weights.num_bytes
    with pytest.raises(AdapterInvalid, match=r"adapter_model\.safetensors"):
        open_tensors(chosen / weights.name)


@pytest.mark.parametrize("pack", [long_tar, long_zip])
def test_a_b_that_is_all_zero_is_no_bomb(tmp_path: Path, pack: Callable[..., io.BytesIO]) -> None:
    whole = tensor_file(40 << 20)
    weights = Member("adapter_model.safetensors", len(whole), whole[: -(40 << 20)])
    chosen = unpack_file(pack(weights, Member("adapter_config.json", 2, b"{}")), tmp_path, FileLimits())
    assert (chosen / weights.name).read_bytes() == whole


def test_entries_of_a_zip_that_lie_over_one_another_are_counted_each(tmp_path: Path) -> None:
    """One compressed run of zeros, to which a whole directory of entries points."""
    raw = long_zip(Member("0", 20 << 20)).getvalue()
    start = raw.index(b"PK\x01\x02")
    end = raw.index(b"PK\x05\x06")
    entry = raw[start:end]
    entries = b"".join(entry[:-1] + bytes([48 + number]) for number in range(10))
    tail = bytearray(raw[end:])
    struct.pack_into("<HHL", tail, 8, 10, 10, len(entries))
    with pytest.raises((TooLarge, InvalidRequest)):
        unpack_file(io.BytesIO(raw[:start] + entries + bytes(tail)), tmp_path, FileLimits())
    assert bytes_on_disk(tmp_path) == 0


def test_headers_without_end_are_read_no_further_than_files_may_be(tmp_path: Path) -> None:
    """Global pax headers, one after another: no entry ever comes, and nothing is spent."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XGLTYPE, 512 << 10
    header = info.tobuf() + b"524288 a=" + b"x" * (info.size - 10) + b"\n"

    class Endless(io.BytesIO):
        """So much of it as is asked for."""

        num_bytes = 0

        @override
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            self.num_bytes += len(data)
            return data

    archive = Endless(header * 60)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        unpack_file(archive, tmp_path, LIMITS)
    assert archive.num_bytes < 20 << 20
