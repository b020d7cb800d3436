from pathlib import Path

import pytest

from infinilora.pool.cache import DiskCache
from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.ids import Digest

A, B, C = (Digest(f"sha256:{c * 64}") for c in "abc")


def fill(cache: DiskCache, digest: Digest, num_bytes: int = 40) -> bool:
    writer = cache.writer(digest, num_bytes)
    if writer is None:
        return False
    writer.write(0, b"x" * num_bytes)
    writer.commit()
    return True


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
    cache = DiskCache(tmp_path, 30)
    assert not fill(cache, A)
    cache.check()


def test_an_abandoned_file_leaves_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    writer = cache.writer(A, 40)
    assert writer is not None
    writer.abandon()
    cache.check()
    assert {p.name for p in tmp_path.iterdir()} == {"lock"}


def test_a_new_life_finds_whole_files_and_sweeps_half_ones(tmp_path: Path) -> None:
    with DiskCache(tmp_path, 100) as first:
        fill(first, A)
        half = first.writer(B, 40)
        assert half is not None
        half.write(0, b"y")
    second = DiskCache(tmp_path, 100)
    assert second.open(A) is not None
    assert {p.suffix for p in tmp_path.iterdir()} == {".safetensors", ""}


def test_a_smaller_cap_in_the_next_life_is_kept_at_once(tmp_path: Path) -> None:
    with DiskCache(tmp_path, 100) as first:
        fill(first, A)
        fill(first, B)
    DiskCache(tmp_path, 50).check()


def test_one_directory_has_one_owner(tmp_path: Path) -> None:
    with DiskCache(tmp_path, 100), pytest.raises(InvalidRequest, match="owned by another"):
        DiskCache(tmp_path, 100)


def test_a_file_that_is_gone_from_disk_is_forgotten(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    fill(cache, A)
    cache.path(A).unlink()
    assert cache.open(A) is None
    cache.check()


def test_a_dropped_file_can_be_written_again(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    fill(cache, A)
    cache.drop(A)
    assert cache.open(A) is None
    assert fill(cache, A)
