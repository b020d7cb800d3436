"""What carries frames between the two ends of a link, and the call that it carries.

    port                    file        answers are taken    waits by
    native ring             ring.py     in any order         spin, then futex
    Python ring             pyring.py   in any order         polling
    TCP stream              tcp.py      in order             poll(2)

Ports know bytes, sequences and credit; the ends know tensors' shapes and steps.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from infinilora.link.errors import LinkClosed, LinkRefused
from infinilora.link.frame import HEADER_BYTES, Flag, Header, Kind
from infinilora.link.layout import Arena, State
from infinilora.link.narrow import narrowed, widened
from infinilora.link.times import SiteTimes
from infinilora.protocol.errors import InvalidRequest, WireError

TensorLayout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides in elements, dtype."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A site call of one shape: made once (`EngineEnd.prepare`), sent as often as it comes, once at a time.

    Of x and out it means `header.rows` rows from row `at` on, and of out the columns from `out_at` on. Layouts are
    those of the tensors that were checked last: another tensor laid out alike is not checked again.
    """

    header: Header
    """Of the call under way; step, layer and trace are filled in as it is sent."""
    at: int
    out_at: int
    chunk_rows: int
    chunks: int
    num_rows: int = 0
    """Of x; out must have as many."""
    x_layout: TensorLayout | None = None
    x_stride: int = 0
    """Bytes from row to row."""
    x_skip: int = 0
    """Bytes from the tensor's first element to the call's."""
    out_layout: TensorLayout | None = None
    out_stride: int = 0
    out_skip: int = 0
    x: Tensor | None = None
    """What the call under way sends: must stay unchanged until it was waited for or abandoned."""
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None
    first: int = 0
    sent: int = 0
    received: int = 0
    sent_at: float = 0.0
    settled: Tensor | None = None
    """The delta, where it had to be taken before anybody waited for it."""
    took_s: float = 0.0
    """From `send` until the whole delta was there."""
    waited_s: float = 0.0
    """Of that, what was spent waiting in `collect`: nothing else of the engine ran meanwhile."""
    done: bool = True
    """Whether nothing is under way."""
    can_narrow: bool = False
    """Whether its rows are wide enough, and its link one that narrows."""
    block: Any = None
    """The native port's own record of this ticket, and where it lies."""
    block_at: int = 0

    @property
    def rows(self) -> int:
        return self.header.rows

    @property
    def computed_s(self) -> tuple[float, float] | None:
        """When the server computed it, by its `time.monotonic`; None where the back-end is not told."""
        block = self.block
        return (block.began_ns * 1e-9, block.ended_ns * 1e-9) if block is not None and block.ended_ns else None

    def begin(self, step_id: int, layer: int, trace: bytes) -> None:
        """For ports that send in Python: a call is under way, with x the call's own rows as they travel."""
        self.header = self.header._replace(step_id=step_id, layer=layer).traced(trace)
        if self.x is not None:
            self.x = _cut(self.x, self.rows, self.header.in_cols, self.x_stride, self.x_skip)
            if self.header.is_narrow:
                self.x = narrowed(self.x)
        self.sent = self.received = 0
        self.waited_s = 0.0
        self.sent_at = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of a block as waiting, however it ends. For ports that wait in Python."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - started

    def rows_of(self, out: Tensor) -> Tensor:
        """The call's own rows and columns [rows, out_cols] of out, sharing its memory."""
        return _cut(out, self.rows, self.header.out_cols, self.out_stride, self.out_skip)

    def chunk(self, index: int) -> tuple[int, int]:
        """(row_start, rows) of a chunk, counted from the ticket's first row."""
        start = index * self.chunk_rows
        return start, min(self.chunk_rows, self.rows - start)

    def chunk_header(self, index: int, sequence: int, payload_bytes: int) -> Header:
        start, rows = self.chunk(index)
        last = Flag.LAST if index + 1 == self.chunks else 0
        return self.header._replace(
            flags=self.header.flags | last,
            sequence=sequence,
            row_start=self.header.row_start + start,
            rows=rows,
            payload_bytes=payload_bytes,
        )


