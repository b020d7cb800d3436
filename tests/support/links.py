"""Links for tests: two ends of every kind in one process, and a server that answers by a rule that a test can check."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from infinilora.kernels import native
from infinilora.link import rdma, shm, tcp
from infinilora.link.engine_end import EngineEnd
from infinilora.link.errors import LinkClosed
from infinilora.link.frame import Kind
from infinilora.link.layout import attach_ring_file, create_ring_file
from infinilora.link.listener import TcpListener
from infinilora.link.server_end import Call, ServerEnd
from infinilora.protocol.errors import AdapterFailed
from support.loopback_fabric import loopback_fabric

KINDS = ("native-native", "native-python", "python-native", "python-python", "tcp", "rdma")
"""Engine's port, then the server's."""

REFUSED_LAYER = 99
SECRET = b"s" * 32


def rule(header_layer: int, site: int, x: Tensor, out_cols: int, ids: Tensor | None, weights: Tensor | None) -> Tensor:
    """What the answering server returns: x's columns repeated to out_cols, moved by what else the call carries."""
    repeats = -(-out_cols // x.shape[1])
    out = x.float().repeat(1, repeats)[:, :out_cols] + header_layer + 100 * site
    if ids is not None:
        out += ids.sum(1, keepdim=True)
    if weights is not None:
        out += weights.sum(1, keepdim=True)
    return out


def answer(end: ServerEnd, call: Call) -> None:
    if call.header.kind == Kind.PLAN:
        return
    assert call.x is not None
    if call.header.layer == REFUSED_LAYER:
        end.refuse(call, AdapterFailed(f"layer {REFUSED_LAYER} is refused, as the test wants it"))
        return
    header = call.header
    delta = rule(header.layer, header.site, call.x, header.out_cols, call.topk_ids, call.topk_weights)
    end.reply_buffer(call).copy_(delta)
    end.reply(call)


class Answering:
    """A serving thread. `calls` are the headers it saw; `gate` holds it between two calls."""

    def __init__(self, end: ServerEnd) -> None:
        self.end = end
        self.calls: list[Call] = []
        self.gate = threading.Event()
        self.gate.set()
        self.ended_with: LinkClosed | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while True:
                call = self.end.recv(0.2)
                if call is None:
                    continue
                self.gate.wait(10)
                self.calls.append(Call(call.header, call.segments))
                answer(self.end, call)
        except LinkClosed as error:
            self.ended_with = error

    def join(self) -> None:
        self.gate.set()
        self._thread.join(10)
        assert not self._thread.is_alive(), "the serving thread did not end with its link"


@contextmanager
def ends(
    kind: str, directory: Path, *, num_buffers: int = 4, buffer_bytes: int = 4096
) -> Iterator[tuple[EngineEnd, ServerEnd]]:
    """Both ends of a new link; closed at the end of the block."""
    if kind == "tcp":
        listener = TcpListener("127.0.0.1", 0)
        listener.expect(SECRET)
        sock = tcp.connect(listener.host, listener.port, SECRET, timeout_s=5)
        engine = EngineEnd(tcp.TcpEnginePort(sock, num_buffers=num_buffers, buffer_bytes=buffer_bytes))
        server = ServerEnd(tcp.TcpServerPort(listener.take(SECRET, 5), buffer_bytes=buffer_bytes))
        listener.close()
    elif kind == "rdma":
        engine, server = _rdma_ends(num_buffers, buffer_bytes)
    else:
        assert native.load() is not None, "these tests need the native library; see the log for why it is missing"
        path = directory / "ring"
        made = create_ring_file(path, SECRET, num_buffers=num_buffers, buffer_bytes=buffer_bytes)
        engine_is, server_is = kind.split("-")
        engine = shm.engine_end(attach_ring_file(path, SECRET), is_native=engine_is == "native")
        server = shm.server_end(made, is_native=server_is == "native")
    try:
        yield engine, server
    finally:
        engine.close()
        server.close()


def _rdma_ends(num_buffers: int, buffer_bytes: int) -> tuple[EngineEnd, ServerEnd]:
    """On a loopback fabric; the two introduce themselves to one another at once."""
    fabric, sizes = loopback_fabric(), rdma.Sizes(num_buffers=num_buffers, buffer_bytes=buffer_bytes)
    mine, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(rdma.server_end, fabric, theirs, sizes, timeout_s=5)
        return rdma.engine_end(fabric, mine, sizes, timeout_s=5), server.result()


@contextmanager
def linked(
    kind: str, directory: Path, *, num_buffers: int = 4, buffer_bytes: int = 4096
) -> Iterator[tuple[EngineEnd, Answering]]:
    """An engine's end whose other end answers by `rule` in a thread."""
    with ends(kind, directory, num_buffers=num_buffers, buffer_bytes=buffer_bytes) as (engine, server):
        answering = Answering(server)
        try:
            yield engine, answering
        finally:
            engine.close()
            answering.join()


def random_rows(rows: int, cols: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)
