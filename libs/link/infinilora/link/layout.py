"""The file that both ends of a `shm` link map: its layout, its creation and its attachment.

Mirrors `FileHeader` of native/layout.h. The creator (a server) sizes the whole file up front, so that a full
shared volume is an error here and not a bus error later; the other end (an engine) proves with the secret that
it was invited, maps it and unlinks it at once: a `kill -9` of either end leaves no file behind.
"""

import ctypes
import enum
import hmac
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from infinilora.link.errors import LinkClosed
from infinilora.link.frame import HEADER_BYTES, aligned
from infinilora.protocol.errors import InvalidRequest, Unavailable

MAGIC = int.from_bytes(b"ILRING01", "little")
VERSION = 1
SECRET_BYTES = 32
RINGS_AT = 4096

_FILE_HEADER = struct.Struct("<QIIQQ32s")
_KEPT_VIEWS = 4096


class At(enum.IntEnum):
    """Where the words of the file header lie, in bytes. An end's line: state, waiting, bell."""

    ENGINE = 64
    SERVER = 128
    CONSUMED = 192


class State(enum.IntEnum):
    """Of one end. From SHUT on nothing more is sent; QUARANTINED says why: a deadline was missed."""

    ABSENT = 0
    OPEN = 1
    SHUT = 2
    QUARANTINED = 3


class Arena:
    """A writable buffer seen as tensors. Views share its memory and keep it alive.

    The same few shapes come back at the same few places in every step, so views are kept: one thread's.
    """

    def __init__(self, buffer: mmap.mmap | bytearray) -> None:
        self._kept: dict[tuple[torch.dtype, int, int, int], Tensor] = {}
        self._wholes = {
            dtype: torch.frombuffer(buffer, dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8)
        }

    def tensor(self, dtype: torch.dtype, offset: int, rows: int, cols: int) -> Tensor:
        """[rows, cols], contiguous, beginning `offset` bytes into the buffer."""
        key = (dtype, offset, rows, cols)
        view = self._kept.get(key)
        if view is None:
            if len(self._kept) >= _KEPT_VIEWS:
                self._kept.clear()
            view = self._wholes[dtype].as_strided((rows, cols), (cols, 1), offset // dtype.itemsize)
            self._kept[key] = view
        return view


class RingFile:
    """One mapped link file. The mapping lives as long as this object or any view of it."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self.map = mapping
        magic, version, num_buffers, buffer_bytes, stride, secret = _FILE_HEADER.unpack_from(mapping)
        if magic != MAGIC or version != VERSION:
            raise InvalidRequest(f"{path} is not a link file of version {VERSION}: magic {magic:#x}, version {version}")
        if len(mapping) != file_bytes(num_buffers, buffer_bytes) or stride != stride_of(buffer_bytes):
            raise InvalidRequest(f"{path} has {len(mapping)} bytes; its header says {num_buffers} x {buffer_bytes}")
        self.num_buffers: int = num_buffers
        self.buffer_bytes: int = buffer_bytes
        self.stride: int = stride
        self.secret: bytes = secret
        self.arena = Arena(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))

    def request_offset(self, frame: int) -> int:
        return RINGS_AT + frame % self.num_buffers * self.stride

    def reply_offset(self, sequence: int) -> int:
        return RINGS_AT + (self.num_buffers + sequence % self.num_buffers) * self.stride

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)


def stride_of(buffer_bytes: int) -> int:
    return aligned(HEADER_BYTES + buffer_bytes)


def file_bytes(num_buffers: int, buffer_bytes: int) -> int:
    """What one link takes of the shared directory."""
    return RINGS_AT + 2 * num_buffers * stride_of(buffer_bytes)


def create_ring_file(path: Path, secret: bytes, *, num_buffers: int, buffer_bytes: int) -> RingFile:
    """Make, size and map a link file, readable by this user only. Raises Unavailable where there is no room."""
    size = file_bytes(num_buffers, buffer_bytes)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with _closing(descriptor):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise Unavailable(
                f"no room for a link of {size} bytes in {path.parent}: {error.strerror}; "
                "enlarge the shared volume or make the link's buffers fewer or smaller"
            ) from error
        header = _FILE_HEADER.pack(MAGIC, VERSION, num_buffers, buffer_bytes, stride_of(buffer_bytes), secret)
        os.pwrite(descriptor, header, 0)
        return RingFile(path, _map(descriptor, size))


def attach_ring_file(path: Path, secret: bytes) -> RingFile:
    """Map a link file that a peer made, and unlink it: from here on only the two ends hold its memory."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise LinkClosed(f"the link file {path} is gone: its server closed before the engine attached") from error
    with _closing(descriptor):
        size = os.fstat(descriptor).st_size
        if size <= RINGS_AT:
            raise InvalidRequest(f"{path} has {size} bytes; a link file has more than {RINGS_AT}")
        ring = RingFile(path, _map(descriptor, size))
    if not hmac.compare_digest(ring.secret, secret):
        raise InvalidRequest(f"the secret of {path} is not the one this engine was given")
    ring.unlink()
    return ring


def _map(descriptor: int, size: int) -> mmap.mmap:
    # Populated now, so that no step pays for a page fault.
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


@contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)
