"""The `cuda` back-end: payloads go from kernel to kernel through memory of both ends' GPUs; headers go beside them.

    engine's stream        push x ----------------------> server's region      (kernels/mailbox.py)
    engine's host          header --- control stream --->  server's host: launches take, the deltas' kernels, push
    engine's stream        take, joined with the add <---- engine's region

Neither host waits for a payload: each only launches, and the kernels wait for one another. So `wait` returns before
the delta is there, and what a step computed counts only once `CudaEngineEnd.verify` has returned. Where two processes
take turns on one GPU (no MPS) a waiting kernel would wait for a turn: there the link is `signal="host"`, and each
host tells the other when its stream has written.
"""

import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from infinilora.kernels.mailbox import MISPLACED, NUM_COUNTERS, REFUSED, TIMED_OUT, Mailbox, region_bytes
from infinilora.link.beside import EngineBeside, ServerBeside
from infinilora.link.control import MAX_BODY_BYTES, ControlStream, check_plan, receive_exactly
from infinilora.link.cuda_driver import HANDLE_BYTES, Region, Regions
from infinilora.link.engine_end import EngineEnd
from infinilora.link.errors import LinkClosed, LinkError, LinkRefused, LinkTimeout
from infinilora.link.frame import Header, Kind, aligned
from infinilora.link.layout import Arena, State
from infinilora.link.outstanding import Outstanding
from infinilora.link.ports import Ticket, checked, refusal
from infinilora.link.server_end import ServerEnd
from infinilora.link.staging import DEVICE_AT, Staging
from infinilora.protocol.errors import Internal, InvalidRequest

PATIENCE_S = 5.0
"""How long a kernel waits for a payload whose header is there, or for room: a peer that needs longer is dead."""

