"""What an engine did when, as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing: for measurements.

    engine       step              one forward pass, and what is read from it
                 kernels           each operation of the device
                 link              `submit` and `add` of each site call: copies, wake-ups, and their Python
                 exposed wait      the part of `add` in which the delta was not there yet
    LoRA server  computing         as its answers say; a `shm` link with the native library alone tells

Events are kept in memory and written at the end. Recording one costs a microsecond or two, so that what is left of a
step after all of these is Python, a little more of it than without a timeline.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import msgspec
from torch import Tensor

from infinilora.engine.events import StepReport
from infinilora.engine.lora.calls import RemoteTicket
from infinilora.engine.lora.hybrid import HybridTicket
from infinilora.engine.lora.interface import AdapterRows, LeaseView, LoraBackend, Routing, StepPlan, Ticket
from infinilora.engine.model.ops import Linear, Ops, Paging, Stack, Ungrouped
from infinilora.protocol.adapter import Site
from infinilora.protocol.ids import Digest

P = ParamSpec("P")
R = TypeVar("R")

LANES = {"step": (1, 1), "kernels": (1, 2), "link": (1, 3), "exposed wait": (1, 4), "computing": (2, 1)}
"""Lane -> (process, thread) of the timeline."""
PROCESSES = {1: "engine", 2: "LoRA server"}


class Span(NamedTuple):
    """Something that lasted; seconds of the monotonic clock, which all processes of a host share."""

    lane: str
    name: str
    start_s: float
    end_s: float


class Timeline:
    """Spans of one engine. Not thread-safe: the step thread records, and writes when that has ended."""

    def __init__(self, *, max_spans: int = 2_000_000) -> None:
        """Of more than `max_spans` the first are kept."""
        self._spans: list[Span] = []
        self._max_spans = max_spans

    def add(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        if len(self._spans) < self._max_spans:
            self._spans.append(Span(lane, name, start_s, end_s))

    def step(self, report: StepReport) -> None:
        """A hook of the step loop."""
        name = f"{report.decode_rows} decode, {report.prefill_rows} prefill rows"
        self.add("step", name, report.started_s, report.started_s + report.seconds)

    def timed(self, lane: str, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """The function, each of its calls a span."""

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(lane, name, started, time.perf_counter())

        return call

    def write(self, path: Path) -> None:
        """As JSON of the trace event format; times in microseconds from the first span on."""
        first = min((span.start_s for span in self._spans), default=0.0)
        events = [*_names(), *(_event(span, first) for span in self._spans)]
        path.write_bytes(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}))


def _names() -> list[dict[str, Any]]:
    """What the viewer calls the lanes."""
    named: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in PROCESSES.items()
    ]
    for name, (pid, tid) in LANES.items():
        named.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        named.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    return named


def _event(span: Span, first_s: float) -> dict[str, Any]:
    pid, tid = LANES[span.lane]
    return {
        "ph": "X",
        "cat": span.lane,
        "name": span.name,
        "pid": pid,
        "tid": tid,
        "ts": round((span.start_s - first_s) * 1e6, 3),
        "dur": round((span.end_s - span.start_s) * 1e6, 3),
    }


class TimedOps:
    """`Ops` whose calls are spans, products included."""

    def __init__(self, ops: Ops, timeline: Timeline) -> None:
        self.device = ops.device
        self.dtype = ops.dtype
        self._ops = ops
        self._timeline = timeline
        self._rms_norm = timeline.timed("kernels", "norm", ops.rms_norm)
        self._add_rms_norm = timeline.timed("kernels", "norm", ops.add_rms_norm)
        self._rope = timeline.timed("kernels", "rope", ops.rope)
        self._silu_mul = timeline.timed("kernels", "silu_mul", ops.silu_mul)
        self._attention = timeline.timed("kernels", "attention", ops.attention)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        name = "x".join(map(str, weight.shape))
        return self._timeline.timed("kernels", f"linear {name}", self._ops.linear(weight, bias))

    def stacks(self, num: int, *shapes: tuple[int, int]) -> list[Stack] | Ungrouped:
        found = self._ops.stacks(num, *shapes)
        return found if isinstance(found, Ungrouped) else [self._timed(stack) for stack in found]

    def _timed(self, stack: Stack) -> Stack:
        name = "x".join(map(str, stack.weights.shape))
        return replace(stack, product=self._timeline.timed("kernels", f"linear {name}", stack.product))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._add_rms_norm(x, residual, weight, eps)

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        self._rope(q, k, positions, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._silu_mul(gate_up)

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, paging: Paging, scale: float) -> Tensor:
        return self._attention(q, k_cache, v_cache, paging, scale)


@dataclass(frozen=True, slots=True)
class TimedTicket:
    """A ticket of the backend that is timed, and which call it is of."""

    ticket: Ticket
    name: str


class TimedLora:
    """A `LoraBackend` whose site calls are spans."""

    def __init__(self, lora: LoraBackend, timeline: Timeline) -> None:
        self._lora = lora
        self._timeline = timeline

    def want(self, digest: Digest) -> None:
        self._lora.want(digest)

    def drop(self, digest: Digest) -> None:
        self._lora.drop(digest)

    def view(self, digest: Digest) -> LeaseView:
        return self._lora.view(digest)

    def begin(self, rows: Sequence[AdapterRows], trace: bytes = b"") -> StepPlan | None:
        return self._lora.begin(rows, trace)

    def submit(
        self, plan: StepPlan, layer: int, site: Site, x: Tensor, routing: Routing | None = None
    ) -> Ticket | None:
        started = time.perf_counter()
        ticket = self._lora.submit(plan, layer, site, x, routing)
        if ticket is None:
            return None
        name = f"{site.label} {layer}"
        self._timeline.add("link", f"submit {name}", started, time.perf_counter())
        return TimedTicket(ticket, name)

    def add(self, ticket: Ticket | None, y: Tensor) -> None:
        if ticket is None:
            return
        assert isinstance(ticket, TimedTicket)
        started = time.perf_counter()
        try:
            self._lora.add(ticket.ticket, y)
        finally:
            self._timeline.add("link", f"add {ticket.name}", started, time.perf_counter())
            inner = ticket.ticket.there if isinstance(ticket.ticket, HybridTicket) else ticket.ticket
            if isinstance(inner, RemoteTicket):
                self._waited(inner, ticket.name, started)

    def _waited(self, ticket: RemoteTicket, name: str, added_s: float) -> None:
        """Waits come first in an `add` of one part; of several parts, they are drawn one after the other."""
        at = added_s
        for each in ticket.call.tickets:
            if each.waited_s:
                self._timeline.add("exposed wait", name, at, at + each.waited_s)
                at += each.waited_s
            if each.computed_s is not None:
                self._timeline.add("computing", name, *each.computed_s)

    def verify(self) -> None:
        self._lora.verify()

    def end(self, plan: StepPlan) -> None:
        self._lora.end(plan)

    def take_waits(self) -> dict[Site, float]:
        return self._lora.take_waits()

    def close(self) -> None:
        self._lora.close()

    def check(self) -> None:
        self._lora.check()
