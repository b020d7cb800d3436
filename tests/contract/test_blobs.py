"""What every blob store promises, on a directory and on a real S3 server."""

import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest

from infinilora.protocol.errors import InvalidRequest, StoreFull, StoreRefused, Unavailable
from infinilora.runtime import directory_blobs
from infinilora.runtime.blob_store import SCRATCH
from infinilora.runtime.blobs import BlobStore, Changed, DirectoryBlobs, open_blobs
from infinilora.runtime.credentials import Credentials
from infinilora.runtime.s3_blobs import S3Blobs, S3Place
from infinilora.runtime.watched_blobs import WatchedBlobs
from support.procs import WeedServer, wait_until


@pytest.fixture(params=["directory", "watched", pytest.param("s3", marks=pytest.mark.integration)])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "directory":
        return open_blobs(f"file://{tmp_path}/store")
    if request.param == "watched":
        return WatchedBlobs(open_blobs(f"file://{tmp_path}/store"))
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


@pytest.mark.parametrize(("offset", "found"), [(0, 10), (90, 10), (95, 5), (100, 0)])
def test_a_range_comes_into_memory_that_is_there_and_nowhere_else(blobs: BlobStore, offset: int, found: int) -> None:
    blobs.put("r", bytes(range(100)))
    memory = bytearray(b"\xff" * 12)
    assert blobs.read_into("r", offset, memoryview(memory)[1:11]) == found
    assert memory == b"\xff" + bytes(range(offset, offset + found)) + b"\xff" * (11 - found)


def test_a_range_of_nothing_comes_into_no_memory(blobs: BlobStore) -> None:
    with pytest.raises(FileNotFoundError):
        blobs.read_into("nothing", 0, memoryview(bytearray(4)))


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


def test_a_deletion_is_done_in_time_or_not_at_all(blobs: BlobStore) -> None:
    for name in ("soon", "late", "kept"):
        blobs.put(name, b"x")
    for name in ("soon", "nothing"):
        deletion = blobs.deletion(name, within_s=60)
        deletion()
        deletion()
    late, until = blobs.deletion("late", within_s=1), time.monotonic() + 1
    wait_until(lambda: time.monotonic() > until, "its time is over")
    with pytest.raises(Unavailable, match="too late"):
        late()
    assert blobs.list() == ["kept", "late"]


@pytest.mark.integration
def test_a_deletion_that_is_held_up_on_its_way_is_refused_by_the_store(
    s3_server: WeedServer,
) -> None:
    """A process that is stopped after its last look at the clock: what it sends is too old when it comes."""
    place = S3Place("test-late", s3_server.endpoint)
    keys = Credentials(source="keys", access_key=s3_server.access_key, secret_key=s3_server.secret_key)
    blobs = S3Blobs(place, keys, clock=lambda: 0.0)
    blobs.put("x", b"x")
    late, until = blobs.deletion("x", within_s=1), time.monotonic() + 2
    wait_until(lambda: time.monotonic() > until, "its time is over")
    with pytest.raises(Unavailable, match="does not let this service in"):
        late()
    assert blobs.get("x") == b"x"


def test_a_deletion_spares_what_came_in_the_place_of_what_it_was_for(tmp_path: Path) -> None:
    blobs = open_blobs(f"file://{tmp_path}/store")
    blobs.put("x", b"one")
    deletion = blobs.deletion("x", within_s=60)
    blobs.put("x", b"two")
    deletion()
    assert blobs.get("x") == b"two"


