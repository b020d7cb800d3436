"""The native ports of a `shm` link: each hot operation is one call into native/ring.cpp.

Calls that cannot wait keep the GIL (a hand-over would cost more than they do); those that may wait release it.
"""

import ctypes
import enum
import weakref
from ctypes import PYFUNCTYPE, Structure, c_char, c_char_p, c_double, c_int, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

from torch import Tensor

from infinilora.link.errors import LinkClosed, LinkError, LinkTimeout
from infinilora.link.frame import DTYPE_CODES, HEADER_BYTES, Header, Kind, unpack_header
from infinilora.link.layout import At, RingFile, State
from infinilora.link.ports import Program, Ticket, checked, payload_at, refusal
from infinilora.link.times import SiteTimes
from infinilora.protocol.errors import Internal


class Status(enum.IntEnum):
    """What a native call that may wait returns."""

    OK = 0
    TIMEOUT = 1
    CLOSED = 2
    REFUSED = 3
    BLOCKED = 4
    CORRUPT = 5


class Block(Structure):
    """A ticket as native/engine_end.h sees it: what a call of its shape has in common. The rest is the library's."""

    _fields_ = (
        ("header", c_char * HEADER_BYTES),
        ("engine", c_void_p),
        *((name, c_uint64) for name in ("x_stride", "x_row", "ids_stride", "weights_stride", "topk_row")),
        *((name, c_uint64) for name in ("rows", "chunk_rows")),
        ("out_stride", c_int64),
        ("out_dtype", c_uint32),
        ("chunks", c_uint32),
        *((name, c_uint64) for name in ("x", "ids", "weights", "first")),
        *((name, c_int64) for name in ("sent_ns", "waited_ns", "began_ns", "ended_ns")),
        ("refusal", c_uint64),
        ("sent", c_uint32),
        ("received", c_uint32),
    )