def _cut(x: Tensor, rows: int, cols: int, stride: int, skip: int) -> Tensor:
    width = x.element_size()
    return x.as_strided((rows, cols), (stride // width, 1), x.storage_offset() + skip // width)


def rows_in(arena: Arena, offset: int, header: Header, cols: int) -> Tensor:
    """What a frame carries [header.rows, cols] in the rows' own dtype: a view of the arena, or a copy made wide."""
    if not header.is_narrow:
        return arena.tensor(header.torch_dtype, offset, header.rows, cols)
    return widened(arena.tensor(torch.uint8, offset, header.rows, header.row_bytes(cols)), cols, header.torch_dtype)


class EnginePort(Protocol):
    """Carries frames for an engine. All but `mark` are called from one thread; only collect and send_plan wait."""

    buffer_bytes: int
    takes_in_order: bool
    """Whether answers can only be taken in the order of the calls."""
    narrows: bool
    """Whether it carries narrowed rows."""

    def lay_out(self, ticket: Ticket) -> None:
        """The ticket is new, or its x or out are laid out otherwise than before."""
        ...

    def submit(self, ticket: Ticket, step_id: int, layer: int) -> None:
        """Begin a call, and send what there is room and credit for."""
        ...

    def collect(self, ticket: Ticket, out: Tensor, *, add: bool, timeout_s: float) -> float:
        """Send the rest, and put every row into out as the ticket says; the seconds since `submit`.

        `ticket.waited_s` says how many of them passed in here before the rows had come, errors included.

        LinkTimeout, LinkClosed, LinkRefused.
        """
        ...

    def send_plan(self, header: Header, body: bytes, *, timeout_s: float) -> None:
        """The site calls that follow have the plan's trace."""
        ...

    def abandon(self) -> None:
        """Answers to everything outstanding are dropped as they come, and counted as stale."""
        ...

    def mark(self, state: State) -> None:
        """Say to the peer, and to a waiter of this end, that this end is in `state`. Any thread."""
        ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def in_flight(self) -> int:
        """Chunks sent whose reply buffer has not been given back."""
        ...

    @property
    def stale(self) -> int: ...


class Program(Protocol):
    """Native code that can compute a site call: a function of the library (`Compute` in server_end.h) and its data."""

    @property
    def compute(self) -> int:
        """The function's address."""
        ...

    @property
    def address(self) -> int:
        """What it is called with."""
        ...


class ServerPort(Protocol):
    """Carries frames for a server, one at a time. All but `mark` are called from one thread."""

    buffer_bytes: int
    requests: Arena
    replies: Arena

    def use(self, program: Program, times: SiteTimes) -> bool:
        """Let `recv` answer by itself what the program computes, and count it; False where it cannot."""
        ...

    def recv(self, timeout_s: float) -> tuple[Header, int] | None:
        """The next frame's header, checked, and the offset of its payload in `requests`; LinkClosed at the end.

        With a program: the next frame that it does not answer.
        """
        ...

    def reply_offset(self, header: Header) -> int:
        """Where in `replies` the payload of the answer goes."""
        ...

    def write_reply(self, header: Header, body: bytes) -> None:
        """Put bytes where the answer's payload goes."""
        ...

    def reply(self, header: Header, kind: Kind, payload_bytes: int) -> None:
        """Send the answer and give the request's memory back."""
        ...

    def skip(self) -> None:
        """Give the request's memory back; there is no answer."""
        ...

    def mark(self, state: State) -> None: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def is_quarantined(self) -> bool: ...


def refusal(body: bytes | bytearray | memoryview) -> LinkRefused:
    """The error in an ERROR frame's payload."""
    return LinkRefused(msgspec.json.decode(body, type=WireError))


def checked(header: Header, port: ServerPort) -> Header:
    """The header of a frame from an engine, once its fields agree; LinkClosed, and the link shut, where not."""
    try:
        header.check(port.buffer_bytes)
    except InvalidRequest as error:
        port.mark(State.SHUT)
        raise LinkClosed(f"closed the link to a peer that broke its protocol: {error.message}") from error
    return header


def payload_at(frame_offset: int) -> int:
    return frame_offset + HEADER_BYTES
