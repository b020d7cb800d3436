"""The two ends of a link as the rest of the system sees them, whatever carries the frames.

    engine                                server
      send_plan(step_id, segments)  ->      recv() -> Call(PLAN)
      ticket = submit(layer, ...)   ->      recv() -> Call(SITE): x, topk as views of the link's memory
        (base product meanwhile)              kernels write reply_buffer(call)
      wait(ticket, y, add=True)     <-      reply(call)   or   refuse(call, error)

A port (ports.py) carries frames; these classes cut, check and account.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from infinilora.link.errors import LinkClosed, LinkRefused
from infinilora.link.frame import (
    DTYPE_CODES,
    DTYPES,
    NO_TRACE,
    Flag,
    Header,
    Kind,
    PlanSegment,
    rows_that_fit,
)
from infinilora.link.layout import State
from infinilora.link.ports import EnginePort, Program, ServerPort, Ticket
from infinilora.link.times import SiteTimes
from infinilora.protocol.errors import InfiniLoraError, Internal, InvalidRequest, WireError

PLAN_TIMEOUT_S = 1.0
_SITE, _PLAN = int(Kind.SITE), int(Kind.PLAN)


class EngineEnd:
    """The end of the step thread. A ticket is waited for at most once; `abandon` ends a step early."""

    def __init__(self, port: EnginePort) -> None:
        self._port = port
        self._outstanding: list[Ticket] = []
        self._fits: dict[tuple[torch.dtype, int, int, int], int] = {}
        self._trace = NO_TRACE

    def send_plan(self, step_id: int, segments: Sequence[PlanSegment], *, trace: bytes = NO_TRACE) -> None:
        """Begin a step: what was outstanding is abandoned; the site calls that follow belong to `step_id`."""
        self.abandon()
        body = torch.tensor(segments, dtype=torch.int32).reshape(-1, 4).numpy().tobytes()
        if len(body) > self._port.buffer_bytes:
            raise InvalidRequest(f"a plan of {len(segments)} segments does not fit a link buffer")
        self._trace = trace
        header = Header(kind=Kind.PLAN, step_id=step_id, rows=len(segments), payload_bytes=len(body), trace=trace)
        self._port.send_plan(header, body, timeout_s=PLAN_TIMEOUT_S)

    def submit(  # noqa: PLR0913 - the facts of a site call
        self,
        step_id: int,
        layer: int,
        site: int,
        x: Tensor,
        out_cols: int,
        *,
        row_start: int = 0,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
        in_slice: tuple[int, int] = (0, 0),
        out_slice: tuple[int, int] = (0, 0),
    ) -> Ticket:
        """Send the rows of x [T, ...] to be answered with [T, out_cols] of the same dtype. Never waits.

        With `out_slice`, out_cols are those of the slice. A call may carry ids alone: x is [T, 0] then.

        `row_start` is the step's row of x[0]. What finds no room or credit now is sent by `wait`, so x must
        not change until then.
        """
        flat = _rows(x)
        rows, in_cols = flat.shape
        topk, flags = 0, 0
        if topk_ids is not None:
            topk, flags, topk_ids = topk_ids.shape[1], Flag.HAS_IDS, _rows(topk_ids.to(torch.int32))
        if topk_weights is not None:
            topk, flags = topk_weights.shape[1], flags | Flag.HAS_WEIGHTS
            topk_weights = _rows(topk_weights.to(torch.float32))
        chunk_rows = self._chunk_rows(x.dtype, in_cols, out_cols, topk)
        header = Header._make(
            (_SITE, flags, step_id, 0, layer, site, row_start, rows, in_cols, out_cols,
             *in_slice, *out_slice, topk, DTYPE_CODES[x.dtype], 0, self._trace)
        )  # fmt: skip
        ticket = Ticket(header, flat, topk_ids, topk_weights, rows, chunk_rows, -(-rows // chunk_rows))
        self._outstanding.append(ticket)
        self._port.submit(ticket)
        return ticket

    def _chunk_rows(self, dtype: torch.dtype, in_cols: int, out_cols: int, topk: int) -> int:
        """The same few shapes come back in every step: worked out once."""
        shape = (dtype, in_cols, out_cols, topk)
        known = self._fits.get(shape)
        if known is None:
            if dtype not in DTYPE_CODES:
                raise InvalidRequest(f"a link carries {', '.join(map(str, DTYPE_CODES))}; x is {dtype}")
            width = dtype.itemsize
            known = rows_that_fit(in_cols * width + 8 * topk, out_cols * width, self._port.buffer_bytes)
            self._fits[shape] = known
        return known

    def wait(self, ticket: Ticket, out: Tensor, *, deadline_s: float, add: bool) -> None:
        """Do out [T, ...] = delta, or += delta, chunk by chunk as it comes; at most `deadline_s` from now.

        Raises LinkTimeout (quarantine the link), LinkClosed, or LinkRefused (the step is abandoned).
        """
        if ticket.done:
            raise LinkClosed("this site call was abandoned or has been waited for")
        target = _rows_in_place(out, ticket.rows, ticket.header.out_cols)
        if ticket.settled is None and (ticket.sent < ticket.chunks or self._port.takes_in_order):
            started = time.monotonic()
            self._settle_before(ticket, started + deadline_s)
            deadline_s = max(deadline_s - (time.monotonic() - started), 0.0)
        if ticket.settled is None:
            self._collect(ticket, target, deadline_s, add=add)
        else:
            target.add_(ticket.settled) if add else target.copy_(ticket.settled)
        ticket.done = True
        self._outstanding.remove(ticket)

    def _settle_before(self, ticket: Ticket, deadline: float) -> None:
        """Take the answers of earlier calls out of the link: they hold the room that this one needs."""
        for earlier in self._outstanding[: self._outstanding.index(ticket)]:
            if earlier.settled is None:
                held = torch.empty(earlier.rows, earlier.header.out_cols, dtype=earlier.x.dtype)
                self._collect(earlier, held, max(deadline - time.monotonic(), 0.0), add=False)
                earlier.settled = held

    def _collect(self, ticket: Ticket, target: Tensor, timeout_s: float, *, add: bool) -> None:
        try:
            self._port.collect(ticket, target, add=add, timeout_s=timeout_s)
        except LinkRefused:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Nobody waits for what is outstanding; answers still to come are stale. The step is over."""
        if self._outstanding:
            for ticket in self._outstanding:
                ticket.done = True
            self._outstanding.clear()
            self._port.abandon()

    def quarantine(self) -> None:
        """After a missed deadline: the peer may still write here, so this pair is never used again."""
        self.abandon()
        self._port.mark(State.QUARANTINED)

    def close(self) -> None:
        """Shut this end and wake a waiter. Any thread; memory goes when the last view of it does."""
        self._port.mark(State.SHUT)

    @property
    def buffer_bytes(self) -> int:
        """The most that a chunk may take, each way."""
        return self._port.buffer_bytes

    @property
    def is_alive(self) -> bool:
        return self._port.is_alive

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def in_flight(self) -> int:
        """Chunks whose reply buffers are still lent out, stale ones included."""
        return self._port.in_flight

    @property
    def stale(self) -> int:
        """Answers that came for abandoned calls and were dropped."""
        return self._port.stale


