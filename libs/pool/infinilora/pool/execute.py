"""Run one site of one step, and never with the wrong adapter.

`Grants` are what one holder may compute with. They are its lease table as the execution sees it: a slot's memory is
given back only after its grant is gone, and a grant goes only between two executions of that holder. On a device that
runs what is launched later, it goes with the events of what was launched under it, and the memory goes after these.
So while a kernel runs, what it reads belongs to the tenancy that the plan named. `StepWork` is a plan: which rows use
which tenancy.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from infinilora.kernels.batch import segment_table
from infinilora.kernels.step import NativeStep
from infinilora.pool.device import Device, Event, HostDevice, Stream
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import AdapterFailed, AdapterLoading, InvalidRequest


class SiteKernels(Protocol):
    """The part of SlotKernels that computes."""

    def dense(self, layer: int, site: int, segments: Tensor, x: Tensor, out: Tensor, *, accumulate: bool) -> None: ...
    def dense_columns(
        self,
        layer: int,
        site: int,
        segments: Tensor,
        x: Tensor,
        out: Tensor,
        *,
        first: int,
        first_in: int | None = None,
        accumulate: bool = False,
    ) -> None: ...
    def embed(self, layer: int, segments: Tensor, ids: Tensor, out: Tensor, *, accumulate: bool) -> None: ...
    def moe_gate_up(
        self, layer: int, segments: Tensor, x: Tensor, topk_ids: Tensor, out: Tensor, *, accumulate: bool
    ) -> None: ...
    def moe_down(
        self,
        layer: int,
        segments: Tensor,
        act: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor,
        *,
        accumulate: bool,
    ) -> None: ...
    def native_step(self) -> NativeStep | None: ...


class TenancyRows(NamedTuple):
    """Rows [row_start, row_start + rows) of a step use this tenancy of this slot."""

    row_start: int
    rows: int
    slot: int
    slot_generation: int


OnStep = Callable[[Iterable[int]], None]
"""Told the slots of a step."""


class Grants:
    """What one holder may compute with. `lock` is held while a kernel runs; `version` changes with any grant.

    `num_revoked` changes where something is taken back, always with `lock` held.

    The pool alone changes it, under its own lock; the holder's step thread reads it. A native step, which takes no
    lock, is told of what is taken back, and its running kernel is waited for as one under the lock is. What is granted
    beside the plan that it computes by takes nothing from that: it is not told.
    """

    def __init__(self, on_step: OnStep | None = None, device: Device | None = None) -> None:
        self.lock = threading.Lock()
        self._on_step = on_step
        self.device = device or HostDevice()
        self._streams: set[Stream] = set()
        """Of a device that runs launches later: where this holder's are."""
        self.version = self.num_revoked = 0
        self._granted: dict[int, tuple[int, int]] = {}
        self._native: NativeStep | None = None

    def stepped(self, slots: Iterable[int]) -> None:
        """A step of these slots begins: the pool has others wait for it a little."""
        if self._on_step:
            self._on_step(slots)

    def tell(self, native: NativeStep) -> None:
        """From now on tell this step what is taken back."""
        with self.lock:
            self._native = native
            native.shut(self.num_revoked)

    def grant(self, slot: int, slot_generation: int, layers_ready: int) -> None:
        """Allow layers 0..layers_ready-1 of a tenancy. Need not wait: nothing that runs loses anything.

        The slot's tenancy before it, if there was one, has been revoked.
        """
        known = self._granted.get(slot)
        assert known is None or known[0] == slot_generation, f"slot {slot} is granted as {known}, not revoked"
        self._granted[slot] = (slot_generation, layers_ready)
        self.version += 1

    def launching(self) -> None:
        """This thread is about to launch what reads granted memory. With `lock` held."""
        if not self.device.is_host:
            self._streams.add(self.device.stream())

    def revoke(self, slot: int) -> tuple[Event, ...]:
        """Forbid the slot. Returns when no execution of this holder runs; all that it launched has run by these."""
        with self.lock:
            self._granted.pop(slot, None)
            self._shut()
            return self._launched()

    def revoke_all(self) -> dict[int, tuple[Event, ...]]:
        """Forbid every slot, each as `revoke` does."""
        with self.lock:
            slots = list(self._granted)
            self._granted.clear()
            self._shut()
            return dict.fromkeys(slots, self._launched())

    def _launched(self) -> tuple[Event, ...]:
        return tuple(stream.event() for stream in self._streams)

    def _shut(self) -> None:
        self.version += 1
        self.num_revoked += 1
        if self._native:
            self._native.shut(self.num_revoked)

    def ready_layers(self, segments: Sequence[TenancyRows]) -> int:
        """How many leading layers all segments may compute. Raises AdapterFailed where one is not granted."""
        ready = 1 << 30
        for segment in segments:
            generation, layers = self._granted.get(segment.slot, (None, 0))
            if generation != segment.slot_generation:
                found = "no lease" if generation is None else f"a lease on slot_generation {generation}"
                raise AdapterFailed(
                    f"slot {segment.slot}: the plan names slot_generation {segment.slot_generation}; "
                    f"this link has {found}"
                )
            ready = min(ready, layers)
        return ready