_WORD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What both ends of a link must agree on."""

    num_buffers: int
    buffer_bytes: int
    is_host_signalled: bool = False


class Wire:
    """One end of an open link: its mailbox, its control stream, and the memory behind both."""

    def __init__(self, regions: Regions, region: Region, peer: int, sock: socket.socket, shape: Shape) -> None:
        memory = regions.memory
        self.memory = memory
        self.shape = shape
        self.control = ControlStream(sock)
        self.notes = memory.notes()
        self.mailbox = Mailbox(
            region=region.address,
            peer=peer,
            num_buffers=shape.num_buffers,
            buffer_bytes=shape.buffer_bytes,
            sent=torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=memory.device),
            taken=torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=memory.device),
            notes=self.notes.data_ptr(),
            limit_ns=int(PATIENCE_S * 1e9),
            num_programs=memory.num_programs,
        )
        memory.quiesce()  # zeros first: launches may be on another stream than this thread's
        weakref.finalize(self, _retire, regions, region, peer, self.control)


def _retire(regions: Regions, region: Region, peer: int, control: ControlStream) -> None:
    control.mark(State.SHUT)
    control.free()
    regions.retire(region, peer, control.sock)


class CudaEnginePort(EngineBeside):
    """The engine's side. Launches on the thread's current stream, which must be the same for all of a link's calls."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire.control, num_buffers=wire.shape.num_buffers, buffer_bytes=wire.shape.buffer_bytes)
        self._wire = wire
        self._mailbox = wire.mailbox
        self._nothing = torch.empty(0, 1, dtype=torch.float32, device=wire.memory.device)
        self._captured: list[Header] | None = None

    @override
    def _send(self) -> None:
        """Launch all that there is credit for. A broken link is told of by who waits."""
        while self._control.is_alive and (chunk := self._calls.next_chunk()):
            ticket, part, header = chunk
            assert ticket.x is not None  # noqa: S101 - a ticket that is sent has rows
            ids = None if ticket.topk_ids is None else ticket.topk_ids[part]
            weights = None if ticket.topk_weights is None else ticket.topk_weights[part]
            self._mailbox.push(ticket.x[part], ids, weights, ids_at=header.ids_offset)
            if self._wire.shape.is_host_signalled:
                self._wire.memory.synchronize()
            if self._captured is not None:
                self._captured.append(header)
                continue
            try:
                self._control.send(header)
            except LinkClosed:
                self._control.mark(State.SHUT)

    def collect(self, ticket: Ticket, out: Tensor, *, add: bool, timeout_s: float) -> float:
        """Launch the joins of the whole call. Returns what the host took: the device may be far behind."""
        deadline = time.monotonic() + timeout_s
        target, limit_ns = ticket.rows_of(out), int(timeout_s * 1e9)
        while ticket.received < ticket.chunks:
            self._send()
            if not self._control.is_alive:
                raise LinkClosed("the link is closed")
            sequence, part = self._calls.next_answer(ticket)
            if self._wire.shape.is_host_signalled:
                self._await_answer(sequence, deadline, is_stale=part is None)
            if part is None:
                self._mailbox.take(self._nothing, torch.float32, add=False, limit_ns=limit_ns)
            else:
                self._mailbox.take(target[part], ticket.header.torch_dtype, add=add, limit_ns=limit_ns)
        return time.monotonic() - ticket.sent_at

    def _await_answer(self, sequence: int, deadline: float, *, is_stale: bool) -> None:
        frame = self._control.receive(max(deadline - time.monotonic(), 0.0))
        if frame is None:
            raise LinkTimeout("the LoRA server did not answer by the deadline")
        header, body = frame
        if header.sequence != sequence:
            raise LinkError("the peer answered with a frame that does not belong to its request")
        if header.kind == Kind.ERROR and not is_stale:
            self._mailbox.take(self._nothing, torch.float32, add=False)
            raise refusal(body)

    @contextmanager
    def capture(self) -> Iterator[list[Header]]:
        if self._wire.shape.is_host_signalled:
            raise InvalidRequest("a link that the hosts signal cannot be captured: every call waits for a stream")
        calls, self._calls = self._calls, Outstanding(self._wire.shape.num_buffers)
        headers: list[Header] = []
        self._captured = headers
        try:
            yield headers
            if self._calls.in_flight:
                raise Internal(f"{self._calls.in_flight} captured site calls were never waited for")
        finally:
            self._calls, self._captured = calls, None

    def announce(self, headers: Sequence[Header], step_id: int) -> None:
        for _ in range(self._calls.drop_stale()):
            self._mailbox.take(self._nothing, torch.float32, add=False)
        if self._calls.in_flight:
            raise Internal(f"{self._calls.in_flight} site calls are under way; a captured step comes after them")
        numbers = self._calls.number(len(headers))
        self._control.send_headers(
            header._replace(step_id=step_id, sequence=number).traced(self._trace)
            for header, number in zip(headers, numbers, strict=True)
        )

    def verify(self) -> None:
        """Wait for the launches so far; raise what their waits met. What they wrote counts only if this returns."""
        self._wire.memory.synchronize()
        if self._wire.notes[MISPLACED]:
            raise LinkError("the peer answered with a frame that does not belong to its request")
        if self._wire.notes[TIMED_OUT]:
            raise LinkTimeout(f"the LoRA server did not send message {int(self._wire.notes[TIMED_OUT])} in time")
        if refused := int(self._wire.notes[REFUSED]):
            self._wire.notes[REFUSED] = 0
            raise self._refusal_of(refused - 1)

    def _refusal_of(self, sequence: int) -> LinkRefused:
        """The server's words about a call; those about earlier ones, which nobody waits for, are read over."""
        while frame := self._control.receive(PATIENCE_S):
            header, body = frame
            if header.kind == Kind.ERROR and header.sequence >= sequence:
                return refusal(body)
        raise LinkError("the LoRA server refused a site call and did not say why")


class CudaEngineEnd(EngineEnd):
    """An engine's end whose waits only launch: `verify` ends a step."""

    def __init__(self, port: CudaEnginePort) -> None:
        super().__init__(port)
        self._cuda = port

    def capture(self) -> AbstractContextManager[list[Header]]:
        """Inside, nothing is sent: what is submitted and waited for is meant for a CUDA graph.

        The headers are for `announce`, which goes before each replay, after the step's plan.
        """
        return self._cuda.capture()

    def announce(self, headers: Sequence[Header], step_id: int) -> None:
        """Tell the server of the calls that the next replay of a captured step will make."""
        self._cuda.announce(headers, step_id)

    @override
    def verify(self) -> None:
        """Wait for the launches so far: raises LinkTimeout or LinkRefused if a delta did not come.

        Until it has returned, nothing that the step computed may be told.
        """
        try:
            self._cuda.verify()
        except LinkError:
            self.abandon()
            raise


