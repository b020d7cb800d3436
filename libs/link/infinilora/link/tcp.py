"""The `tcp` back-end: one socket per link, the same frames, the same credit.

Frames are gathered from tensor memory by `sendmsg` and received into buffers made once. The engine never blocks
in `submit`: what the socket does not take now is sent while it waits, and while it waits it also reads, so two
full sockets cannot face each other. The server reads one frame, answers it, and may block in writing: the
engine reads whenever it waits.
"""

import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from infinilora.link.errors import LinkClosed, LinkError, LinkTimeout
from infinilora.link.frame import HEADER_BYTES, NO_TRACE, Header, Kind, aligned, unpack_header
from infinilora.link.layout import Arena, State
from infinilora.link.ports import Program, Ticket, checked, refusal, rows_in
from infinilora.link.times import SiteTimes

SEND_TIMEOUT_S = 30.0
"""A server that cannot write an answer for this long takes its engine for dead."""

_NOTHING = memoryview(b"")
_PAD = bytes(64)
_SOCKET_BUFFER_BYTES = 1 << 22


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)


class _Life:
    """Whether a socket's link is open, and why not. `shut` may be called from any thread and wakes a waiter."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.state = State.OPEN
        # Closed when the port is no longer used, not in `shut`: its thread may be inside a call on it.
        weakref.finalize(self, sock.close)

    @property
    def is_alive(self) -> bool:
        return self.state < State.SHUT

    def shut(self, state: State = State.SHUT) -> None:
        if self.is_alive:
            self.state = state
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # the peer was quicker

    def recv_into(self, view: memoryview) -> int:
        """Bytes received, 0 when there are none now; LinkClosed, for good, at the end of the stream."""
        try:
            count = self._sock.recv_into(view)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.shut()
            raise LinkClosed(f"the link broke: {error}") from error
        if count == 0:
            self.shut()
            raise LinkClosed("the peer closed the link")
        return count

    def wait(self, events: int, deadline: float) -> int:
        """The events of poll(2) that came; LinkTimeout at the deadline."""
        left = deadline - time.monotonic()
        poll = select.poll()
        poll.register(self._sock, events)
        ready = poll.poll(max(left, 0.0) * 1e3)
        if not self.is_alive:
            raise LinkClosed("the link is closed")
        if not ready:
            raise LinkTimeout("the LoRA server did not answer by the deadline")
        return ready[0][1]


class TcpEnginePort:
    """The engine's side of a connected socket, which it owns.

    `_pieces` is the gathered rest of a frame that the socket has not taken yet; `_answers` the sequences that
    the server owes, oldest first. Answers come in that order.
    """

    takes_in_order = True
    narrows = True

    def __init__(self, sock: socket.socket, *, num_buffers: int, buffer_bytes: int) -> None:
        sock.settimeout(0)
        self._sock = sock
        self._life = _Life(sock)
        self.buffer_bytes = buffer_bytes
        self._num_buffers = num_buffers
        self._pieces: list[memoryview] = []
        self._queue: deque[Ticket] = deque()
        self._sequence = 0
        self._answers: deque[tuple[int, Ticket | None]] = deque()
        self._frame = bytearray(HEADER_BYTES + buffer_bytes)
        self._arena = Arena(self._frame)
        self._received = 0
        self._stale = 0
        self._trace = NO_TRACE

    def lay_out(self, ticket: Ticket) -> None:
        """Nothing: views are cut as they are needed."""

    def submit(self, ticket: Ticket, step_id: int, layer: int) -> None:
        ticket.begin(step_id, layer, self._trace)
        self._queue.append(ticket)
        self._send()

    def _send(self) -> None:
        """Hand the socket all it takes now."""
        while self._pieces or self._next_chunk():
            try:
                taken = self._sock.sendmsg(self._pieces)
            except BlockingIOError:
                return
            except OSError:
                self._life.shut()
                return  # the reader says so
            self._pieces = list(_after(self._pieces, taken))

    def _next_chunk(self) -> bool:
        """Put the next chunk of the oldest ticket into `_pieces`, if there is one and credit for it."""
        if not self._queue or len(self._answers) >= self._num_buffers:
            return False
        ticket = self._queue[0]
        header, self._pieces = _gather(ticket, self._sequence)
        self._answers.append((self._sequence, ticket))
        self._sequence += 1
        ticket.sent += 1
        if ticket.sent == ticket.chunks:
            self._queue.popleft()
        self._pieces.insert(0, memoryview(header.pack()))
        return True

    def collect(self, ticket: Ticket, out: Tensor, *, add: bool, timeout_s: float) -> float:
        deadline = time.monotonic() + timeout_s
        target = ticket.rows_of(out)
        while ticket.received < ticket.chunks:
            self._send()
            with ticket.waiting():
                header = self._read(deadline)
            if header is None:
                continue
            sequence, owner = self._answers.popleft()
            if header.sequence != sequence:
                raise LinkError("the peer answered with a frame that does not belong to its request")
            if owner is None:
                self._stale += 1
                continue
            if owner is not ticket:
                raise LinkError("a site call was waited for before an earlier one")
            self._take(ticket, header, target, add=add)
        return time.monotonic() - ticket.sent_at

    def _read(self, deadline: float) -> Header | None:
        """Receive into `_frame`; a header once a whole frame is there, None when the socket had less."""
        wanted = HEADER_BYTES
        if self._received >= HEADER_BYTES:
            wanted += self._payload_bytes()
        if self._received < wanted:
            writing = select.POLLOUT if self._pieces else 0
            events = self._life.wait(select.POLLIN | writing, deadline)
            if not events & ~select.POLLOUT:
                return None
            self._received += self._life.recv_into(memoryview(self._frame)[self._received : wanted])
        if self._received < HEADER_BYTES or self._received < HEADER_BYTES + self._payload_bytes():
            return None
        self._received = 0
        return unpack_header(self._frame)

    def _payload_bytes(self) -> int:
        size = unpack_header(self._frame).payload_bytes
        if size > self.buffer_bytes:
            self._life.shut()
            raise LinkClosed(f"closed the link: the peer sent a frame of {size} bytes; at most {self.buffer_bytes} fit")
        return size

    def _take(self, ticket: Ticket, header: Header, out: Tensor, *, add: bool) -> None:
        start, rows = ticket.chunk(ticket.received)
        ticket.received += 1
        if header.kind == Kind.ERROR:
            raise refusal(self._frame[HEADER_BYTES : HEADER_BYTES + header.payload_bytes])
        row_bytes, cols = ticket.header.row_bytes(out.shape[1]), out.shape[1]
        if header.rows != rows or header.payload_bytes != rows * row_bytes or header.dtype != ticket.header.dtype:
            raise LinkError("the peer answered with a frame that does not belong to its request")
        delta = rows_in(self._arena, HEADER_BYTES, header, cols)
        target = out[start : start + rows]
        target.add_(delta) if add else target.copy_(delta)

    def send_plan(self, header: Header, body: bytes, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._pieces:  # the rest of an abandoned step's last frame
            self._life.wait(select.POLLOUT, deadline)
            self._send()
        self._trace = header.trace
        self._pieces = [memoryview(header.pack() + body)]
        self._send()
        if not self.is_alive:
            raise LinkClosed("the link is closed")

    def abandon(self) -> None:
        self._answers = deque((sequence, None) for sequence, _ in self._answers)
        self._queue.clear()
        # The frame half sent is finished from a copy: its tensors are the caller's again.
        self._pieces = [memoryview(b"".join(self._pieces))] if self._pieces else []

    def mark(self, state: State) -> None:
        self._life.shut(state)

    @property
    def is_alive(self) -> bool:
        return self._life.is_alive

    @property
    def in_flight(self) -> int:
        return len(self._answers)

    @property
    def stale(self) -> int:
        return self._stale


class TcpServerPort:
    """The server's side of a connected socket, which it owns. One request and one reply buffer."""

    def __init__(self, sock: socket.socket, *, buffer_bytes: int) -> None:
        sock.settimeout(SEND_TIMEOUT_S)
        self._sock = sock
        self._life = _Life(sock)
        self.buffer_bytes = buffer_bytes
        self._request = bytearray(HEADER_BYTES + buffer_bytes)
        self._reply = bytearray(HEADER_BYTES + buffer_bytes)
        self.requests = Arena(self._request)
        self.replies = Arena(self._reply)
        self._received = 0

    def use(self, program: Program, times: SiteTimes) -> bool:  # noqa: ARG002 - Python carries these frames
        return False

    def recv(self, timeout_s: float) -> tuple[Header, int] | None:
        deadline = time.monotonic() + timeout_s
        wanted = HEADER_BYTES
        while True:
            if self._received >= HEADER_BYTES:
                header = unpack_header(self._request)
                wanted = HEADER_BYTES + header.payload_bytes
                if header.payload_bytes > self.buffer_bytes:
                    self._life.shut()
                    raise LinkClosed(f"closed the link: the peer sent a frame of {header.payload_bytes} bytes")
                if self._received == wanted:
                    self._received = 0
                    return checked(header, self), HEADER_BYTES
            try:
                self._life.wait(select.POLLIN, deadline)
            except LinkTimeout:
                return None
            self._received += self._life.recv_into(memoryview(self._request)[self._received : wanted])

    def reply_offset(self, header: Header) -> int:  # noqa: ARG002 - one buffer serves every header
        return HEADER_BYTES

    def write_reply(self, header: Header, body: bytes) -> None:  # noqa: ARG002
        self._reply[HEADER_BYTES : HEADER_BYTES + len(body)] = body

    def reply(self, header: Header, kind: Kind, payload_bytes: int) -> None:
        self._reply[:HEADER_BYTES] = header._replace(kind=kind, payload_bytes=payload_bytes).pack()
        try:
            self._sock.sendall(memoryview(self._reply)[: HEADER_BYTES + payload_bytes])
        except OSError as error:
            self._life.shut()
            raise LinkClosed(f"the engine does not take its answers: {error}") from error

    def skip(self) -> None:
        """Nothing to give back: the next recv reuses the buffer."""

    def mark(self, state: State) -> None:
        self._life.shut(state)

    @property
    def is_alive(self) -> bool:
        return self._life.is_alive

    @property
    def is_quarantined(self) -> bool:
        return False  # over a socket a quarantine is a close


