"""The small stream beside a link whose payloads move without the host: headers, plans, refusals and the end.

Frames have the link's header; only PLAN and ERROR have a body here. One thread reads; `mark` may be called from any.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterable

from infinilora.link.errors import LinkClosed
from infinilora.link.frame import HEADER_BYTES, Header, Kind, unpack_header
from infinilora.link.layout import State

MAX_BODY_BYTES = 1 << 20
SEGMENT_BYTES = 16
"""Of a plan: four int32."""

SEND_TIMEOUT_S = 30.0
_BYE = 15
"""A frame that says: this end takes nothing more. Its `flags` are the State."""

_WITH_BODY = (Kind.PLAN, Kind.ERROR)


class ControlStream:
    """Owns neither memory nor, once it is over, the socket: whoever retires the link's memory closes that."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(SEND_TIMEOUT_S)
        self.sock = sock
        self.state = State.OPEN
        self.peer_state = State.OPEN
        self._sending = threading.Lock()
        self._wake, self._waker = socket.socketpair()
        self._frame = bytearray()

    def send(self, header: Header, body: bytes = b"") -> None:
        """Whole frames only; LinkClosed where the peer is gone."""
        if len(body) > MAX_BODY_BYTES:
            raise LinkClosed(f"a control frame of {len(body)} bytes; at most {MAX_BODY_BYTES} fit")
        self._send(header.pack() + body)

    def send_headers(self, headers: Iterable[Header]) -> None:
        """Frames without bodies, at once."""
        self._send(b"".join(header.pack() for header in headers))

    def _send(self, data: bytes) -> None:
        try:
            with self._sending:
                self.sock.sendall(data)
        except OSError as error:
            self.peer_state = State.SHUT
            raise LinkClosed(f"the link broke: {error}") from error

    def receive(self, timeout_s: float) -> tuple[Header, bytes] | None:
        """The next frame, None when none came in time; LinkClosed at the end, or once this end was shut."""
        deadline = time.monotonic() + timeout_s
        while (frame := self._whole()) is None:
            if not self.is_alive:
                raise LinkClosed("the link is closed")
            left = max(deadline - time.monotonic(), 0.0)
            ready, _, _ = select.select([self.sock, self._wake], [], [], left)
            if not ready:
                return None
            if self.sock in ready:
                self._receive()
        return frame

    def _receive(self) -> None:
        try:
            part = self.sock.recv(1 << 16)
        except OSError as error:
            self.peer_state = State.SHUT
            raise LinkClosed(f"the link broke: {error}") from error
        if not part:
            self.peer_state = max(State.SHUT, self.peer_state)
            raise LinkClosed("the peer closed the link")
        self._frame += part

    def _whole(self) -> tuple[Header, bytes] | None:
        if len(self._frame) < HEADER_BYTES:
            return None
        header = unpack_header(self._frame)
        if self._is_end(header):
            raise LinkClosed("the peer closed the link")
        size = _body_bytes(header)
        if size > MAX_BODY_BYTES:
            self.mark(State.SHUT)
            raise LinkClosed(f"closed the link: the peer sent a frame of {size} bytes; at most {MAX_BODY_BYTES} fit")
        if len(self._frame) < HEADER_BYTES + size:
            return None
        body = bytes(self._frame[HEADER_BYTES : HEADER_BYTES + size])
        del self._frame[: HEADER_BYTES + size]
        return header, body

    def _is_end(self, header: Header) -> bool:
        if header.kind == _BYE:
            self.peer_state = State.QUARANTINED if header.flags == State.QUARANTINED else State.SHUT
        return header.kind == _BYE

    def look(self) -> None:
        """Take in what the peer has said, without waiting: if that is its end, `is_alive` says so from here on."""
        try:
            while self.is_alive and select.select([self.sock], [], [], 0)[0]:
                self._receive()
        except LinkClosed:
            return
        at = 0
        while len(self._frame) - at >= HEADER_BYTES:
            header = unpack_header(self._frame, at)
            if self._is_end(header):
                return
            at += HEADER_BYTES + _body_bytes(header)

    def mark(self, state: State) -> None:
        """Take nothing more: tell the peer, and wake whoever waits here."""
        if state < State.SHUT or self.state >= State.SHUT:
            return
        self.state = state
        self._waker.send(b"!")
        with contextlib.suppress(LinkClosed):  # the peer was quicker
            self.send(Header(kind=_BYE, flags=int(state)))

    @property
    def is_alive(self) -> bool:
        return max(self.state, self.peer_state) < State.SHUT

    def free(self) -> None:
        """Give back what only this process sees; the socket stays."""
        self._wake.close()
        self._waker.close()


def _body_bytes(header: Header) -> int:
    return header.payload_bytes if header.kind in _WITH_BODY else 0


def check_plan(header: Header, body: bytes, control: ControlStream) -> None:
    """LinkClosed, and the link shut, where a plan has not the bytes that its segments need."""
    if len(body) != header.rows * SEGMENT_BYTES:
        control.mark(State.SHUT)
        raise LinkClosed(f"closed the link: the peer sent a plan of {len(body)} bytes for {header.rows} segments")


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """What a peer says as it introduces itself, before its frames; LinkClosed where it leaves or is too slow."""
    data = b""
    try:
        while len(data) < size and (part := sock.recv(size - len(data))):
            data += part
    except OSError as error:
        raise LinkClosed(f"the peer did not introduce itself: {error}") from error
    if len(data) < size:
        raise LinkClosed(f"the peer left before it had introduced itself: {len(data)} of {size} bytes came")
    return data