class CudaServerPort(ServerBeside):
    """The server's side, of one thread, which launches on a stream of its own from its first `recv` on."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire.control, buffer_bytes=wire.shape.buffer_bytes)
        self._wire = wire
        self._mailbox = wire.mailbox
        size = aligned(self.buffer_bytes)
        self._plan = bytearray(MAX_BODY_BYTES)
        self.requests: Arena = Staging(self._plan, torch.empty(size, dtype=torch.uint8, device=wire.memory.device))
        self.replies: Arena = Staging(bytearray(_WORD), torch.empty(size, dtype=torch.uint8, device=wire.memory.device))
        self._has_stream = False

    def recv(self, timeout_s: float) -> tuple[Header, int] | None:
        if not self._has_stream:
            self._wire.memory.use_own_stream()
            self._has_stream = True
        if self._wire.notes[TIMED_OUT] or self._wire.notes[MISPLACED]:
            self.mark(State.SHUT)
            raise LinkClosed("closed the link: the engine announced a payload and did not send it")
        frame = self._control.receive(timeout_s)
        if frame is None:
            return None
        header, body = frame
        if header.kind == Kind.PLAN:
            check_plan(header, body, self._control)
            self._plan[: len(body)] = body
            return header, 0
        self._control.look()
        if not self.is_alive:  # an engine that gave up may have announced what it never sent: nothing waits for that
            raise LinkClosed("the peer closed the link")
        header = checked(header, self)
        words = -(-header.payload_bytes // _WORD)
        staged = self.requests.tensor(torch.int32, DEVICE_AT, 1, words)
        self._mailbox.take(staged, torch.int32, add=False)
        return header, DEVICE_AT

    def reply_offset(self, header: Header) -> int:  # noqa: ARG002 - one buffer serves every header
        return DEVICE_AT

    def reply(self, header: Header, kind: Kind, payload_bytes: int) -> None:
        """Launch the answer. A refusal is a message without payload, and goes in words beside it."""
        is_refused = kind == Kind.ERROR
        words = self.replies.tensor(torch.int32, DEVICE_AT, 1, 0 if is_refused else -(-payload_bytes // _WORD))
        self._mailbox.push(words, status=int(is_refused), tag=header.sequence)
        if self._wire.shape.is_host_signalled:
            self._wire.memory.synchronize()
        if is_refused or self._wire.shape.is_host_signalled:
            body = self._refusal if is_refused else b""
            self._control.send(header._replace(kind=kind, payload_bytes=len(body) if is_refused else 0), body)


def lend(regions: Regions, shape: Shape) -> Region:
    """What an end allocates before it opens a link."""
    return regions.lend(region_bytes(shape.num_buffers, shape.buffer_bytes))


def engine_end(regions: Regions, sock: socket.socket, handle: bytes, shape: Shape) -> CudaEngineEnd:
    """The engine's end, on a socket that its server has accepted: maps the server's region, lends its own."""
    region = lend(regions, shape)
    return CudaEngineEnd(CudaEnginePort(_open(regions, region, sock, handle, shape, say=region.handle)))


def server_end(regions: Regions, region: Region, sock: socket.socket, shape: Shape, *, timeout_s: float) -> ServerEnd:
    """The server's end, on the socket of the engine that was told of `region`."""
    sock.settimeout(timeout_s)
    try:
        handle = receive_exactly(sock, HANDLE_BYTES)
    except LinkClosed:
        regions.retire(region, None, sock)
        raise
    return ServerEnd(CudaServerPort(_open(regions, region, sock, handle, shape)))


def _open(
    regions: Regions, region: Region, sock: socket.socket, handle: bytes, shape: Shape, *, say: bytes = b""
) -> Wire:
    try:
        peer = regions.memory.map(handle)
        sock.sendall(say)
    except BaseException:
        regions.retire(region, None, sock)
        raise
    return Wire(regions, region, peer, sock, shape)
