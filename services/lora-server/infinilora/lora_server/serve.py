"""The serving thread of one link: receive a plan, then its site calls; compute each; answer. The hot path.

    PLAN   which rows belong to which tenancy     remembered until the next
    SITE   rows of one site's input               executed against the holder's grants, answered in place

A device's kernels are launched, on a stream of this thread's; where its own link carries the rows, so is the answer.

Where the link is a ring and the kernels are native, site calls that need nothing but their plan are answered inside
`recv`, without Python; here come those whose grants were taken back since the plan, and the rest.

Knows no lease and no stream: what this engine may compute with, `Grants` says at each call.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from infinilora.kernels.allocation import is_out_of_memory
from infinilora.kernels.step import NativeStep
from infinilora.link.errors import LinkClosed
from infinilora.link.frame import Flag, Header, Kind, Run
from infinilora.link.server_end import Call, ServerEnd
from infinilora.link.times import SiteTimes
from infinilora.pool.execute import Grants, SiteCall, SiteKernels, StepWork, TenancyRows, execute
from infinilora.protocol.adapter import MOE_SITES, Site
from infinilora.protocol.errors import AdapterFailed, InfiniLoraError, InvalidRequest, Overloaded
from infinilora.runtime import telemetry
from infinilora.runtime.metrics import LoraServerMetrics
from infinilora.runtime.telemetry import Telemetry

logger = logging.getLogger(__name__)

IDLE_S = 0.25
"""How long a link waits for a frame before it looks whether a span is to be sent."""


@dataclass(slots=True)
class _StepTrace:
    """One traced step of this link, from its plan to its latest answer."""

    wire: bytes
    start_s: float
    rows: int
    calls_before: int


class LinkThread:
    """Serves one link until it closes. `start`, then `stop` from any thread; `on_end` is told in either case."""

    def __init__(  # noqa: PLR0913 - what one link is made of
        self,
        end: ServerEnd,
        kernels: SiteKernels,
        grants: Grants,
        *,
        name: str,
        traces: Telemetry,
        metrics: LoraServerMetrics | None,
        owns: Callable[[int, int], bool] | None = None,
        on_end: Callable[[], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._end = end
        self._kernels = kernels
        self._grants = grants
        self._traces = traces
        self._metrics = metrics
        self._owns = owns
        self._times = SiteTimes(metrics.site_s.bounds_s if metrics else ())
        self._on_end = on_end
        self._on_death = on_death
        self._work = StepWork(0, ())
        self._plan_error: InfiniLoraError | None = None
        self._trace: _StepTrace | None = None
        self._native = self._native_step()
        self._is_computing = False
        self._num_computed = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _native_step(self) -> NativeStep | None:
        native = self._kernels.native_step()
        if native is None or not self._end.use(native, self._times):
            return None
        self._grants.tell(native)
        return native

    @property
    def name(self) -> str:
        return self._thread.name

    @property
    def progress(self) -> int | None:
        """A number that changes with each site call; None while none is computed. Any thread."""
        is_busy = self._is_computing or (self._native is not None and self._native.is_busy)
        return self._num_computed + self._times.calls if is_busy else None

    def start(self) -> None:
        if self._metrics:
            self._metrics.site_s.follow(self._times)
        self._thread.start()

    def stop(self) -> None:
        """Close the link and wait for the thread; it ends after the call it is at."""
        self._end.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._grants.device.use_own_stream()
            self._serve()
        except LinkClosed as closed:
            logger.info("link closed", extra={"link": self._thread.name, "reason": closed.message})
        except BaseException as error:
            self._on_death(error)
            raise
        finally:
            self._end_trace()
            if self._metrics:
                self._metrics.site_s.end(self._times)
            self._end.close()
            self._on_end()

    def _serve(self) -> None:
        while True:
            call = self._end.recv(IDLE_S)
            if call is None:
                self._end_trace()
                continue
            if call.header.kind == Kind.PLAN:
                self._begin(call)
            else:
                self._answer(call)
            if self._native:
                self._load(self._native)

    def _load(self, native: NativeStep) -> None:
        """Leave the rest of the step to native code, as far as it goes."""
        if self._plan_error:
            native.unload()
        else:
            self._work.load_into(native, self._grants)

    def _begin(self, plan: Call) -> None:
        self._end_trace()
        assert plan.segments is not None
        segments = [TenancyRows(*segment) for segment in plan.segments.tolist()]
        self._plan_error = None
        self._grants.stepped(segment.slot for segment in segments)
        try:
            self._work = StepWork(plan.header.step_id, segments)
        except InfiniLoraError as error:
            self._work, self._plan_error = StepWork(plan.header.step_id, ()), error
        if self._traces.is_on and plan.header.trace != telemetry.NO_TRACE:
            rows = sum(s.rows for s in segments)
            self._trace = _StepTrace(plan.header.trace, time.perf_counter(), rows, self._times.calls)

    def _answer(self, call: Call) -> None:
        started = time.perf_counter()
        self._num_computed += 1
        self._is_computing = True
        try:
            execute(self._kernels, self._grants, self._work_of(call.header), self._site_call(call))
        except InfiniLoraError as error:
            self._refuse(call, error)
            return
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._refuse(call, Overloaded(f"no memory for a site call: {error}", retry_after_s=1.0))
            return
        except ValueError as error:
            self._refuse(call, InvalidRequest(f"site call does not fit the adapter: {error}"))
            return
        finally:
            self._is_computing = False
        self._end.reply(call)
        if self._metrics and call.header.is_narrow:
            self._metrics.narrow.inc()
        self._times.add(started, time.perf_counter())

    def _work_of(self, header: Header) -> StepWork:
        if header.step_id != self._work.step_id:
            raise AdapterFailed(f"step {header.step_id} has no plan here; the latest is of {self._work.step_id}")
        if self._plan_error:
            raise self._plan_error
        return self._work

    def _site_call(self, call: Call) -> SiteCall:
        """The call in the shapes of SlotKernels. On the link a row is flat."""
        header, x, out = call.header, call.x, self._end.reply_buffer(call)
        assert x is not None
        if self._owns and not self._owns(header.layer, header.site):
            raise InvalidRequest(f"layer {header.layer}, site {header.site}: that is of another shard of this group")
        runs, first_input = _slices(header)
        if header.site == Site.MOE_GATE_UP:
            out = out.view(header.rows, _topk(call), -1)
        elif header.site == Site.MOE_DOWN:
            x = x.view(header.rows, _topk(call), -1)
        ids, weights = call.topk_ids, call.topk_weights
        layer, site, at = header.layer, header.site, header.row_start
        return SiteCall(layer, site, at, x, out, ids, weights, runs, first_input, call.rows)

    def _refuse(self, call: Call, error: InfiniLoraError) -> None:
        header = call.header
        logger.warning(
            "site call refused",
            extra={"link": self._thread.name, "layer": header.layer, "site": header.site, "code": error.code}
            | {"reason": error.message},
        )
        if self._metrics:
            self._metrics.refused.labels(code=error.code).inc()
        self._end.refuse(call, error)

    def _end_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace:
            calls = self._times.calls - trace.calls_before
            attributes = {"step_id": self._work.step_id, "rows": trace.rows, "site_calls": calls}
            end_s = self._times.last_s if calls else trace.start_s
            parent = telemetry.from_wire(trace.wire)
            self._traces.record("lora.step", trace.start_s, end_s, attributes, parent=parent)


def _slices(header: Header) -> tuple[tuple[Run, ...], int | None]:
    """The runs of output columns that a call asks for (none: all), and where its inputs begin (None: it has all)."""
    runs, has_runs = header.runs, bool(header.flags & Flag.HAS_RUNS)
    if not (header.in_end or runs or has_runs):
        return (), None
    if header.site in MOE_SITES or header.site == Site.EMBED:
        raise InvalidRequest(f"a call for a slice of site {Site(header.site).label}, which is never cut by columns")
    asked = ", ".join(f"{begin}..{end}" for begin, end in runs)
    is_none = any(begin >= end for begin, end in runs) or (has_runs and not runs)
    if is_none or (runs and sum(end - begin for begin, end in runs) != header.out_cols):
        raise InvalidRequest(f"a call for columns {asked or 'of no run'} came with room for {header.out_cols}")
    if header.in_end and header.in_end - header.in_begin != header.in_cols:
        raise InvalidRequest(f"a call of inputs {header.in_begin}..{header.in_end} came with {header.in_cols}")
    return runs, header.in_begin if header.in_end else None


def _topk(call: Call) -> int:
    header, topk = call.header, call.topk
    columns = header.out_cols if header.site == Site.MOE_GATE_UP else header.in_cols
    if topk < 1 or columns % topk:
        raise InvalidRequest(f"site {Site(header.site).label} came with topk {topk} for {columns} columns")
    return topk
