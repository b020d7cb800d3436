import resource
from pathlib import Path

import pytest

from infinilora.link.errors import LinkClosed
from infinilora.link.layout import attach_ring_file, create_ring_file, file_bytes
from infinilora.protocol.errors import InvalidRequest, Unavailable

SECRET = bytes(range(32))


def test_the_file_is_whole_private_and_gone_once_attached(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    create_ring_file(path, SECRET, num_buffers=4, buffer_bytes=1000)
    status = path.stat()
    assert status.st_size == file_bytes(4, 1000)
    assert status.st_blocks * 512 >= status.st_size, "the room is taken now, not when a step first writes there"
    assert status.st_mode & 0o077 == 0
    attach_ring_file(path, SECRET)
    assert not path.exists()


def test_both_mappings_are_one_memory(tmp_path: Path) -> None:
    made = create_ring_file(tmp_path / "ring", SECRET, num_buffers=4, buffer_bytes=1000)
    other = attach_ring_file(tmp_path / "ring", SECRET)
    made.map[5000] = 77
    assert other.map[5000] == 77


def test_a_wrong_secret_is_refused_and_the_file_stays(tmp_path: Path) -> None:
    create_ring_file(tmp_path / "ring", SECRET, num_buffers=2, buffer_bytes=64)
    with pytest.raises(InvalidRequest, match="secret"):
        attach_ring_file(tmp_path / "ring", bytes(32))
    assert (tmp_path / "ring").exists()


def test_a_full_directory_is_an_error_now_and_leaves_nothing(tmp_path: Path) -> None:
    # A limit on file size stands for a full volume: both fail in posix_fallocate.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(Unavailable, match="no room for a link"):
            create_ring_file(tmp_path / "ring", SECRET, num_buffers=64, buffer_bytes=1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_gone_says_that_the_server_left(tmp_path: Path) -> None:
    with pytest.raises(LinkClosed, match="is gone"):
        attach_ring_file(tmp_path / "ring", SECRET)


@pytest.mark.parametrize("content", [b"", b"x" * 5000])
def test_something_else_under_that_name_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ring").write_bytes(content)
    with pytest.raises(InvalidRequest):
        attach_ring_file(tmp_path / "ring", SECRET)


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    create_ring_file(tmp_path / "ring", SECRET, num_buffers=2, buffer_bytes=64)
    (tmp_path / "alias").symlink_to(tmp_path / "ring")
    with pytest.raises(OSError, match="symbolic"):
        attach_ring_file(tmp_path / "alias", SECRET)
