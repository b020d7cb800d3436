"""What a step reports, as a scraper and a collector of traces see it."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from infinilora.engine.events import StepReport
from infinilora.engine.meter import Meter, StepSpans
from infinilora.protocol.adapter import Site
from infinilora.runtime.metrics import EngineMetrics, new_registry, render
from infinilora.runtime.telemetry import Telemetry

TRACE = bytes(range(1, 25))


def report(waits: dict[Site, float], trace: bytes = b"") -> StepReport:
    return StepReport(
        started_s=100.0,
        seconds=0.5,
        decode_rows=3,
        prefill_rows=4,
        cached_tokens=0,
        num_preempted=0,
        num_lost=0,
        waits=waits,
        trace=trace,
    )


def test_exposed_wait_is_counted_for_each_step_and_site() -> None:
    registry = new_registry()
    meter = Meter(EngineMetrics(registry))
    meter.step(report({Site.QKV: 0.25, Site.O: 0.0}))
    meter.step(report({Site.QKV: 0.5}))
    meter.step(report({}))
    page = render(registry).decode()
    assert 'infinilora_engine_lora_wait_seconds_count{site="qkv"} 2.0' in page
    assert 'infinilora_engine_lora_wait_seconds_sum{site="qkv"} 0.75' in page
    assert 'infinilora_engine_lora_wait_seconds_count{site="o"} 1.0' in page
    assert 'site="down"' not in page


def test_a_traced_step_is_one_span_that_says_its_waits() -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    hear = StepSpans(Telemetry(provider)).step
    hear(report({Site.QKV: 0.25, Site.DOWN: 0.125}, TRACE))
    hear(report({Site.QKV: 0.25}))
    (span,) = spans.get_finished_spans()
    assert span.name == "engine.step"
    assert span.parent is not None
    assert span.parent.span_id == int.from_bytes(TRACE[16:])
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time - span.start_time == pytest.approx(5e8, abs=1e4)
    assert span.attributes == {"rows": 7, "lora_wait_s": 0.375, "lora_wait_s.qkv": 0.25, "lora_wait_s.down": 0.125}
