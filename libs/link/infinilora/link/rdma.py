"""The `rdma` back-end, host-initiated: one end's network card writes into memory that the other end registered.

    engine   x -> staging (on its stream), synchronize, put ---------> slot of the server's region
             header --- control stream ------------------------------> recv: waits for the put's tag, views the slot
             join slot of the engine's region <------------------ put  reply buffer = staging, synchronize

A put carries its call's sequence as a tag, which arrives after the payload: a header alone is no promise that the
payload is there. Memory may be a GPU's or the host's. What moves it is a `Transport` (rdma_nixl.py, or in tests shared
memory); GPU-initiated puts are another back-end.
"""

import socket
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from infinilora.link.beside import EngineBeside, ServerBeside
from infinilora.link.control import MAX_BODY_BYTES, ControlStream, check_plan, receive_exactly
from infinilora.link.engine_end import NARROW_LIMIT_BYTES, EngineEnd
from infinilora.link.errors import LinkClosed, LinkError, LinkTimeout
from infinilora.link.frame import Header, Kind, aligned
from infinilora.link.layout import Arena, State
from infinilora.link.narrow import Narrowing
from infinilora.link.ports import Ticket, checked, refusal, rows_in
from infinilora.link.server_end import ServerEnd
from infinilora.link.staging import DEVICE_AT, Staging

PATIENCE_S = 5.0
"""How long a payload may be on its way after its header: a peer that needs longer is dead."""

_LENGTH = struct.Struct("<I")
_MAX_CARD_BYTES = 1 << 20


class Transport(Protocol):
    """Writes from this end's staging memory into the peer's region. Of one thread but for `close`."""

    card: bytes
    """What the peer's `connect` needs to find this end's region."""

    def connect(self, card: bytes) -> None: ...

    def put(self, at: int, peer_at: int, num_bytes: int, tag: int) -> None:
        """Begin to write staging[at : at + num_bytes] to the peer's region; its tag comes after it. LinkError."""
        ...

    def has_come(self, tag: int) -> bool:
        """Whether the peer's put with this tag is complete in this end's region. True once for each."""
        ...

    def close(self) -> None:
        """Take nothing more and let the memory go."""
        ...


@dataclass(frozen=True, slots=True)
class Fabric:
    """What a process lends to rdma links: memory of `device`, moved by the transports that `open` makes of it.

    `open(region, staging)`: uint8 tensors of one size, on the device.
    """

    device: torch.device
    open: Callable[[Tensor, Tensor], Transport]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What both ends of a link must agree on."""

    num_buffers: int
    buffer_bytes: int

    @property
    def stride(self) -> int:
        return aligned(self.buffer_bytes)


class Wire:
    """One end of an open link: its memory, its transport and its control stream."""

    def __init__(self, fabric: Fabric, sock: socket.socket, sizes: Sizes) -> None:
        self.sizes = sizes
        self.device = fabric.device
        region, staging = (
            torch.zeros(sizes.num_buffers * sizes.stride, dtype=torch.uint8, device=fabric.device) for _ in range(2)
        )
        self.plan = bytearray(MAX_BODY_BYTES)
        self.received = Staging(self.plan, region)
        self.staged = Staging(bytearray(4), staging)
        self.transport = fabric.open(region, staging)
        self.control = ControlStream(sock)
        weakref.finalize(self, _end, self.transport, self.control)

    def offset(self, sequence: int) -> int:
        """Where the slot of a call lies, in `received` and in `staged`."""
        return DEVICE_AT + sequence % self.sizes.num_buffers * self.sizes.stride

    def put(self, header: Header, num_bytes: int) -> None:
        """Write a call's slot of `staged` into the peer's region, once what fills it has run."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        at = self.offset(header.sequence) - DEVICE_AT
        self.transport.put(at, at, num_bytes, header.sequence)

    def await_put(self, sequence: int, deadline: float) -> None:
        """Until the payload of a call whose header came is here; LinkTimeout."""
        while not self.transport.has_come(sequence):
            if time.monotonic() > deadline:
                raise LinkTimeout(f"the payload of message {sequence} did not come by the deadline")
            if not self.control.is_alive:
                raise LinkClosed("the link is closed")
            time.sleep(0)


def _end(transport: Transport, control: ControlStream) -> None:
    control.mark(State.SHUT)
    control.free()
    transport.close()
    control.sock.close()


