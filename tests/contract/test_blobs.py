"""What every blob store promises, on a directory and on a real S3 server."""

import threading
from pathlib import Path
from uuid import uuid4

import pytest

from infinilora.protocol.errors import InvalidRequest, Unavailable
from infinilora.runtime.blobs import BlobStore, open_blobs
from support.procs import WeedServer


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.integration)])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "directory":
        return open_blobs(f"file://{tmp_path}/store")
    server: WeedServer = request.getfixturevalue("s3_server")
    bucket = f"test-{uuid4().hex[:12]}"
    return open_blobs(server.url(bucket), access_key=server.access_key, secret_key=server.secret_key)


def test_what_was_put_is_what_is_got(blobs: BlobStore) -> None:
    data = bytes(range(256)) * 100
    assert blobs.put("a/b/c.bin", data)
    assert blobs.get("a/b/c.bin") == data


def test_an_empty_object_is_an_object(blobs: BlobStore) -> None:
    blobs.put("empty", b"")
    stat = blobs.stat("empty")
    assert blobs.get("empty") == b""
    assert stat is not None
    assert stat.size == 0


def test_a_range_is_its_bytes_and_short_only_at_the_end(blobs: BlobStore) -> None:
    blobs.put("r", bytes(range(100)))
    assert blobs.get_range("r", 0, 10) == bytes(range(10))
    assert blobs.get_range("r", 90, 10) == bytes(range(90, 100))
    assert blobs.get_range("r", 95, 10) == bytes(range(95, 100))
    assert blobs.get_range("r", 100, 10) == b""
    assert blobs.get_range("r", 5, 0) == b""


def test_put_replaces_and_the_etag_tells(blobs: BlobStore) -> None:
    blobs.put("x", b"one")
    before = blobs.stat("x")
    blobs.put("x", b"two")
    assert blobs.get("x") == b"two"
    assert blobs.stat("x") != before


def test_put_if_absent_leaves_what_was_there(blobs: BlobStore) -> None:
    assert blobs.put("x", b"one", if_absent=True)
    assert not blobs.put("x", b"two", if_absent=True)
    assert blobs.get("x") == b"one"


def test_a_large_file_goes_up_in_parts_and_comes_back_whole(blobs: BlobStore, tmp_path: Path) -> None:
    source = tmp_path / "large"
    data = b"0123456789abcdef" * (20 << 16)  # 20 MiB: more than one part
    source.write_bytes(data)
    assert blobs.put_file("large", source)
    stat = blobs.stat("large")
    assert stat is not None
    assert stat.size == len(data)
    assert blobs.get_range("large", (16 << 20) - 8, 16) == b"89abcdef01234567"
    assert blobs.get("large") == data


def test_what_is_not_there_is_said_so(blobs: BlobStore) -> None:
    assert blobs.stat("nothing") is None
    with pytest.raises(FileNotFoundError, match="nothing"):
        blobs.get("nothing")
    with pytest.raises(FileNotFoundError, match="nothing"):
        blobs.get_range("nothing", 0, 1)
    blobs.delete("nothing")
    assert blobs.list() == []


def test_list_gives_the_names_under_a_prefix_in_order(blobs: BlobStore) -> None:
    for name in ("bases/2/card", "bases/1/card", "adapters/1", "bases/1/files/a"):
        blobs.put(name, b"x")
    assert blobs.list("bases/") == ["bases/1/card", "bases/1/files/a", "bases/2/card"]
    assert blobs.list("bases/1") == ["bases/1/card", "bases/1/files/a"]
    assert len(blobs.list()) == 4


def test_deleted_is_gone(blobs: BlobStore) -> None:
    blobs.put("x", b"one")
    blobs.delete("x")
    assert blobs.stat("x") is None
    assert blobs.list() == []


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "a/..", "a/", ".tmp/x", "a\0b", "a\nb", "é" * 600]
)
def test_a_name_that_could_lead_elsewhere_is_refused(blobs: BlobStore, name: str) -> None:
    with pytest.raises(InvalidRequest, match="not allowed"):
        blobs.put(name, b"x")
    with pytest.raises(InvalidRequest, match="not allowed"):
        blobs.get(name)


def test_a_reader_sees_old_or_new_and_never_a_mixture(blobs: BlobStore) -> None:
    old, new = b"o" * 300_000, b"n" * 300_000
    blobs.put("x", old)
    writer = threading.Thread(target=lambda: [blobs.put("x", new if i % 2 else old) for i in range(6)])
    writer.start()
    seen = set()
    while writer.is_alive():
        seen.add(blobs.get("x"))
    writer.join()
    assert seen <= {old, new}


def test_a_link_planted_in_the_directory_is_not_followed_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s")
    blobs = open_blobs(f"file://{tmp_path}/store")
    blobs.put("a", b"x")
    (tmp_path / "store" / "out").symlink_to(tmp_path)
    with pytest.raises(InvalidRequest, match="out of the store"):
        blobs.get("out/secret")


def test_nobody_at_the_endpoint_is_unavailable() -> None:
    blobs = open_blobs("s3://bucket?endpoint=http://127.0.0.1:9", access_key="a", secret_key="b" * 8)
    with pytest.raises(Unavailable, match="does not answer"):
        blobs.get("x")


@pytest.mark.integration
def test_wrong_keys_are_unavailable_and_named(s3_server: WeedServer) -> None:
    blobs = open_blobs(s3_server.url("mine"), access_key=s3_server.access_key, secret_key="wrong" * 4)
    with pytest.raises(Unavailable, match=r"SignatureDoesNotMatch|AccessDenied|InvalidAccessKeyId"):
        blobs.put("x", b"1")


@pytest.mark.parametrize("url", ["", "s3://", "http://x", "file://host/x", "s3://b?endpoint=ftp://x"])
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="wanted"):
        open_blobs(url)