@dataclass(slots=True)
class Call:
    """A frame from an engine. PLAN: `segments` int32 [n, 4], a copy. SITE: views, valid until reply or refuse."""

    header: Header
    segments: Tensor | None = None
    x: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None


class ServerEnd:
    """The end of one serving thread: recv, then exactly one of reply and refuse for each SITE call."""

    def __init__(self, port: ServerPort) -> None:
        self._port = port
        self._is_owing = False

    def use(self, program: Program, times: SiteTimes) -> bool:
        """From now on `recv` answers by itself what `program` computes; False where this back-end cannot."""
        return self._port.use(program, times)

    def recv(self, timeout_s: float) -> Call | None:
        """The next call, or None when none came in time. LinkClosed when no more will come."""
        if self._is_owing:
            raise Internal("a link's next call was asked for before the last one was answered")
        frame = self._port.recv(timeout_s)
        if frame is None:
            return None
        header, offset = frame
        tensor = self._port.requests.tensor
        if header.kind == _PLAN:
            segments = tensor(torch.int32, offset, header.rows, 4).clone()
            self._port.skip()
            return Call(header, segments)
        self._is_owing = True
        rows, topk = header.rows, header.topk
        x = tensor(DTYPES[header.dtype], offset, rows, header.in_cols)
        if not topk:
            return Call(header, None, x)
        has_ids = header.flags & Flag.HAS_IDS
        ids_at = offset + header.ids_offset
        weights_at = ids_at + rows * topk * 4 if has_ids else ids_at
        return Call(
            header,
            x=x,
            topk_ids=tensor(torch.int32, ids_at, rows, topk) if has_ids else None,
            topk_weights=tensor(torch.float32, weights_at, rows, topk) if header.flags & Flag.HAS_WEIGHTS else None,
        )

    def reply_buffer(self, call: Call) -> Tensor:
        """[rows, out_cols] in the link's own memory, paid for by the request. Write all of it, then `reply`."""
        header = call.header
        return self._port.replies.tensor(
            header.torch_dtype, self._port.reply_offset(header), header.rows, header.out_cols
        )

    def reply(self, call: Call) -> None:
        self._is_owing = False
        self._port.reply(call.header, Kind.REPLY, call.header.reply_bytes)

    def refuse(self, call: Call, error: InfiniLoraError | WireError) -> None:
        """Answer a SITE call with an error; the engine's wait raises LinkRefused with it."""
        wire = error if isinstance(error, WireError) else error.to_wire()
        body = msgspec.json.encode(wire)
        if len(body) > self._port.buffer_bytes:
            body = msgspec.json.encode(WireError(code=wire.code, message="", retryable=wire.retryable))
        self._is_owing = False
        self._port.write_reply(call.header, body)
        self._port.reply(call.header, Kind.ERROR, len(body))

    def close(self) -> None:
        """Shut this end and wake a waiter. Any thread."""
        self._port.mark(State.SHUT)

    @property
    def is_alive(self) -> bool:
        return self._port.is_alive

    @property
    def is_quarantined(self) -> bool:
        """Whether the engine gave this pair up after a missed deadline."""
        return self._port.is_quarantined


def _rows(x: Tensor) -> Tensor:
    """Return x [T, ...] as [T, cols] with adjacent columns; a view where it can be one."""
    flat = x if x.dim() == 2 else x.flatten(1)
    return flat if flat.stride(1) == 1 or flat.shape[1] <= 1 else flat.contiguous()


def _rows_in_place(out: Tensor, rows: int, cols: int) -> Tensor:
    """Return out [T, ...] as [T, cols], sharing its memory."""
    flat = out if out.dim() == 2 else out.flatten(1)
    if flat.shape != (rows, cols):
        raise InvalidRequest(f"the delta is [{rows}, {cols}]; out is {list(out.shape)}")
    if (flat.stride(1) != 1 and cols > 1) or (flat is not out and flat.data_ptr() != out.data_ptr()):
        raise InvalidRequest(f"out must have adjacent columns; its strides are {out.stride()}")
    return flat
