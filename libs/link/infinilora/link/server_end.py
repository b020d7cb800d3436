"""The server's end of a link: the other side of engine_end.py, where a step's calls are drawn."""

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from infinilora.link.frame import Flag, Header, Kind
from infinilora.link.layout import State
from infinilora.link.narrow import narrowed
from infinilora.link.ports import Program, ServerPort, rows_in
from infinilora.link.times import SiteTimes
from infinilora.protocol.errors import InfiniLoraError, Internal, WireError

_PLAN = int(Kind.PLAN)


@dataclass(slots=True)
class Call:
    """A frame from an engine. PLAN: `segments` int32 [n, 4], a copy. SITE: views, valid until reply or refuse.

    `rows` where it names its rows of the step: int32 [rows]. The ids and weights are then without what headed them.
    """

    header: Header
    segments: Tensor | None = None
    x: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None
    rows: Tensor | None = None

    @property
    def topk(self) -> int:
        """Ids of a row."""
        return self.header.topk - (self.rows is not None)


class ServerEnd:
    """The end of one serving thread: recv, then exactly one of reply and refuse for each SITE call."""

    def __init__(self, port: ServerPort) -> None:
        self._port = port
        self._is_owing = False
        self._wide = torch.empty(0, 0)

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
        x = rows_in(self._port.requests, offset, header, header.in_cols)
        if not topk:
            return Call(header, None, x)
        has_ids = header.flags & Flag.HAS_IDS
        ids_at = offset + header.ids_offset
        weights_at = ids_at + rows * topk * 4 if has_ids else ids_at
        ids = tensor(torch.int32, ids_at, rows, topk) if has_ids else None
        weights = tensor(torch.float32, weights_at, rows, topk) if header.flags & Flag.HAS_WEIGHTS else None
        if ids is not None and header.flags & Flag.HAS_ROWS:
            tail = None if weights is None else weights[:, 1:].contiguous()
            return Call(header, None, x, ids[:, 1:].contiguous(), tail, ids[:, 0].contiguous())
        return Call(header, None, x, ids, weights)

    def reply_buffer(self, call: Call) -> Tensor:
        """[rows, out_cols] in the link's own memory, paid for by the request. Write all of it, then `reply`.

        Where the call is narrow: beside it, narrowed by `reply`.
        """
        header = call.header
        if header.is_narrow:
            assert call.x is not None  # noqa: S101 - of a SITE
            self._wide = call.x.new_empty(header.rows, header.out_cols)
            return self._wide
        return self._port.replies.tensor(
            header.torch_dtype, self._port.reply_offset(header), header.rows, header.out_cols
        )

    def reply(self, call: Call) -> None:
        header = call.header
        if header.is_narrow:
            at = self._port.reply_offset(header)
            rows = self._port.replies.tensor(torch.uint8, at, header.rows, header.row_bytes(header.out_cols))
            rows.copy_(narrowed(self._wide))
        self._is_owing = False
        self._port.reply(header, Kind.REPLY, header.reply_bytes)

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
