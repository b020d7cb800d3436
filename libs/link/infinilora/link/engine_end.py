"""The engine's end of a link as the rest of the system sees it, whatever carries the frames.

    EngineEnd                             ServerEnd (server_end.py)
      send_plan(step_id, segments)  ->      recv() -> Call(PLAN)
      send(ticket, step_id, ...)    ->      recv() -> Call(SITE): x, topk as views of the link's memory
        (base product meanwhile)              kernels write reply_buffer(call)
      wait(ticket, y, add=True)     <-      reply(call)   or   refuse(call, error)

A ticket is prepared once for a shape and sent in every step that has it. A port (ports.py) carries frames; the ends
cut, check and account.
"""

import itertools
import struct
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from infinilora.link.errors import LinkClosed, LinkRefused
from infinilora.link.frame import NARROW, NO_TRACE, Flag, Header, Kind, PlanSegment, Run, rows_that_fit
from infinilora.link.layout import State
from infinilora.link.narrow import MIN_COLS, Narrowing, is_narrow
from infinilora.link.ports import EnginePort, Ticket
from infinilora.link.shapes import dtype_code, flat_rows, has_columns, route, wide_bytes
from infinilora.protocol.errors import Internal, InvalidRequest

PLAN_TIMEOUT_S = 1.0
NARROW_LIMIT_BYTES = 256 * 1024
"""Under `load`: more than this on its way goes narrow. Some 100 us of a 25 Gbit/s network; not measured on one."""


