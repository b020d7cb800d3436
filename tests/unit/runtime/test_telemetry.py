"""Spans over real OTLP, and the three forms in which a trace travels."""

import time

import pytest
from opentelemetry.context import Context

from infinilora.runtime import telemetry
from support.otlp import collecting

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = HEADER[:-1] + "0"


def test_spans_arrive_with_their_parents_and_attributes() -> None:
    with collecting() as collector:
        tracing = telemetry.setup("engine", collector.endpoint, process_id="e1", delay_ms=10)
        caller = telemetry.from_traceparent(HEADER)
        with tracing.span("request", {"request_id": "r1"}, parent=caller), tracing.span("step"):
            pass
        tracing.shutdown()
    [request], [step] = collector.named("request"), collector.named("step")
    assert (request.service, request.trace_id, request.parent_id) == ("engine", HEADER[3:35], HEADER[36:52])
    assert request.attributes == {"request_id": "r1"}
    assert (step.trace_id, step.parent_id) == (request.trace_id, request.span_id)


def test_a_span_of_the_past_has_its_own_times() -> None:
    with collecting() as collector:
        tracing = telemetry.setup("engine", collector.endpoint, delay_ms=10)
        end = time.perf_counter()
        tracing.record("prefill", end - 2.0, end - 0.5, {"rows": 7}, parent=telemetry.from_traceparent(HEADER))
        now_ns = time.time_ns()
        tracing.shutdown()
    [span] = collector.named("prefill")
    assert span.attributes == {"rows": 7}
    assert (span.end_ns - span.start_ns) / 1e9 == pytest.approx(1.5, abs=1e-3)
    assert (now_ns - span.end_ns) / 1e9 == pytest.approx(0.5, abs=0.4)


def test_what_the_caller_did_not_sample_is_not_sent() -> None:
    with collecting() as collector:
        tracing = telemetry.setup("engine", collector.endpoint, delay_ms=10)
        with tracing.span("request", parent=telemetry.from_traceparent(UNSAMPLED)):
            assert telemetry.to_wire() == telemetry.NO_TRACE
        tracing.record("prefill", 1, 2, parent=telemetry.from_traceparent(UNSAMPLED))
        with tracing.span("other", parent=Context()):
            assert telemetry.to_wire() != telemetry.NO_TRACE
        tracing.shutdown()
    assert [span.name for span in collector.spans] == ["other"]


def test_a_ratio_of_zero_samples_only_what_callers_sampled() -> None:
    with collecting() as collector:
        tracing = telemetry.setup("engine", collector.endpoint, ratio=0.0, delay_ms=10)
        with tracing.span("own"):
            pass
        with tracing.span("asked", parent=telemetry.from_traceparent(HEADER)):
            pass
        tracing.shutdown()
    assert [span.name for span in collector.spans] == ["asked"]


def test_without_an_endpoint_nothing_is_made() -> None:
    tracing = telemetry.setup("engine", "")
    assert not tracing.is_on
    with tracing.span("request", {"a": 1}) as span:
        assert not span.is_recording()
        assert telemetry.traceparent() is None
    tracing.start("x").end()
    tracing.record("x", 0, 1)
    tracing.shutdown()


def test_a_callers_trace_passes_through_a_process_that_does_not_trace() -> None:
    with telemetry.attached(telemetry.from_traceparent(HEADER)):
        assert telemetry.traceparent() == HEADER


def test_24_bytes_carry_a_trace_and_back() -> None:
    context = telemetry.from_traceparent(HEADER)
    wire = telemetry.to_wire(context)
    assert len(wire) == telemetry.WIRE_BYTES
    back = telemetry.from_wire(wire)
    assert back is not None
    assert telemetry.traceparent(back) == HEADER
    assert telemetry.from_wire(telemetry.NO_TRACE) is None


@pytest.mark.parametrize("header", [None, "", "nonsense", "00-0-0-0", HEADER[:-3]])
def test_a_header_that_is_none_starts_no_trace(header: str | None) -> None:
    assert telemetry.traceparent(telemetry.from_traceparent(header)) is None
    assert telemetry.to_wire(telemetry.from_traceparent(header)) == telemetry.NO_TRACE
