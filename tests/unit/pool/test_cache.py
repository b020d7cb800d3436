"""The disk tier: caps, locks and crashes, also between processes."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infinilora.pool.cache import DiskCache
from infinilora.protocol.ids import Digest

A, B, C = (Digest(f"sha256:{c * 64}") for c in "abc")


def fill(cache: DiskCache, digest: Digest, num_bytes: int = 40) -> bool:
    writer = cache.writer(digest, num_bytes)
    if writer is None:
        return False
    writer.write(0, b"x" * num_bytes)
    writer.commit()
    return cache.path(digest).exists()


@contextmanager
def another_process(*lines: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Runs `lines` over its own `cache` of the directory (100 bytes), says `ready`, and lives until its stdin ends."""
    script = "\n".join([
        "import sys",
        "from pathlib import Path",
        "from infinilora.pool.cache import DiskCache",
        f"cache = DiskCache(Path({str(directory)!r}), 100)",
        *lines,
        "print('ready', flush=True)",
        "sys.stdin.read()",
    ])  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def test_a_file_is_there_only_when_committed(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    writer = cache.writer(A, 40)
    assert writer is not None
    writer.write(0, b"x" * 40)
    assert cache.open(A) is None
    writer.commit()
    file = cache.open(A)
    assert file is not None
    target = bytearray(40)
    assert file.read_into(0, memoryview(target))
    assert target == b"x" * 40
    file.close()
    cache.check()


def test_the_least_recently_used_goes_and_the_cap_holds(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    assert fill(cache, A)
    assert fill(cache, B)
    reader = cache.open(A)
    assert reader is not None
    reader.close()
    assert fill(cache, C)
    cache.check()
    assert cache.open(B) is None
    assert {p.name[0] for p in tmp_path.glob("*.safetensors")} == {"a", "c"}


def test_a_file_in_use_is_never_removed(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    fill(cache, A)
    fill(cache, B)
    readers = [cache.open(A), cache.open(B)]
    assert not fill(cache, C)
    for reader in readers:
        assert reader is not None
        assert reader.read_into(0, memoryview(bytearray(40)))
        reader.close()
    assert fill(cache, C)


def test_what_is_larger_than_the_cache_is_not_cached_and_costs_nobody(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 50)
    assert fill(cache, A)
    assert not fill(cache, B, 60)
    assert cache.path(A).exists()
    cache.check()


def test_an_abandoned_file_leaves_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    writer = cache.writer(A, 40)
    assert writer is not None
    writer.abandon()
    cache.check()
    assert {p.name for p in tmp_path.iterdir()} == {"lock"}


def test_a_smaller_cap_in_the_next_life_is_kept_at_once(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    fill(cache, A)
    fill(cache, B)
    DiskCache(tmp_path, 50).check()


def test_a_file_that_is_gone_from_disk_is_not_found(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    fill(cache, A)
    cache.path(A).unlink()
    assert cache.open(A) is None
    assert fill(cache, A)


def test_a_dropped_file_can_be_written_again(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    fill(cache, A)
    cache.drop(A)
    assert cache.open(A) is None
    assert fill(cache, A)


def test_what_is_forgotten_is_gone_though_somebody_reads_it_to_the_end(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    fill(cache, A)
    reader = cache.open(A)
    assert reader is not None
    assert cache.forget(A)
    assert cache.open(A) is None
    assert cache.used_bytes == 0
    assert reader.read_into(0, memoryview(bytearray(40)))
    reader.close()
    assert not cache.forget(A)


def test_what_is_forgotten_on_its_way_does_not_come(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    writer = cache.writer(A, 40)
    assert writer is not None
    assert cache.forget(A)
    writer.commit()
    assert cache.open(A) is None
    cache.check()


def test_two_processes_share_what_either_wrote_and_one_cap(tmp_path: Path) -> None:
    lines = (
        "writer = cache.writer('sha256:' + 'a' * 64, 40)",
        "writer.write(0, b'y' * 40)",
        "writer.commit()",
    )
    with another_process(*lines, directory=tmp_path):
        cache = DiskCache(tmp_path, 100)
        file = cache.open(A)
        assert file is not None
        target = bytearray(40)
        assert file.read_into(0, memoryview(target))
        assert target == b"y" * 40
        file.close()
        assert fill(cache, B)
        assert fill(cache, C)
        assert cache.used_bytes <= 100
        cache.check()


def test_what_another_process_reads_or_writes_is_not_removed(tmp_path: Path) -> None:
    fill(DiskCache(tmp_path, 100), A)
    lines = (
        "reader = cache.open('sha256:' + 'a' * 64)",
        "writer = cache.writer('sha256:' + 'b' * 64, 40)",
        "writer.write(0, b'y' * 10)",
    )
    with another_process(*lines, directory=tmp_path):
        cache = DiskCache(tmp_path, 100)
        assert not fill(cache, C), "there is no room: a file that is on its way counts at its full length"
        assert cache.writer(B, 10) is None, "it is on its way"
        assert cache.path(A).exists()
    assert fill(cache, C)
    assert {p.name[0] for p in tmp_path.glob("*.safetensors")} == {"a", "c"}
    cache.check()


def test_what_a_killed_writer_left_is_swept_and_its_room_is_free(tmp_path: Path) -> None:
    lines = ("writer = cache.writer('sha256:' + 'a' * 64, 90)", "writer.write(0, b'y')")
    with another_process(*lines, directory=tmp_path) as process:
        process.kill()
        process.wait(10)
    assert list(tmp_path.glob("*.part"))
    cache = DiskCache(tmp_path, 100)
    assert not list(tmp_path.glob("*.part"))
    assert fill(cache, A, 90)


def test_a_process_that_is_stopped_in_the_lock_costs_the_cache_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinilora.pool.cache.LOCK_TRIES", 2)
    cache = DiskCache(tmp_path, 100)
    fill(cache, A)
    with another_process("lock = cache._locked()", "lock.__enter__()", directory=tmp_path):
        assert cache.writer(B, 10) is None
        assert cache.open(A) is not None
    assert "keeps the cache's lock" in str(vars(caplog.records[0]))
    assert fill(cache, B, 10)


def test_a_directory_that_cannot_be_written_is_a_cache_that_is_off_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = DiskCache(Path("/sys/infinilora-cache"), 100)  # nobody, root included, makes directories there
    assert not fill(cache, A)
    assert not fill(cache, B)
    assert cache.open(A) is None
    assert not cache.forget(A)
    cache.check()
    assert [record.message for record in caplog.records] == ["disk cache is off; adapters come from the store"]


def test_a_full_disk_ends_the_attempt_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = DiskCache(tmp_path, 10_000)
    assert fill(cache, A)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        assert not fill(cache, B, 2000)
        assert not fill(cache, C, 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(caplog.records) == 1
    assert cache.open(A) is not None
    assert fill(cache, B, 2000)
    assert not list(tmp_path.glob("*.part"))


def test_a_cache_of_no_bytes_is_no_cache(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "none", 0)
    assert not fill(cache, A)
    assert cache.open(A) is None
    assert not (tmp_path / "none").exists()
