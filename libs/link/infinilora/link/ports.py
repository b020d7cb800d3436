"""What carries frames between the two ends of a link, and the call that it carries.

    port                    file        answers are taken    waits by
    native ring             ring.py     in any order         spin, then futex
    Python ring             pyring.py   in any order         polling
    TCP stream              tcp.py      in order             poll(2)

Ports know bytes, sequences and credit; ends.py knows tensors' shapes and steps.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec
from torch import Tensor

from infinilora.link.errors import LinkClosed, LinkRefused
from infinilora.link.frame import HEADER_BYTES, Flag, Header, Kind
from infinilora.link.layout import Arena, State
from infinilora.link.times import SiteTimes
from infinilora.protocol.errors import InvalidRequest, WireError


@dataclass(slots=True, eq=False)
class Ticket:
    """A site call on its way. Its inputs must stay unchanged until it was waited for or abandoned.

    A port sends its chunks as buffers and credits allow: `sent` and `received` count them.
    """

    header: Header
    x: Tensor
    topk_ids: Tensor | None
    topk_weights: Tensor | None
    rows: int
    chunk_rows: int
    chunks: int
    first: int = 0
    sent: int = 0
    received: int = 0
    settled: Tensor | None = None
    """The delta, where it had to be taken before anybody waited for it."""
    done: bool = False
    native: object = None
    """The native port's own record of this call."""

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


class EnginePort(Protocol):
    """Carries frames for an engine. All but `mark` are called from one thread; only collect and send_plan wait."""

    buffer_bytes: int
    takes_in_order: bool
    """Whether answers can only be taken in the order of the calls."""

    def submit(self, ticket: Ticket) -> None:
        """Send what there is room and credit for."""
        ...

    def collect(self, ticket: Ticket, out: Tensor, *, add: bool, timeout_s: float) -> None:
        """Send the rest, and put every row into out [rows, out_cols]. LinkTimeout, LinkClosed, LinkRefused."""
        ...

    def send_plan(self, header: Header, body: bytes, *, timeout_s: float) -> None: ...

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
    """Native code that can compute a site call: a function of the library (`Compute` in ring.cpp) and its data."""

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
