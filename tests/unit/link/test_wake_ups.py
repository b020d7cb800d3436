"""When the engine's end wakes a LoRA server that sleeps: once the threads have the next product, or sooner."""

import ctypes
import gc
import platform
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from infinilora.kernels import cpu_ops
from infinilora.link import shm
from infinilora.link.errors import LinkTimeout
from infinilora.link.frame import Header, Kind
from infinilora.link.layout import At, RingFile, create_ring_file
from infinilora.link.ports import Ticket

SYS_FUTEX, FUTEX_WAIT = {"x86_64": 202, "aarch64": 98}[platform.machine()], 0
WAITING, BELL = 4, 8
"""Bytes from the beginning of an end's line in the file header."""
ROWS, COLS = 4, 256
SHAPE = Header(kind=Kind.SITE, rows=ROWS, in_cols=COLS, out_cols=COLS)


class Sleeper:
    """A server that does nothing but sleep on its bell. It returns 0 when it is woken, for which it waits for long."""

    def __init__(self, ring: RingFile) -> None:
        self.bell = ring.address + At.SERVER + BELL
        self._words = memoryview(ring.map).cast("I")
        self._words[(At.SERVER + WAITING) // 4] = 1
        self._found: list[int] = []
        self._thread = threading.Thread(target=self._sleep, daemon=True)
        self._thread.start()
        while not self.is_asleep:
            time.sleep(0.001)

    def _sleep(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        rung = self._words[(At.SERVER + BELL) // 4]
        for_long = (ctypes.c_long * 2)(30, 0)
        self._found.append(libc.syscall(SYS_FUTEX, ctypes.c_void_p(self.bell), FUTEX_WAIT, rung, for_long, None, 0))

    @property
    def is_asleep(self) -> bool:
        """By what the system says of its thread: the call that it is in, and on which word."""
        try:
            call = Path(f"/proc/self/task/{self._thread.native_id}/syscall").read_text().split()
        except FileNotFoundError:  # it has ended
            return False
        return call[0] == str(SYS_FUTEX) and int(call[1], 16) == self.bell

    @property
    def was_woken(self) -> bool:
        """Waits for as long as it sleeps."""
        self._thread.join()
        return self._found == [0]


@contextmanager
def pool_of(threads: int) -> Iterator[None]:
    cpu_ops.set_threads(threads)
    try:
        yield
    finally:
        cpu_ops.set_threads(1)


class Link:
    """An engine's end, which says to a server that it is open before the server falls asleep."""

    def __init__(self, path: Path) -> None:
        ring = create_ring_file(path, bytes(32), num_buffers=4, buffer_bytes=1 << 16)
        self.end = shm.engine_end(ring)
        self.server = Sleeper(ring)

    def send(self) -> Ticket:
        ticket = self.end.prepare(SHAPE)
        self.end.send(ticket, 1, 0, torch.ones(ROWS, COLS))
        return ticket


def multiply(columns: int) -> None:
    weight = cpu_ops.PackedWeight.pack(torch.ones(columns, COLS))
    assert (cpu_ops.linear(torch.ones(ROWS, COLS), weight) == COLS).all()


@pytest.mark.parametrize("columns", [1024, 8], ids=["shared by the threads", "too small to share"])
def test_servers_are_woken_with_the_product_that_follows(columns: int, tmp_path: Path) -> None:
    links = [Link(tmp_path / name) for name in ("one", "other")]
    with pool_of(2):
        for link in links:
            link.send()
        assert [link.server.is_asleep for link in links] == [True, True]
        multiply(columns)
        assert [link.server.was_woken for link in links] == [True, True]


def test_a_thread_that_works_alone_wakes_at_once(tmp_path: Path) -> None:
    link = Link(tmp_path / "ring")
    with pool_of(1):
        link.send()
        assert link.server.was_woken


def test_who_waits_for_the_answer_wakes_the_server_first(tmp_path: Path) -> None:
    link = Link(tmp_path / "ring")
    with pool_of(2):
        ticket = link.send()
        with pytest.raises(LinkTimeout):
            link.end.wait(ticket, torch.zeros(ROWS, COLS), deadline_s=0.01, add=True)
        assert link.server.was_woken


def test_more_servers_than_are_kept_in_mind_are_all_woken(tmp_path: Path) -> None:
    links = [Link(tmp_path / str(number)) for number in range(10)]
    with pool_of(2):
        for link in links:
            link.send()
        multiply(1024)
        assert all(link.server.was_woken for link in links)


def test_a_link_that_is_gone_meanwhile_harms_nobody(tmp_path: Path) -> None:
    ring = create_ring_file(tmp_path / "ring", bytes(32), num_buffers=4, buffer_bytes=1 << 16)
    end = shm.engine_end(ring)
    memoryview(ring.map).cast("I")[(At.SERVER + WAITING) // 4] = 1
    with pool_of(2):
        end.send(end.prepare(SHAPE), 1, 0, torch.ones(ROWS, COLS))
        is_mapped = weakref.ref(ring)
        del ring, end
        gc.collect()
        assert is_mapped() is None
        multiply(1024)
