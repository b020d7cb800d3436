"""Traces: one of a request, through HTTP, gRPC, NATS and the link. Off (no endpoint) it costs next to nothing.

`setup` gives a `Telemetry`, which makes spans. The context in which a span is made travels by itself inside a
process (contextvars) and between processes in one of three forms: a `traceparent` header (HTTP, NATS), gRPC
metadata (rpc.py does it), 24 bytes in a link frame. Threads and step loops, which serve many requests at
once, pass a `Context` by hand and `record` spans after the fact.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Attributes = Mapping[str, str | bool | int | float]

TRACEPARENT = "traceparent"
WIRE_BYTES = 24
NO_TRACE = bytes(WIRE_BYTES)
"""In a link frame: this step is not traced."""

_W3C = TraceContextTextMapPropagator()
_SPAN_OFF = trace.INVALID_SPAN


class Telemetry:
    """The spans of one process. Without a provider every method is a no-op."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("infinilora") if provider else None

    @property
    def is_on(self) -> bool:
        return self._tracer is not None

    @contextmanager
    def span(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        parent: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Iterator[Span]:
        """A span around a block; child of `parent`, else of the current context. Errors are recorded on it."""
        if self._tracer is None:
            yield _SPAN_OFF
            return
        with self._tracer.start_as_current_span(name, context=parent, kind=kind, attributes=attributes) as span:
            yield span

    def start(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        parent: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """A span that is not made current; whoever holds it calls `end()`."""
        if self._tracer is None:
            return _SPAN_OFF
        return self._tracer.start_span(name, context=parent, kind=kind, attributes=attributes)

    def record(
        self,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes | None = None,
        *,
        parent: Context | None = None,
    ) -> None:
        """A span of the past, given in `time.perf_counter()` seconds; nothing when `parent` is not sampled."""
        if self._tracer is None or not is_sampled(parent):
            return
        offset_ns = time.time_ns() - time.perf_counter_ns()
        span = self._tracer.start_span(
            name, context=parent, attributes=attributes, start_time=int(start_s * 1e9) + offset_ns
        )
        span.end(int(end_s * 1e9) + offset_ns)

    def shutdown(self) -> None:
        """Send what is left. Blocking, at most a few seconds."""
        if self._provider is not None:
            self._provider.shutdown()


def setup(service: str, endpoint: str, *, process_id: str = "", ratio: float = 1.0, delay_ms: int = 1000) -> Telemetry:
    """Send spans to an OTLP/gRPC `endpoint` (`http://host:4317`); empty: no tracing at all."""
    if not endpoint:
        return Telemetry()
    # Late: the exporter brings gRPC and protobufs along, a second of start-up that most processes do not need.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"), timeout=2)
    # Not made the global provider: a test builds two services in one process.
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(ratio)),
        resource=Resource.create({"service.name": service, "service.instance.id": process_id or service}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=delay_ms))
    return Telemetry(provider)


def is_sampled(context: Context | None = None) -> bool:
    return trace.get_current_span(context).get_span_context().trace_flags.sampled


def context_of(span: Span) -> Context:
    """The context whose children are children of `span`."""
    return trace.set_span_in_context(span)


def current() -> Context:
    return otel_context.get_current()


def traceparent(context: Context | None = None) -> str | None:
    """The W3C header of a context (the current one by default), or None when there is no trace."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context)
    return carrier.get(TRACEPARENT)


def from_traceparent(header: str | None) -> Context:
    """The context a peer's header names; an empty one when there is none or it is malformed."""
    return _W3C.extract({TRACEPARENT: header}, Context()) if header else Context()


@contextmanager
def attached(context: Context) -> Iterator[None]:
    """Make `context` current for a block."""
    token = otel_context.attach(context)
    try:
        yield
    finally:
        otel_context.detach(token)


def to_wire(context: Context | None = None) -> bytes:
    """Trace id and span id as 24 bytes for a link frame; `NO_TRACE` unless sampled."""
    span = trace.get_current_span(context).get_span_context()
    if not span.trace_flags.sampled:
        return NO_TRACE
    return span.trace_id.to_bytes(16) + span.span_id.to_bytes(8)


def from_wire(data: bytes) -> Context | None:
    """The sampled context of a link frame, or None when the step is not traced."""
    if data == NO_TRACE:
        return None
    span = SpanContext(
        int.from_bytes(data[:16]), int.from_bytes(data[16:24]), is_remote=True, trace_flags=TraceFlags(1)
    )
    return trace.set_span_in_context(NonRecordingSpan(span)) if span.is_valid else None
