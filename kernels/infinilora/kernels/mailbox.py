"""Messages between two processes whose *kernels* write and wait: the device side of the `cuda` link.

    sender                                                receiver
    wait until the receiver's credit lets message n in    wait until slot n mod BUFFERS says n + 1   (ld.acquire.sys)
    write the payload into the receiver's memory          out (+)= payload
    slot n mod BUFFERS := n + 1      (st.release.sys)     credit of the sender := n + 1              (st.release.sys)

Each end polls only memory of its own device; what crosses is written, never read. The number of a message is counted
on the device, so a captured CUDA graph sends the next message each time it is replayed. Waits are bounded: the first
that runs out sets FAULT of both directions, and nothing of this end waits, copies or publishes from then on. Programs
of one launch wait for the peer and never for one another, so any number of them may run at once. Knows no frame and no
tensor's meaning.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ENTERED, LEFT, FAULT, NUM_COUNTERS = 0, 1, 2, 4
"""Counters of one direction, int64: programs that began and ended, of all launches; whether a wait ran out."""

TIMED_OUT, REFUSED, MISPLACED, NUM_NOTES = 0, 1, 2, 3
"""What a launch notes for the host, int64 in memory that the host reads: the number, from one, of a message that did
not come in time, had a status, or came in another's place."""

CREDIT_AT, SLOTS_AT = 0, 128
"""In an end's region: how many of its messages the peer has taken; the slots of those that it receives."""

STATUS_AT, TAG_AT, PAYLOAD_AT = 8, 16, 128
"""In a slot, whose first word is the number of its message, counted from one. The tag of an answer is the number, from
zero, of what it answers: answers come in the order of requests, so it must be the answer's own."""

NUM_PROGRAMS = 16
"""Of every launch: enough to fill an NVLink, few enough to leave a GPU to the base model. Numbers rest on it."""

BLOCK = 1024
LANES = 128
POLL_NS = 20_000
"""What a poll counts for in the interpreter, which has no clock."""