class RingLibrary:
    """The il_ring_ functions with their types."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def quick(name: str, result: Any, *arguments: Any) -> Any:
            return PYFUNCTYPE(result, *arguments)((f"il_ring_{name}", library))

        def waiting(name: str, *arguments: Any, result: Any = c_int) -> Any:
            return ctypes.CFUNCTYPE(result, *arguments)((f"il_ring_{name}", library))

        self.engine_open = quick("engine_open", c_void_p, c_void_p, c_int64)
        self.server_open = quick("server_open", c_void_p, c_void_p, c_int64)
        self.free = quick("free", None, c_void_p)
        self.mark = quick("mark", None, c_void_p, c_int, c_uint32)
        self.submit = quick("submit", c_uint32, c_void_p, c_uint64, c_uint32, c_uint64, c_uint64, c_uint64)
        self.abandon = quick("abandon", None, c_void_p)
        self.in_flight = quick("in_flight", c_uint64, c_void_p)
        self.stale = quick("stale", c_uint64, c_void_p)
        self.reply = quick("reply", None, c_void_p, c_uint32, c_uint64)
        self.skip = quick("skip", None, c_void_p)
        self.collect = waiting("collect", c_void_p, c_void_p, c_int, c_double, result=c_int64)
        self.send_plan = waiting("send_plan", c_void_p, c_char_p, c_char_p, c_uint64, c_int64)
        self.recv = waiting("recv", c_void_p, c_int64, c_void_p)
        self.serve = waiting("serve", c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p)


class NativeEnginePort:
    """The engine's side of the rings. Owns the native state; the mapping outlives it."""

    takes_in_order = False
    narrows = False

    def __init__(self, library: RingLibrary, ring: RingFile, *, spin_s: float) -> None:
        self._lib = library
        self._ring = ring
        self.buffer_bytes = ring.buffer_bytes
        self._handle = library.engine_open(ring.address, int(spin_s * 1e9))
        self._submit, self._collect = library.submit, library.collect
        weakref.finalize(self, library.free, self._handle)
        self._words = memoryview(ring.map).cast("I")
        self.mark(State.OPEN)

    def lay_out(self, ticket: Ticket) -> None:
        if ticket.block is None:
            self._prepare(ticket)
        block = ticket.block
        block.x_stride, block.out_stride = ticket.x_stride, ticket.out_stride
        if ticket.out_layout is not None:
            block.out_dtype = DTYPE_CODES[ticket.out_layout[2]]

    def _prepare(self, ticket: Ticket) -> None:
        header = ticket.header
        block = Block(
            engine=self._handle,
            x_row=header.in_cols * header.torch_dtype.itemsize,
            topk_row=header.topk * 4,
            rows=header.rows,
            chunk_rows=ticket.chunk_rows,
            chunks=ticket.chunks,
        )
        ticket.block, ticket.block_at = block, ctypes.addressof(block)
        ctypes.memmove(ticket.block_at, header.pack(), HEADER_BYTES)

    def submit(self, ticket: Ticket, step_id: int, layer: int) -> None:
        x, ids, weights = ticket.x, ticket.topk_ids, ticket.topk_weights
        assert x is not None  # noqa: S101 - a ticket that is sent has rows
        if ids is not None:
            ticket.block.ids_stride = ids.stride(0) * 4
        if weights is not None:
            ticket.block.weights_stride = weights.stride(0) * 4
        ticket.sent = self._submit(
            ticket.block_at,
            step_id,
            layer,
            x.data_ptr() + ticket.x_skip,
            0 if ids is None else ids.data_ptr(),
            0 if weights is None else weights.data_ptr(),
        )

    def collect(self, ticket: Ticket, out: Tensor, *, add: bool, timeout_s: float) -> float:
        took_ns: int = self._collect(ticket.block_at, out.data_ptr() + ticket.out_skip, add, timeout_s)
        ticket.waited_s = ticket.block.waited_ns * 1e-9
        if took_ns < 0:
            if took_ns == -Status.REFUSED:
                raise refusal(self._payload(ticket.block.refusal))
            _raise_unless_ok(-took_ns, timeout_s)
        return took_ns * 1e-9

    def _payload(self, frame: int) -> bytes:
        start = payload_at(frame)
        return self._ring.map[start : start + unpack_header(self._ring.map, frame).payload_bytes]

    def send_plan(self, header: Header, body: bytes, *, timeout_s: float) -> None:
        status = self._lib.send_plan(self._handle, header.pack(), body, len(body), int(timeout_s * 1e9))
        _raise_unless_ok(status, timeout_s)

    def abandon(self) -> None:
        self._lib.abandon(self._handle)

    def mark(self, state: State) -> None:
        self._lib.mark(self._ring.address, 0, state)

    @property
    def is_alive(self) -> bool:
        return max(self._words[At.ENGINE // 4], self._words[At.SERVER // 4]) < State.SHUT

    @property
    def in_flight(self) -> int:
        return int(self._lib.in_flight(self._handle))

    @property
    def stale(self) -> int:
        return int(self._lib.stale(self._handle))


class NativeServerPort:
    """The server's side of the rings."""

    def __init__(self, library: RingLibrary, ring: RingFile, *, spin_s: float) -> None:
        self._lib = library
        self._ring = ring
        self.buffer_bytes = ring.buffer_bytes
        self.requests = self.replies = ring.arena
        self._handle = library.server_open(ring.address, int(spin_s * 1e9))
        weakref.finalize(self, library.free, self._handle)
        self._offset = c_uint64()
        self._offset_at = ctypes.addressof(self._offset)
        self._words = memoryview(ring.map).cast("I")
        self._program: tuple[int, int, int] | None = None
        self._keeps: tuple[object, ...] = ()
        self.mark(State.OPEN)

    def use(self, program: Program, times: SiteTimes) -> bool:
        self._program = program.compute, program.address, times.address
        self._keeps = program, times
        return True

    def recv(self, timeout_s: float) -> tuple[Header, int] | None:
        timeout_ns = int(timeout_s * 1e9)
        if self._program is None:
            status = self._lib.recv(self._handle, timeout_ns, self._offset_at)
        else:
            status = self._lib.serve(self._handle, timeout_ns, *self._program, self._offset_at)
        if status == Status.TIMEOUT:
            return None
        if status == Status.CORRUPT:
            checked(unpack_header(self._ring.map, self._offset.value), self)
        _raise_unless_ok(status, timeout_s)
        frame = self._offset.value
        return unpack_header(self._ring.map, frame), payload_at(frame)

    def reply_offset(self, header: Header) -> int:
        return payload_at(self._ring.reply_offset(header.sequence))

    def write_reply(self, header: Header, body: bytes) -> None:
        start = self.reply_offset(header)
        self._ring.map[start : start + len(body)] = body

    def reply(self, header: Header, kind: Kind, payload_bytes: int) -> None:  # noqa: ARG002 - the native side holds the frame
        self._lib.reply(self._handle, kind, payload_bytes)

    def skip(self) -> None:
        self._lib.skip(self._handle)

    def mark(self, state: State) -> None:
        self._lib.mark(self._ring.address, 1, state)

    @property
    def is_alive(self) -> bool:
        return max(self._words[At.ENGINE // 4], self._words[At.SERVER // 4]) < State.SHUT

    @property
    def is_quarantined(self) -> bool:
        return bool(self._words[At.ENGINE // 4] == State.QUARANTINED)


def _raise_unless_ok(status: int, timeout_s: float) -> None:
    match status:
        case Status.OK:
            return
        case Status.TIMEOUT:
            raise LinkTimeout(f"the LoRA server did not answer within {timeout_s * 1e3:.0f} ms")
        case Status.CLOSED:
            raise LinkClosed("the link is closed")
        case Status.BLOCKED:
            raise Internal("a site call was waited for before an earlier one that still had rows to send")
        case _:
            raise LinkError("the peer answered with a frame that does not belong to its request")