class StepWork:
    """The segments of one step: sorted by row, not overlapping. Made once a step, used for each of its sites."""

    def __init__(self, step_id: int, segments: Sequence[TenancyRows]) -> None:
        self.step_id = step_id
        self.segments = tuple(segments)
        self.num_rows = _check_order(self.segments)
        self._windows: dict[tuple[int, int], Tensor] = {}
        self._checked = (-1, 0)

    def load_into(self, native: NativeStep, grants: Grants) -> None:
        """Have the step computed without Python as far as the grants allow; not at all where one is missing."""
        with grants.lock:
            try:
                ready = self._ready_layers(grants)
            except AdapterFailed:  # `require` says so to whoever calls
                native.unload()
            else:
                whole = self.window(0, self.num_rows)
                native.load(self.step_id, whole, ready_layers=ready, version=grants.num_revoked)

    def require(self, grants: Grants, layer: int) -> None:
        """Raise unless every segment's tenancy is granted and has this layer. With `grants.lock` held."""
        ready = self._ready_layers(grants)
        if layer >= ready:
            raise AdapterLoading(f"layer {layer} of a segment's adapter is not there; {ready} layers are")

    def _ready_layers(self, grants: Grants) -> int:
        version, ready = self._checked
        if version != (current := grants.version):
            ready = grants.ready_layers(self.segments)
            self._checked = (current, ready)
        return ready

    def named(self, rows: Tensor) -> Tensor:
        """Int32 [n, 3]: the segments that these rows of the step are in, counted from the first of them.

        rows int32 [k], in order; InvalidRequest where they are not. On a device this waits for them.
        """
        rows = rows.cpu()
        if len(rows) and bool((rows[1:] < rows[:-1]).any()):
            raise InvalidRequest("the rows that a site call names are not in order")
        edges = torch.tensor([(s.row_start, s.row_start + s.rows) for s in self.segments], dtype=torch.int32)
        found = torch.searchsorted(rows, edges.reshape(-1)).reshape(-1, 2).tolist()
        cut = zip(found, self.segments, strict=True)
        return segment_table((first, end - first, s.slot) for (first, end), s in cut if first < end)

    def window(self, row_start: int, rows: int) -> Tensor:
        """Int32 [n, 3]: the segments within rows [row_start, row_start + rows), counted from row_start."""
        table = self._windows.get((row_start, rows))
        if table is None:
            end = row_start + rows
            cut = [
                (max(s.row_start, row_start) - row_start, min(s.row_start + s.rows, end), s)
                for s in self.segments
                if s.row_start < end and s.row_start + s.rows > row_start
            ]
            table = segment_table((at, stop - row_start - at, s.slot) for at, stop, s in cut)
            self._windows[row_start, rows] = table
        return table


class SiteCall(NamedTuple):
    """One site over some rows of a step. out is [rows, out_dim]; for MOE_GATE_UP [rows, k, 2f].

    EMBED has its token ids in `topk_ids` [rows, 1]. With `columns`, out has those runs [begin, end) of a dense site's
    columns, side by side; with `first_input`, x is a slice of its inputs, and out their part of the delta.
    With `rows` int32 [rows], in order, they are those rows of the step, and `row_start` says nothing.
    """

    layer: int
    site: int
    row_start: int
    x: Tensor
    out: Tensor
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None
    columns: Sequence[tuple[int, int]] = ()
    first_input: int | None = None
    rows: Tensor | None = None


def execute(kernels: SiteKernels, grants: Grants, work: StepWork, call: SiteCall, *, accumulate: bool = False) -> None:
    """Write (or `accumulate`) the delta of the rows' adapters to call.out; rows that have none get zeros (nothing).

    Raises AdapterFailed for a tenancy that the holder does not lease, AdapterLoading for a layer that is not there.
    """
    with grants.lock:
        work.require(grants, call.layer)
        grants.launching()
        table = work.window(call.row_start, call.x.shape[0]) if call.rows is None else work.named(call.rows)
        match call.site:
            case Site.MOE_GATE_UP:
                kernels.moe_gate_up(call.layer, table, call.x, _ids(call), call.out, accumulate=accumulate)
            case Site.MOE_DOWN:
                ids, weights = _ids(call), call.topk_weights
                if weights is None:
                    raise InvalidRequest("site moe_down came without topk_weights")
                kernels.moe_down(call.layer, table, call.x, ids, weights, call.out, accumulate=accumulate)
            case Site.EMBED:
                kernels.embed(call.layer, table, _token_ids(call), call.out, accumulate=accumulate)
            case _ if call.columns or call.first_input is not None:
                _dense_columns(kernels, table, call, accumulate=accumulate)
            case _:
                kernels.dense(call.layer, call.site, table, call.x, call.out, accumulate=accumulate)


def _dense_columns(kernels: SiteKernels, table: Tensor, call: SiteCall, *, accumulate: bool) -> None:
    """Each run of columns to its place in out."""
    at = 0
    for begin, end in call.columns or ((0, call.out.shape[1]),):
        out = call.out[:, at : at + end - begin]
        inputs = call.first_input
        kernels.dense_columns(
            call.layer, call.site, table, call.x, out, first=begin, first_in=inputs, accumulate=accumulate
        )
        at += end - begin


def _ids(call: SiteCall) -> Tensor:
    if call.topk_ids is None or call.topk_ids.dtype != torch.int32:
        raise InvalidRequest(f"site {call.site} needs topk_ids, int32 [rows, k]")
    return call.topk_ids


def _token_ids(call: SiteCall) -> Tensor:
    ids = _ids(call)
    if ids.shape[1] != 1:
        raise InvalidRequest(f"site embed needs one token id a row; found {ids.shape[1]}")
    return ids[:, 0]


def _check_order(segments: Sequence[TenancyRows]) -> int:
    end = 0
    for segment in segments:
        if segment.row_start < end or segment.rows < 1:
            raise InvalidRequest(f"plan: {segment} begins before row {end}, or has no rows")
        end = segment.row_start + segment.rows
    return end
