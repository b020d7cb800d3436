"""The same rings without the native library: right, interoperable with a native peer, and slow.

Python's aligned word stores are single moves, and x86 keeps stores in order; on processors that do not, a link
without the native library is `tcp` (open.py sees to it). Waiting is polling with short sleeps; a native peer
that sleeps is woken by a system call, and should it just have begun to, its own sleep slice ends soon.
"""

import ctypes
import platform
import time
from collections.abc import Callable

from torch import Tensor

from infinilora.link.errors import LinkClosed, LinkError, LinkTimeout
from infinilora.link.frame import NO_TRACE, Header, Kind, aligned, unpack_header
from infinilora.link.layout import At, RingFile, State
from infinilora.link.ports import Program, Ticket, checked, payload_at, refusal
from infinilora.link.times import SiteTimes
from infinilora.protocol.errors import Internal

POLL_S = 0.0001
_YIELDS = 20
_SYS_FUTEX = 202  # x86-64
_FUTEX_WAKE = 1


def can_order_stores() -> bool:
    """Whether this processor makes the stores of one thread visible in their order."""
    return platform.machine() in {"x86_64", "AMD64"}


class _Words:
    """The words that the two ends signal with."""

    def __init__(self, ring: RingFile, mine: At, peer: At) -> None:
        self.u64 = memoryview(ring.map).cast("Q")
        self.u32 = memoryview(ring.map).cast("I")
        self._mine, self._peer = mine // 4, peer // 4
        self._bell_at = ring.address + peer + 8
        self._syscall = ctypes.CDLL(None).syscall

    def mark(self, state: State) -> None:
        self.u32[self._mine] = max(state, self.u32[self._mine])
        self._wake()

    def publish(self, at: int, word: int) -> None:
        """Store a word that the peer may wait for, and wake it if it sleeps."""
        self.u64[at // 8] = word
        if self.u32[self._peer + 1]:
            self._wake()

    def _wake(self) -> None:
        self.u32[self._peer + 2] = (self.u32[self._peer + 2] + 1) & 0xFFFFFFFF
        self._syscall(_SYS_FUTEX, ctypes.c_void_p(self._bell_at), _FUTEX_WAKE, 1)

    @property
    def is_alive(self) -> bool:
        return max(self.u32[self._mine], self.u32[self._peer]) < State.SHUT

    def await_(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll until ready(); LinkClosed or LinkTimeout. What arrived before a close is still delivered."""
        deadline = time.monotonic() + timeout_s
        turn = 0
        while not ready():
            if not self.is_alive:
                if ready():
                    return
                raise LinkClosed("the link is closed")
            if time.monotonic() >= deadline:
                raise LinkTimeout(f"the LoRA server did not answer within {timeout_s * 1e3:.0f} ms")
            turn += 1
            time.sleep(0 if turn < _YIELDS else POLL_S)


class PythonEnginePort:
    """The engine's side. `_open` maps the sequences whose reply buffer is lent out to whether anybody waits."""

    takes_in_order = False
    narrows = False

    def __init__(self, ring: RingFile) -> None:
        self._ring = ring
        self._words = _Words(ring, At.ENGINE, At.SERVER)
        self.buffer_bytes = ring.buffer_bytes
        self._written = 0
        self._next = 0
        self._sent = 0
        self._oldest = 0
        self._stale = 0
        self._open: dict[int, bool] = {}
        self._trace = NO_TRACE
        self.mark(State.OPEN)

    def lay_out(self, ticket: Ticket) -> None:
        """Nothing: views are cut as they are needed."""

    def submit(self, ticket: Ticket, step_id: int, layer: int) -> None:
        ticket.begin(step_id, layer, self._trace)
        ticket.first = self._next
        self._next += ticket.chunks
        self._pump(ticket)

    def _pump(self, ticket: Ticket) -> None:
        while self._can_send(ticket):
            self._send_chunk(ticket)

    def _can_send(self, ticket: Ticket) -> bool:
        is_next = ticket.sent < ticket.chunks and ticket.first + ticket.sent == self._sent
        return is_next and self._has_room() and self._has_credit()

    def _has_room(self) -> bool:
        return self._written - self._words.u64[At.CONSUMED // 8] < self._ring.num_buffers

    def _has_credit(self) -> bool:
        while self._oldest < self._sent:
            awaited = self._open.get(self._oldest)
            if awaited or (awaited is False and not self._arrived(self._oldest)):
                break
            self._stale += awaited is False
            self._open.pop(self._oldest, None)
            self._oldest += 1
        return self._sent - self._oldest < self._ring.num_buffers

    def _arrived(self, sequence: int) -> bool:
        return bool(self._words.u64[self._ring.reply_offset(sequence) // 8] == sequence + 1)

    def _send_chunk(self, ticket: Ticket) -> None:
        frame = self._ring.request_offset(self._written)
        start, rows = ticket.chunk(ticket.sent)
        end = payload_at(frame)
        x_end = end + rows * ticket.header.in_cols * ticket.header.torch_dtype.itemsize
        for part in (ticket.x, ticket.topk_ids, ticket.topk_weights):
            if part is None:
                continue
            if part is not ticket.x and end == x_end:
                end = payload_at(frame) + aligned(end - payload_at(frame))
            self._ring.arena.tensor(part.dtype, end, rows, part.shape[1]).copy_(part[start : start + rows])
            end += rows * part.shape[1] * part.itemsize
        header = ticket.chunk_header(ticket.sent, self._sent, end - payload_at(frame))
        self._open[self._sent] = True
        self._sent += 1
        ticket.sent += 1
        self._publish(frame, header)

    def _publish(self, frame: int, header: Header) -> None:
        self._ring.map[frame + 8 : payload_at(frame)] = header.pack()[8:]
        self._written += 1
        self._words.publish(frame, self._written)

    def collect(self, ticket: Ticket, out: Tensor, *, add: bool, timeout_s: float) -> float:
        deadline = time.monotonic() + timeout_s
        target = ticket.rows_of(out)
        while ticket.received < ticket.chunks:
            self._pump(ticket)
            if ticket.received == ticket.sent and ticket.first + ticket.sent != self._sent:
                raise Internal("a site call was waited for before an earlier one that still had rows to send")
            sequence = ticket.first + ticket.received
            with ticket.waiting():
                self._words.await_(
                    lambda s=sequence: (ticket.received < ticket.sent and self._arrived(s)) or self._can_send(ticket),  # type: ignore[misc]
                    deadline - time.monotonic(),
                )
            if ticket.received < ticket.sent and self._arrived(sequence):
                self._take(ticket, sequence, target, add=add)
        return time.monotonic() - ticket.sent_at

    def _take(self, ticket: Ticket, sequence: int, out: Tensor, *, add: bool) -> None:
        frame = self._ring.reply_offset(sequence)
        header = unpack_header(self._ring.map, frame)
        start, rows = ticket.chunk(ticket.received)
        self._open.pop(sequence)
        ticket.received += 1
        if header.step_id != ticket.header.step_id or header.sequence != sequence:
            raise LinkError("the peer answered with a frame that does not belong to its request")
        if header.kind == Kind.ERROR:
            raise refusal(self._ring.map[payload_at(frame) : payload_at(frame) + header.payload_bytes])
        delta = self._ring.arena.tensor(ticket.header.torch_dtype, payload_at(frame), rows, out.shape[1])
        target = out[start : start + rows]
        target.add_(delta) if add else target.copy_(delta)

    def send_plan(self, header: Header, body: bytes, *, timeout_s: float) -> None:
        self._words.await_(self._has_room, timeout_s)
        frame = self._ring.request_offset(self._written)
        self._ring.map[payload_at(frame) : payload_at(frame) + len(body)] = body
        self._trace = header.trace
        self._publish(frame, header)

    def abandon(self) -> None:
        self._open = dict.fromkeys(self._open, False)
        self._next = self._sent
        self._has_credit()

    def mark(self, state: State) -> None:
        self._words.mark(state)

    @property
    def is_alive(self) -> bool:
        return self._words.is_alive

    @property
    def in_flight(self) -> int:
        self._has_credit()
        return self._sent - self._oldest

    @property
    def stale(self) -> int:
        return self._stale


class PythonServerPort:
    """The server's side."""

    def __init__(self, ring: RingFile) -> None:
        self._ring = ring
        self._words = _Words(ring, At.SERVER, At.ENGINE)
        self.buffer_bytes = ring.buffer_bytes
        self.requests = self.replies = ring.arena
        self._taken = 0
        self.mark(State.OPEN)

    def use(self, program: Program, times: SiteTimes) -> bool:  # noqa: ARG002 - Python carries these frames
        return False

    def recv(self, timeout_s: float) -> tuple[Header, int] | None:
        if not self.is_alive:
            raise LinkClosed("the link is closed")  # nobody waits for what is still there
        frame = self._ring.request_offset(self._taken)
        try:
            self._words.await_(lambda: bool(self._words.u64[frame // 8] == self._taken + 1), timeout_s)
        except LinkTimeout:
            return None
        return checked(unpack_header(self._ring.map, frame), self), payload_at(frame)

    def reply_offset(self, header: Header) -> int:
        return payload_at(self._ring.reply_offset(header.sequence))

    def write_reply(self, header: Header, body: bytes) -> None:
        start = self.reply_offset(header)
        self._ring.map[start : start + len(body)] = body

    def reply(self, header: Header, kind: Kind, payload_bytes: int) -> None:
        frame = self._ring.reply_offset(header.sequence)
        answer = header._replace(kind=kind, payload_bytes=payload_bytes)
        self._ring.map[frame + 8 : payload_at(frame)] = answer.pack()[8:]
        self._words.publish(frame, header.sequence + 1)
        self.skip()

    def skip(self) -> None:
        self._taken += 1
        self._words.publish(At.CONSUMED, self._taken)

    def mark(self, state: State) -> None:
        self._words.mark(state)

    @property
    def is_alive(self) -> bool:
        return self._words.is_alive

    @property
    def is_quarantined(self) -> bool:
        return bool(self._words.u32[At.ENGINE // 4] == State.QUARANTINED)