def test_a_file_that_comes_between_the_last_look_and_the_deletion_is_put_back(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path)
    blobs.put("x", b"one")
    before = blobs.stat("x")
    assert before is not None
    blobs.put("x", b"two")
    blobs._remove(tmp_path / "x", before)
    assert blobs.get("x") == b"two"
    assert list((tmp_path / SCRATCH).iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from infinilora.runtime.blobs import DirectoryBlobs
class Slow:
    def read(self, size):
        print("writing", flush=True)
        return sys.stdin.buffer.read(1)
DirectoryBlobs(Path(sys.argv[1]))._write("x", Slow(), if_absent=False)
"""


def test_what_a_killed_writer_leaves_is_swept_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / SCRATCH
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as killed,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as living,
    ):
        for writer in (killed, living):
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writing\n"
        killed.kill()
        killed.wait()
        assert len(list(scratch.iterdir())) == 2
        DirectoryBlobs(tmp_path).put("young", b"")
        assert len(list(scratch.iterdir())) == 2, "what was written to a moment ago is nobody's to judge"
        monkeypatch.setattr(directory_blobs, "ABANDONED_S", -1.0)
        blobs = DirectoryBlobs(tmp_path)
        blobs.put("y", b"")
        assert len(list(scratch.iterdir())) == 1
        living.communicate(b"")  # the end of what it writes
        assert living.returncode == 0
    assert list(scratch.iterdir()) == []
    assert blobs.get("x") == b""


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


@pytest.mark.parametrize("name", ["tenant/été ü+%25&=?#.bin", "дата/模型/🦙", "a b/..c/-", "A@1:2~,/'x'"])
def test_a_name_may_be_any_plain_text(blobs: BlobStore, name: str) -> None:
    blobs.put(name, b"x" * 10)
    assert blobs.get_range(name, 2, 3) == b"xxx"
    assert blobs.list(name.split("/", maxsplit=1)[0] + "/") == [name]
    blobs.delete(name)
    assert blobs.stat(name) is None


def test_a_read_of_one_state_is_of_that_state_or_says_changed(blobs: BlobStore) -> None:
    blobs.put("x", b"first" * 100)
    before = blobs.stat("x")
    assert before is not None
    assert blobs.get("x", etag=before.etag) == b"first" * 100
    assert blobs.get_range("x", 5, 5, etag=before.etag) == b"first"
    blobs.put("x", b"other" * 100)
    with pytest.raises(Changed):
        blobs.get_range("x", 10, 5, etag=before.etag)
    with pytest.raises(Changed):
        blobs.get("x", etag=before.etag)
    now = blobs.stat("x")
    assert now is not None
    assert blobs.get("x", etag=now.etag) == b"other" * 100


def test_deleted_is_gone(blobs: BlobStore) -> None:
    blobs.put("x", b"one")
    blobs.delete("x")
    assert blobs.stat("x") is None
    assert blobs.list() == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a//b",
        "a/./b",
        "a/..",
        "a/",
        ".tmp/x",
        "a\0b",
        "a\nb",
        "a\u2028b",
        "é" * 600,
        "a/" + "é" * 130,
    ],
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


def test_a_directory_that_may_not_be_written_says_so() -> None:
    """Nobody, root included, makes directories in /sys."""
    with pytest.raises(StoreRefused, match="does not let this service in"):
        open_blobs("file:///sys/infinilora-store").put("x", b"1")


def test_a_file_that_the_disk_has_no_room_for_is_said_to_be_so_and_leaves_nothing(tmp_path: Path) -> None:
    blobs = open_blobs(f"file://{tmp_path}/store")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StoreFull, match="no room"):
            blobs.put("x", b"1" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert blobs.list() == []
    assert [p for p in (tmp_path / "store").rglob("*") if p.is_file()] == []


@pytest.mark.parametrize(
    "url",
    [
        "",
        "s3://",
        "http://x",
        "file://host/x",
        "s3://b?endpoint=ftp://x",
        "s3://b/prefix",
        "s3://b?endpoint=http://h/p",
        "s3://b?styl=path",
        "s3://b?style=flat",
        "s3://b?insecure=yes",
        "s3://b?ca=/no/such.pem",
        "s3://b?endpoint=http://user:secret@h",
        "s3://b?region=!",
    ],
)
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"wanted|no file|invalid region") as caught:
        open_blobs(url)
    assert "secret" not in str(caught.value)
