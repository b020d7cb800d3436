"""What the step loop reports, as metrics and as spans."""

from collections.abc import Callable

from infinilora.engine.events import StepReport
from infinilora.protocol.control import EngineLoad
from infinilora.runtime import telemetry
from infinilora.runtime.metrics import EngineMetrics
from infinilora.runtime.telemetry import Telemetry


class Meter:
    """Counts steps; reads queue lengths when scraped."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def watch(self, load: Callable[[], EngineLoad]) -> None:
        self._metrics.running.set_function(lambda: load().running)
        self._metrics.waiting.set_function(lambda: load().waiting)
        self._metrics.kv_blocks_free.set_function(lambda: load().kv_blocks_free)

    def step(self, report: StepReport) -> None:
        m = self._metrics
        m.step_s.observe(report.seconds)
        m.step_rows.labels("decode").inc(report.decode_rows)
        m.step_rows.labels("prefill").inc(report.prefill_rows)
        m.preemptions.inc(report.num_preempted)
        m.steps_lost.inc(1 if report.num_lost else 0)
        m.prefix_hits.labels("hit").inc(report.cached_tokens)
        m.prefix_hits.labels("miss").inc(report.prefill_rows)
        for site, seconds in report.waits.items():
            m.lora_wait_s.labels(site.label).observe(seconds)


class StepSpans:
    """Steps within the trace of one of their requests; a step belongs to one trace at most."""

    def __init__(self, traces: Telemetry) -> None:
        self._traces = traces

    def step(self, report: StepReport) -> None:
        if not report.trace:
            return
        attributes: dict[str, float] = {
            "rows": report.decode_rows + report.prefill_rows,
            "lora_wait_s": sum(report.waits.values()),
            **{f"lora_wait_s.{site.label}": seconds for site, seconds in report.waits.items()},
        }
        end_s = report.started_s + report.seconds
        parent = telemetry.from_wire(report.trace)
        self._traces.record("engine.step", report.started_s, end_s, attributes, parent=parent)
