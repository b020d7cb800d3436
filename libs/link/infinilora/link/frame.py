"""What crosses a link: one header layout for every back-end, and how a site call is cut into frames.

    PLAN    engine -> server   once a step: which rows belong to which slot
    SITE    engine -> server   a chunk of rows of one site's input; carries the credit for its answer
    REPLY   server -> engine   the delta of that chunk
    ERROR   server -> engine   instead of a REPLY: a WireError as JSON

A SITE payload is `x [rows, in_cols]`, then, on the next 64-byte boundary where the site is routed,
`topk_ids int32 [rows, topk]` and `topk_weights fp32 [rows, topk]`. With HAS_ROWS the call is of some rows of the step,
in order: the first id of each is its row (`row_start` says nothing), the first weight is nothing. A REPLY's is
`[rows, out_cols]` of the same dtype. Where the dtype says NARROW too, the rows of both are narrowed (narrow.py). The
link does not know what a site means: `[k, f]` of a row is flattened into its columns.
"""

import enum
import itertools
import mmap
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from infinilora.link import narrow
from infinilora.protocol.errors import InvalidRequest

HEADER_BYTES = 128
ALIGN = 64
NO_TRACE = bytes(24)

MAX_RUNS = 3
"""Of columns in one call: those of q, k and v. They lie where the trace would, which a call's plan has too."""

HEADER_FORMAT = "<8xIIQQIIIIIIIIIIIIQ8x24s8x"
"""The fields of `Header` in order. What is skipped is the port's own: its word, and when an answer was computed."""

_HEADER = struct.Struct(HEADER_FORMAT)
_RUNS = struct.Struct(f"<{2 * MAX_RUNS}I")
_SEGMENT_BYTES = 16


class Kind(enum.IntEnum):
    """What a frame is; see the table above."""

    PLAN = 1
    SITE = 2
    REPLY = 3
    ERROR = 4


class Flag:
    """Bits of a header. LAST: the last chunk of its site call. HAS_IDS, HAS_WEIGHTS: what follows x in the payload.

    HAS_ROWS: the ids begin with rows. HAS_RUNS: `trace` holds the runs of output columns that are asked for.
    """

    LAST = 1
    HAS_IDS = 2
    HAS_WEIGHTS = 4
    HAS_ROWS = 8
    HAS_RUNS = 16
    ROUTED = HAS_IDS | HAS_WEIGHTS


DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
"""A dtype's number on the wire is its place here."""

NARROW = len(DTYPES)
"""Added to the number of a dtype: rows travel as eight-bit integers, and are of that dtype at both ends."""

DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


Run = tuple[int, int]
"""Columns [begin, end) of a site."""


class PlanSegment(NamedTuple):
    """Rows [row_start, row_start + rows) of the step belong to this tenancy of this slot."""

    row_start: int
    rows: int
    slot: int
    slot_generation: int