class RdmaEnginePort(EngineBeside):
    """The engine's side."""

    narrows = True

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire.control, num_buffers=wire.sizes.num_buffers, buffer_bytes=wire.sizes.buffer_bytes)
        self._wire = wire

    @override
    def _send(self) -> None:
        """Begin all that there is credit for. A broken link is told of by who waits."""
        while self._control.is_alive and (chunk := self._calls.next_chunk()):
            ticket, part, header = chunk
            try:
                self._stage(ticket, part, header)
                self._wire.put(header, header.payload_bytes)
                self._control.send(header)
            except LinkError:
                self._control.mark(State.SHUT)

    def _stage(self, ticket: Ticket, part: slice, header: Header) -> None:
        assert ticket.x is not None  # noqa: S101 - a ticket that is sent has rows
        at, rows, tensor = self._wire.offset(header.sequence), header.rows, self._wire.staged.tensor
        x = ticket.x[part]
        tensor(x.dtype, at, rows, x.shape[1]).copy_(x)
        at += header.ids_offset
        for choices, dtype in ((ticket.topk_ids, torch.int32), (ticket.topk_weights, torch.float32)):
            if choices is not None:
                tensor(dtype, at, rows, header.topk).copy_(choices[part])
                at += rows * header.topk * 4

    def collect(self, ticket: Ticket, out: Tensor, *, add: bool, timeout_s: float) -> float:
        deadline = time.monotonic() + timeout_s
        target = ticket.rows_of(out)
        while ticket.received < ticket.chunks:
            self._send()
            with ticket.waiting():
                header, body = self._answer(deadline)
            sequence, part = self._calls.next_answer(ticket)
            if header.sequence != sequence:
                raise LinkError("the peer answered with a frame that does not belong to its request")
            if header.kind != Kind.ERROR:
                with ticket.waiting():
                    self._wire.await_put(sequence, deadline)
            elif part is not None:
                raise refusal(body)
            if part is None:
                continue
            header = ticket.header._replace(rows=part.stop - part.start)
            delta = rows_in(self._wire.received, self._wire.offset(sequence), header, target.shape[1])
            target[part].add_(delta) if add else target[part].copy_(delta)
        return time.monotonic() - ticket.sent_at

    def _answer(self, deadline: float) -> tuple[Header, bytes]:
        frame = self._control.receive(max(deadline - time.monotonic(), 0.0))
        if frame is None:
            raise LinkTimeout("the LoRA server did not answer by the deadline")
        return frame


class RdmaServerPort(ServerBeside):
    """The server's side: a call's x is where the engine's card put it, its answer goes out from where it was made."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire.control, buffer_bytes=wire.sizes.buffer_bytes)
        self._wire = wire
        self.requests: Arena = wire.received
        self.replies: Arena = wire.staged

    def recv(self, timeout_s: float) -> tuple[Header, int] | None:
        frame = self._control.receive(timeout_s)
        if frame is None:
            return None
        header, body = frame
        if header.kind == Kind.PLAN:
            check_plan(header, body, self._control)
            self._wire.plan[: len(body)] = body
            return header, 0
        header = checked(header, self)
        try:
            self._wire.await_put(header.sequence, time.monotonic() + PATIENCE_S)
        except LinkTimeout as error:
            self.mark(State.SHUT)
            raise LinkClosed(f"closed the link: the engine announced a payload: {error.message}") from error
        return header, self._wire.offset(header.sequence)

    def reply_offset(self, header: Header) -> int:
        return self._wire.offset(header.sequence)

    def reply(self, header: Header, kind: Kind, payload_bytes: int) -> None:
        """Send the answer; a refusal has no payload and goes in words over the control stream."""
        body = self._refusal if kind == Kind.ERROR else b""
        if kind != Kind.ERROR:
            self._wire.put(header, payload_bytes)
        self._control.send(header._replace(kind=kind, payload_bytes=len(body)), body)


def engine_end(
    fabric: Fabric,
    sock: socket.socket,
    sizes: Sizes,
    *,
    timeout_s: float,
    narrowing: Narrowing = "never",
    narrow_limit_bytes: int = NARROW_LIMIT_BYTES,
) -> EngineEnd:
    """The engine's end on a connected socket: both ends show their cards."""
    port = RdmaEnginePort(_introduce(fabric, sock, sizes, timeout_s))
    return EngineEnd(port, narrowing=narrowing, narrow_limit_bytes=narrow_limit_bytes)


def server_end(fabric: Fabric, sock: socket.socket, sizes: Sizes, *, timeout_s: float) -> ServerEnd:
    """The server's end, likewise."""
    return ServerEnd(RdmaServerPort(_introduce(fabric, sock, sizes, timeout_s)))


def _introduce(fabric: Fabric, sock: socket.socket, sizes: Sizes, timeout_s: float) -> Wire:
    try:
        wire = Wire(fabric, sock, sizes)
        sock.settimeout(timeout_s)
        _show_cards(wire.transport, sock)
    except BaseException:
        sock.close()  # the peer, who waits for our card, is not to wait for its deadline
        raise
    return wire


def _show_cards(transport: Transport, sock: socket.socket) -> None:
    card = transport.card
    sock.sendall(_LENGTH.pack(len(card)) + card)
    (size,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size))
    if size > _MAX_CARD_BYTES:
        raise LinkClosed(f"closed the link: the peer's card has {size} bytes; at most {_MAX_CARD_BYTES} are read")
    transport.connect(receive_exactly(sock, size))