def _gather(ticket: Ticket, sequence: int) -> tuple[Header, list[memoryview]]:
    """A chunk's header, and its payload as views of the tensors where their rows are adjacent."""
    start, rows = ticket.chunk(ticket.sent)
    pieces: list[memoryview] = []
    size = 0
    for tensor in (ticket.x, ticket.topk_ids, ticket.topk_weights):
        if tensor is None:
            continue
        if len(pieces) == 1 and (gap := aligned(size) - size):
            pieces.append(memoryview(_PAD)[:gap])
            size += gap
        part = tensor[start : start + rows].contiguous().view(torch.uint8)
        pieces.append(part.numpy().data.cast("B") if part.numel() else _NOTHING)
        size += part.numel()
    return ticket.chunk_header(ticket.sent, sequence, size), pieces


def _after(pieces: list[memoryview], taken: int) -> Iterator[memoryview]:
    """What is left of the pieces once their first `taken` bytes are gone."""
    for piece in pieces:
        if taken < len(piece):
            yield piece[taken:]
        taken = max(taken - len(piece), 0)


def connect(host: str, port: int, secret: bytes, *, timeout_s: float) -> socket.socket:
    """A tuned socket to a TcpListener, opened with the secret of its OpenLink."""
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise LinkClosed(f"no LoRA server listens for links at {host}:{port}: {error}") from error
    tune(sock)
    sock.sendall(secret)
    return sock