@triton.jit
def load_acquire(words, INTERPRETED: tl.constexpr):
    """Every lane loads for itself, so that what it reads afterwards is ordered too."""
    if INTERPRETED:
        return tl.load(words, volatile=True)
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.s64 $0, [$1];", "=l,l,~{memory}", [words], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def store_release(word, value, INTERPRETED: tl.constexpr):
    """One thread stores; the barrier before it orders the writes of the others."""
    if INTERPRETED:
        tl.store(word, value)
    else:
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; "
            "@first st.release.sys.global.s64 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,l,~{memory}",
            [word, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def now_ns(words):
    """The device's clock, for each lane its own reading."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,l", [words], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def wait_for(word, wanted, limit_ns, LANES: tl.constexpr, POLL_NS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Poll until the word is at least `wanted`, for `limit_ns` at most; whether it came. All lanes agree on it."""
    words = word + tl.zeros((LANES,), dtype=tl.int32)
    seen = load_acquire(words, INTERPRETED)
    waited = tl.zeros((LANES,), dtype=tl.int64)
    began = waited if INTERPRETED else now_ns(words)
    is_waiting = tl.max(((seen < wanted) & (limit_ns > 0)).to(tl.int32), 0)
    while is_waiting != 0:
        seen = load_acquire(words, INTERPRETED)
        if INTERPRETED:
            waited += POLL_NS
        else:
            waited = now_ns(words) - began
        is_waiting = tl.max(((seen < wanted) & (waited < limit_ns)).to(tl.int32), 0)
    return tl.min(seen, 0) >= wanted


@triton.jit
def copy_rows(
    source,
    target,
    rows,
    cols,
    source_stride,
    target_stride,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """This program's share of target[r, c] (+)= source[r, c]; added in fp32."""
    blocks = tl.cdiv(cols, BLOCK)
    for block in range(tl.program_id(0), rows * blocks, PROGRAMS):
        row = (block // blocks).to(tl.int64)
        c = (block % blocks) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(source + row * source_stride + c, mask=c < cols, other=0, cache_modifier=".cg")
        place = target + row * target_stride + c
        if ADD:
            value = value.to(tl.float32) + tl.load(place, mask=c < cols, other=0).to(tl.float32)
        tl.store(place, value.to(target.dtype.element_ty), mask=c < cols)


@triton.jit
def enter(counters, PROGRAMS: tl.constexpr, ENTERED: tl.constexpr, FAULT: tl.constexpr):
    """(the number of this launch's message, from zero; whether this end has failed before)."""
    number = tl.atomic_add(counters + ENTERED, 1, sem="relaxed", scope="gpu") // PROGRAMS
    return number, tl.atomic_add(counters + FAULT, 0, sem="relaxed", scope="gpu") != 0


@triton.jit
def fail(counters, others, note, number, FAULT: tl.constexpr):
    """This end has failed, both its directions; the host is told at which message."""
    tl.atomic_max(counters + FAULT, 1, sem="relaxed", scope="gpu")
    tl.atomic_max(others + FAULT, 1, sem="relaxed", scope="gpu")
    tl.store(note, number + 1)


@triton.jit
def leave(counters, PROGRAMS: tl.constexpr, LEFT: tl.constexpr, FAULT: tl.constexpr):
    """Whether this program is the last of its launch and none of them failed: then it publishes."""
    tl.debug_barrier()
    left = tl.atomic_add(counters + LEFT, 1, sem="acq_rel", scope="gpu")
    is_faulty = tl.atomic_add(counters + FAULT, 0, sem="relaxed", scope="gpu") != 0
    return (left % PROGRAMS == PROGRAMS - 1) & (is_faulty == 0)


@triton.jit(do_not_specialize=["rows", "ids_at", "weights_at", "limit_ns", "status", "tag"])
def push_kernel(
    x,
    ids,
    weights,
    region,
    peer,
    counters,
    others,
    notes,
    rows,
    cols,
    x_stride,
    ids_stride,
    weights_stride,
    ids_at,
    weights_at,
    slot_bytes,
    limit_ns,
    status,
    tag,
    TOP_K: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BUFFERS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    POLL_NS: tl.constexpr,
    CREDIT_AT: tl.constexpr,
    SLOTS_AT: tl.constexpr,
    STATUS_AT: tl.constexpr,
    TAG_AT: tl.constexpr,
    PAYLOAD_AT: tl.constexpr,
    ENTERED: tl.constexpr,
    LEFT: tl.constexpr,
    FAULT: tl.constexpr,
    TIMED_OUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Send x [rows, cols], then ids int32 and weights fp32 [rows, TOP_K], to the peer's next slot.

    `region` and `peer` are the addresses of this end's region and of the peer's, as this process maps them. A negative
    tag stands for the message's own number.
    """
    number, has_failed = enter(counters, PROGRAMS, ENTERED, FAULT)
    note = notes.to(tl.pointer_type(tl.int64))
    patience = tl.where(has_failed, 0, limit_ns)
    credit = (region + CREDIT_AT).to(tl.pointer_type(tl.int64))
    slot = peer + SLOTS_AT + (number % BUFFERS) * slot_bytes
    payload = slot + PAYLOAD_AT
    has_room = wait_for(credit, number + 1 - BUFFERS, patience, LANES, POLL_NS, INTERPRETED)
    if has_room & (has_failed == 0):
        typed = tl.multiple_of(payload.to(tl.pointer_type(x.dtype.element_ty)), 16)
        copy_rows(x, typed, rows, cols, x_stride, cols, PROGRAMS, BLOCK, ADD=False)
        if HAS_IDS:
            typed_ids = (payload + ids_at).to(tl.pointer_type(tl.int32))
            copy_rows(ids, typed_ids, rows, TOP_K, ids_stride, TOP_K, PROGRAMS, LANES, ADD=False)
        if HAS_WEIGHTS:
            typed_weights = (payload + weights_at).to(tl.pointer_type(tl.float32))
            copy_rows(weights, typed_weights, rows, TOP_K, weights_stride, TOP_K, PROGRAMS, LANES, ADD=False)
    elif has_failed == 0:
        fail(counters, others, note + TIMED_OUT, number, FAULT)
    if leave(counters, PROGRAMS, LEFT, FAULT):
        tl.store((slot + STATUS_AT).to(tl.pointer_type(tl.int64)), status.to(tl.int64))
        tl.store((slot + TAG_AT).to(tl.pointer_type(tl.int64)), tl.where(tag < 0, number, tag))
        store_release(slot.to(tl.pointer_type(tl.int64)), number + 1, INTERPRETED)


@triton.jit(do_not_specialize=["rows", "limit_ns"])
def take_kernel(
    out,
    region,
    peer,
    counters,
    others,
    notes,
    rows,
    cols,
    out_stride,
    slot_bytes,
    limit_ns,
    ADD: tl.constexpr,
    WIRE: tl.constexpr,
    BUFFERS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    POLL_NS: tl.constexpr,
    CREDIT_AT: tl.constexpr,
    SLOTS_AT: tl.constexpr,
    STATUS_AT: tl.constexpr,
    TAG_AT: tl.constexpr,
    PAYLOAD_AT: tl.constexpr,
    ENTERED: tl.constexpr,
    LEFT: tl.constexpr,
    FAULT: tl.constexpr,
    TIMED_OUT: tl.constexpr,
    REFUSED: tl.constexpr,
    MISPLACED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Do out [rows, cols] (+)= the next message's payload, whose values are of type WIRE; then give its slot back.

    A message whose status is not 0 has no payload: it is noted, unless no rows were wanted, and taken. One with
    another's tag is a fault.
    """
    number, has_failed = enter(counters, PROGRAMS, ENTERED, FAULT)
    note = notes.to(tl.pointer_type(tl.int64))
    patience = tl.where(has_failed, 0, limit_ns)
    slot = region + SLOTS_AT + (number % BUFFERS) * slot_bytes
    has_come = wait_for(slot.to(tl.pointer_type(tl.int64)), number + 1, patience, LANES, POLL_NS, INTERPRETED)
    if has_come & (has_failed == 0):
        status = tl.load((slot + STATUS_AT).to(tl.pointer_type(tl.int64)), volatile=True)
        tag = tl.load((slot + TAG_AT).to(tl.pointer_type(tl.int64)), volatile=True)
        if tag != number:
            fail(counters, others, note + MISPLACED, number, FAULT)
        elif status == 0:
            typed = tl.multiple_of((slot + PAYLOAD_AT).to(tl.pointer_type(WIRE)), 16)
            copy_rows(typed, out, rows, cols, cols, out_stride, PROGRAMS, BLOCK, ADD=ADD)
        elif rows > 0:
            tl.store(note + REFUSED, number + 1)
    elif has_failed == 0:
        fail(counters, others, note + TIMED_OUT, number, FAULT)
    if leave(counters, PROGRAMS, LEFT, FAULT):
        store_release((peer + CREDIT_AT).to(tl.pointer_type(tl.int64)), number + 1, INTERPRETED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailbox:
    """One end's view of both regions, and what it counts by itself. All its launches are on one stream, in order."""

    region: int
    """Address of this end's region: its slots, and the credit that the peer gives it."""
    peer: int
    """Address of the peer's region in this process."""
    num_buffers: int
    buffer_bytes: int
    sent: Tensor
    """int64 [NUM_COUNTERS] on the device, zeros at first; `taken` likewise."""
    taken: Tensor
    notes: int
    """Address of int64 [NUM_NOTES], zeros at first, that this device writes and the host reads (pinned)."""
    limit_ns: int
    """The longest that a launch waits, unless it is told otherwise."""
    num_programs: int = NUM_PROGRAMS
    """The same at every launch of this end; the peer's may differ."""

    @property
    def slot_bytes(self) -> int:
        return slot_bytes(self.buffer_bytes)

    def push(
        self,
        x: Tensor,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        ids_at: int = 0,
        status: int = 0,
        tag: int = -1,
    ) -> None:
        """Launch the sending of x [rows, cols], rows strided; ids from byte `ids_at` of the payload, weights after."""
        routed = ids if ids is not None else weights
        top_k = 0 if routed is None else routed.shape[1]
        push_kernel[(self.num_programs,)](
            x,
            x if ids is None else ids,
            x if weights is None else weights,
            self.region,
            self.peer,
            self.sent,
            self.taken,
            self.notes,
            x.shape[0],
            x.shape[1],
            x.stride(0),
            0 if ids is None else ids.stride(0),
            0 if weights is None else weights.stride(0),
            ids_at,
            ids_at + (0 if ids is None else x.shape[0] * top_k * 4),
            self.slot_bytes,
            self.limit_ns,
            status,
            tag,
            TOP_K=top_k,
            HAS_IDS=ids is not None,
            HAS_WEIGHTS=weights is not None,
            **self._layout(),
        )

    def take(self, out: Tensor, wire: torch.dtype, *, add: bool, limit_ns: int | None = None) -> None:
        """Launch out [rows, cols] (+)= the next message's payload of dtype `wire`. No rows: it is taken and dropped."""
        take_kernel[(self.num_programs,)](
            out,
            self.region,
            self.peer,
            self.taken,
            self.sent,
            self.notes,
            out.shape[0],
            out.shape[1],
            out.stride(0),
            self.slot_bytes,
            self.limit_ns if limit_ns is None else limit_ns,
            ADD=add,
            WIRE=WIRE_TYPES[wire],
            REFUSED=REFUSED,
            MISPLACED=MISPLACED,
            **self._layout(),
        )

    def _layout(self) -> dict[str, int | bool]:
        return LAYOUT | {
            "BUFFERS": self.num_buffers,
            "PROGRAMS": self.num_programs,
            "INTERPRETED": bool(triton.knobs.runtime.interpret),
        }


LAYOUT: dict[str, int | bool] = {
    "BLOCK": BLOCK,
    "LANES": LANES,
    "POLL_NS": POLL_NS,
    "CREDIT_AT": CREDIT_AT,
    "SLOTS_AT": SLOTS_AT,
    "STATUS_AT": STATUS_AT,
    "TAG_AT": TAG_AT,
    "PAYLOAD_AT": PAYLOAD_AT,
    "ENTERED": ENTERED,
    "LEFT": LEFT,
    "FAULT": FAULT,
    "TIMED_OUT": TIMED_OUT,
}
"""What both kernels are compiled with."""

WIRE_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int32: tl.int32,
}


def slot_bytes(buffer_bytes: int) -> int:
    return PAYLOAD_AT + -(-buffer_bytes // PAYLOAD_AT) * PAYLOAD_AT


def region_bytes(num_buffers: int, buffer_bytes: int) -> int:
    """What an end allocates and lends to its peer. Zeros at first."""
    return SLOTS_AT + num_buffers * slot_bytes(buffer_bytes)