class EngineEnd:
    """The end of the step thread. A ticket is waited for at most once; `abandon` ends a step early."""

    def __init__(
        self, port: EnginePort, *, narrowing: Narrowing = "never", narrow_limit_bytes: int = NARROW_LIMIT_BYTES
    ) -> None:
        """`narrowing`: which calls go narrow, where the port can and both ends have agreed."""
        self._port = port
        self._narrowing = narrowing if port.narrows else "never"
        self._narrow_limit_bytes = narrow_limit_bytes
        self._outstanding: list[Ticket] = []
        self.takes_runs = False
        """Whether the server answers several runs of columns in one call. An older one does not."""

    def send_plan(self, step_id: int, segments: Sequence[PlanSegment], *, trace: bytes = NO_TRACE) -> None:
        """Begin a step: what was outstanding is abandoned; the site calls that follow belong to `step_id`."""
        self.abandon()
        body = struct.pack(f"<{4 * len(segments)}i", *itertools.chain.from_iterable(segments))
        if len(body) > self._port.buffer_bytes:
            raise InvalidRequest(f"a plan of {len(segments)} segments does not fit a link buffer")
        header = Header(kind=Kind.PLAN, step_id=step_id, rows=len(segments), payload_bytes=len(body), trace=trace)
        self._port.send_plan(header, body, timeout_s=PLAN_TIMEOUT_S)

    def prepare(self, shape: Header, *, at: int = 0, out_at: int = 0) -> Ticket:
        """A ticket for site calls of this shape, which says everything but step, layer and trace.

        Its rows are those from row `at` on of the x and out that it will be given, and its columns those from
        `out_at` on of out. InvalidRequest where one row does not fit a buffer.
        """
        width = shape.torch_dtype.itemsize
        request, reply = shape.in_cols * width + 8 * shape.topk, shape.out_cols * width
        fit = rows_that_fit(request, reply, self._port.buffer_bytes, has_gap=shape.topk > 0)
        ticket = Ticket(shape, at, out_at, fit, -(-shape.rows // fit))
        ticket.can_narrow = self._narrowing != "never" and min(shape.in_cols, shape.out_cols) >= MIN_COLS
        self._port.lay_out(ticket)
        return ticket

    def send(
        self,
        ticket: Ticket,
        step_id: int,
        layer: int,
        x: Tensor,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> None:
        """Send the ticket's rows of x [T, ...]. Never waits. A call may carry ids alone: x is [T, 0] then.

        What finds no room or credit now is sent by `wait`, so x must not change until then.
        """
        if not ticket.done:
            raise Internal("a site call was sent again before it was waited for")
        if ticket.x_layout != (x.shape, x.stride(), x.dtype):
            x = self._lay_out_x(ticket, x)
        if ticket.header.topk or topk_ids is not None:
            route(ticket, topk_ids, topk_weights)
        if ticket.can_narrow:
            self._set_width(ticket)
        ticket.x = x
        ticket.done = False
        self._outstanding.append(ticket)
        self._port.submit(ticket, step_id, layer)

    def _set_width(self, ticket: Ticket) -> None:
        """Decide whether the rows of the call that begins travel narrow."""
        sizes = {"call_bytes": wide_bytes(ticket), "waiting_bytes": sum(map(wide_bytes, self._outstanding))}
        narrows = is_narrow(self._narrowing, **sizes, limit_bytes=self._narrow_limit_bytes)
        dtype = ticket.header.dtype % NARROW + narrows * NARROW
        if dtype != ticket.header.dtype:
            ticket.header = ticket.header._replace(dtype=dtype)

    def _lay_out_x(self, ticket: Ticket, x: Tensor) -> Tensor:
        """Check x and note where the ticket's rows lie in it; a copy where its columns are not adjacent."""
        header, flat = ticket.header, flat_rows(x)
        if flat.shape[0] < ticket.at + header.rows or flat.shape[1] != header.in_cols or x.dtype != header.torch_dtype:
            raise InvalidRequest(
                f"a site call of rows {ticket.at} to {ticket.at + header.rows} and {header.in_cols} columns of "
                f"{header.torch_dtype}; x is {list(x.shape)} of {x.dtype}"
            )
        ticket.num_rows = flat.shape[0]
        ticket.x_stride = flat.stride(0) * flat.element_size()
        ticket.x_skip = ticket.at * ticket.x_stride
        is_view = flat is x or flat.data_ptr() == x.data_ptr()
        ticket.x_layout = (x.shape, x.stride(), x.dtype) if is_view else None
        ticket.out_layout = None
        self._port.lay_out(ticket)
        return x if is_view else flat

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
        in_slice: Run = (0, 0),
        out_slice: Run = (0, 0),
    ) -> Ticket:
        """Prepare and send a call that comes once: all rows of x, to be answered with [T, out_cols] of its dtype.

        With `out_slice`, out_cols are those of the slice. `row_start` is the step's row of x[0].
        """
        routed = topk_weights if topk_ids is None else topk_ids
        shape = Header(
            kind=Kind.SITE,
            flags=(topk_ids is not None) * Flag.HAS_IDS | (topk_weights is not None) * Flag.HAS_WEIGHTS,
            site=site,
            row_start=row_start,
            rows=x.shape[0],
            in_cols=x.shape[1:].numel(),
            out_cols=out_cols,
            in_begin=in_slice[0],
            in_end=in_slice[1],
            out_begin=out_slice[0],
            out_end=out_slice[1],
            topk=0 if routed is None else routed.shape[1],
            dtype=dtype_code(x.dtype),
        )
        ticket = self.prepare(shape)
        self.send(ticket, step_id, layer, x, topk_ids, topk_weights)
        return ticket

    def wait(self, ticket: Ticket, out: Tensor, *, deadline_s: float, add: bool) -> float:
        """Do out [T, ...] = delta, or += delta, chunk by chunk as it comes; at most `deadline_s` from now.

        Returns the seconds that the call took, from `send` on. Raises LinkTimeout (quarantine the link),
        LinkClosed, or LinkRefused (the step is abandoned).
        """
        if ticket.done:
            raise LinkClosed("this site call was abandoned or has been waited for")
        if ticket.out_layout != (out.shape, out.stride(), out.dtype):
            self._lay_out_out(ticket, out)
        if ticket.settled is None and (ticket.sent < ticket.chunks or self._port.takes_in_order):
            started = time.monotonic()
            self._settle_before(ticket, started + deadline_s, out.device)
            deadline_s = max(deadline_s - (time.monotonic() - started), 0.0)
        if ticket.settled is None:
            self._collect(ticket, out, deadline_s, add=add)
        else:
            target = ticket.rows_of(out)
            target.add_(ticket.settled) if add else target.copy_(ticket.settled)
            ticket.settled = None
        ticket.done = True
        ticket.x = None
        self._outstanding.remove(ticket)
        return ticket.took_s

    def _lay_out_out(self, ticket: Ticket, out: Tensor) -> None:
        """Check out and note where the ticket's rows and columns lie in it."""
        header, flat = ticket.header, out if out.dim() == 2 else out.flatten(1)
        if flat.shape[0] != ticket.num_rows or not has_columns(ticket, flat.shape[1]):
            raise InvalidRequest(f"the delta is [{ticket.num_rows}, {header.out_cols}]; out is {list(out.shape)}")
        if (flat.stride(1) != 1 and flat.shape[1] > 1) or (flat is not out and flat.data_ptr() != out.data_ptr()):
            raise InvalidRequest(f"out must have adjacent columns; its strides are {out.stride()}")
        dtype_code(out.dtype)
        ticket.out_layout = (out.shape, out.stride(), out.dtype)
        ticket.out_stride = flat.stride(0) * flat.element_size()
        ticket.out_skip = ticket.at * ticket.out_stride + ticket.out_at * flat.element_size()
        self._port.lay_out(ticket)

    def _settle_before(self, ticket: Ticket, deadline: float, device: torch.device) -> None:
        """Take the answers of earlier calls out of the link: they hold the room that this one needs."""
        for earlier in self._outstanding[: self._outstanding.index(ticket)]:
            if earlier.settled is None:
                held = torch.empty(
                    earlier.rows, earlier.header.out_cols, dtype=earlier.header.torch_dtype, device=device
                )
                earlier.out_layout = (held.shape, held.stride(), held.dtype)
                earlier.out_stride, earlier.out_skip = earlier.header.out_cols * held.element_size(), 0
                self._port.lay_out(earlier)
                self._collect(earlier, held, max(deadline - time.monotonic(), 0.0), add=False)
                earlier.settled, earlier.out_layout = held, None

    def _collect(self, ticket: Ticket, out: Tensor, timeout_s: float, *, add: bool) -> None:
        try:
            ticket.took_s = self._port.collect(ticket, out, add=add, timeout_s=timeout_s)
        except LinkRefused:
            self.abandon()
            raise

    def verify(self) -> None:
        """Call it before what the waits wrote is used: raises LinkError where a delta did not come after all.

        On a host a wait returns with its delta, so that nothing is left to be said.
        """

    def abandon(self) -> None:
        """Nobody waits for what is outstanding; answers still to come are stale. The step is over."""
        if self._outstanding:
            for ticket in self._outstanding:
                ticket.done = True
                ticket.x = ticket.settled = None
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
    def narrowing(self) -> Narrowing:
        """Which calls' rows travel as eight-bit integers."""
        return self._narrowing

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