class Header(NamedTuple):
    """One frame's header. Slices are `[begin, end)` of a sharded site's columns; (0, 0) means all of them.

    `sequence` numbers the SITE chunks of a link; an answer carries the number of what it answers.
    """

    kind: int
    flags: int = 0
    step_id: int = 0
    sequence: int = 0
    layer: int = 0
    site: int = 0
    row_start: int = 0
    rows: int = 0
    in_cols: int = 0
    out_cols: int = 0
    in_begin: int = 0
    in_end: int = 0
    out_begin: int = 0
    out_end: int = 0
    topk: int = 0
    dtype: int = 0
    payload_bytes: int = 0
    trace: bytes = NO_TRACE

    def pack(self) -> bytes:
        return _HEADER.pack(*self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype % NARROW]

    @property
    def is_narrow(self) -> bool:
        return self.dtype >= NARROW

    def row_bytes(self, cols: int) -> int:
        """Of `cols` columns, as they travel."""
        return narrow.row_bytes(cols) if self.is_narrow else cols * self.torch_dtype.itemsize

    @property
    def is_last(self) -> bool:
        return bool(self.flags & Flag.LAST)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of the site's columns that are asked for, side by side in the answer; none: all columns."""
        if not self.flags & Flag.HAS_RUNS:
            return ((self.out_begin, self.out_end),) if self.out_end else ()
        edges = _RUNS.unpack(self.trace)
        return tuple(itertools.takewhile(lambda run: run[1], zip(edges[::2], edges[1::2], strict=True)))

    def asking(self, runs: Sequence[Run]) -> "Header":
        """This shape for some runs of its columns alone, at most MAX_RUNS. An older server knows one run only."""
        out_cols = sum(end - begin for begin, end in runs)
        if len(runs) == 1:
            return self._replace(out_cols=out_cols, out_begin=runs[0][0], out_end=runs[0][1])
        edges = [*itertools.chain.from_iterable(runs), *itertools.repeat(0, 2 * (MAX_RUNS - len(runs)))]
        return self._replace(out_cols=out_cols, flags=self.flags | Flag.HAS_RUNS, trace=_RUNS.pack(*edges))

    def traced(self, trace: bytes) -> "Header":
        """With the trace of its step; without, where its runs lie there."""
        return self if self.flags & Flag.HAS_RUNS else self._replace(trace=trace)

    @property
    def ids_offset(self) -> int:
        """Where topk_ids begin in the payload."""
        return aligned(self.rows * self.row_bytes(self.in_cols))

    @property
    def reply_bytes(self) -> int:
        return self.rows * self.row_bytes(self.out_cols)

    def check(self, buffer_bytes: int) -> None:
        """Raise unless the fields of a frame from a peer agree with one another and with the buffer.

        The native library checks the same (`fits` in native/frame.h) where it receives.
        """
        if self.dtype >= 2 * NARROW:
            raise InvalidRequest(f"link frame has dtype {self.dtype}; known are 0 to {2 * NARROW - 1}")
        wanted = self._wanted_bytes()
        if wanted != self.payload_bytes or max(wanted, self.reply_bytes) > buffer_bytes:
            raise InvalidRequest(
                f"link frame of kind {self.kind} says {self.payload_bytes} payload bytes for {self.rows} rows of "
                f"{self.in_cols} -> {self.out_cols} columns; wanted {wanted}, and at most {buffer_bytes} each way"
            )

    def _wanted_bytes(self) -> int:
        if self.kind == Kind.PLAN:
            return self.rows * _SEGMENT_BYTES
        if self.kind != Kind.SITE:
            raise InvalidRequest(f"link frame of kind {self.kind}; wanted PLAN or SITE")
        if self.flags & Flag.HAS_ROWS and not (self.flags & Flag.HAS_IDS and self.topk > 1):
            raise InvalidRequest(f"link frame names rows with flags {self.flags} and topk {self.topk}; wanted ids too")
        routed = bool(self.flags & Flag.HAS_IDS) + bool(self.flags & Flag.HAS_WEIGHTS)
        if not routed:
            return self.rows * self.row_bytes(self.in_cols)
        return self.ids_offset + routed * self.rows * self.topk * 4


def unpack_header(data: bytes | bytearray | memoryview | mmap.mmap, offset: int = 0) -> Header:
    return Header._make(_HEADER.unpack_from(data, offset))


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


def rows_that_fit(request_row_bytes: int, reply_row_bytes: int, buffer_bytes: int, *, has_gap: bool) -> int:
    """How many rows one request buffer and one reply buffer can both hold; InvalidRequest where not even one.

    `has_gap`: ids or weights follow x in a request, on the next boundary.
    """
    gap_bytes = ALIGN if has_gap else 0
    fit = min((buffer_bytes - gap_bytes) // max(request_row_bytes, 1), buffer_bytes // max(reply_row_bytes, 1))
    if fit < 1:
        raise InvalidRequest(
            f"one row is {request_row_bytes} bytes out and {reply_row_bytes} back; a link buffer holds {buffer_bytes}: "
            f"set the link's buffer size to at least {max(request_row_bytes + gap_bytes, reply_row_bytes)}"
        )
    return fit


def column_slices(columns: int, item_bytes: int, buffer_bytes: int) -> list[Run]:
    """Cut a reply row that is wider than a buffer into `[begin, end)`, as even as can be; one slice if it fits."""
    pieces = -(-columns * item_bytes // buffer_bytes)
    edges = [columns * i // pieces for i in range(pieces + 1)]
    return list(itertools.pairwise(edges))
