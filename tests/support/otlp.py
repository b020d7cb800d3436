"""A small OTLP/gRPC collector: receives spans and holds them for a test to look at."""

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from typing_extensions import override


class Span:
    """One received span, in hex and plain values."""

    def __init__(self, service: str, span: Any) -> None:
        self.service = service
        self.name: str = span.name
        self.trace_id: str = span.trace_id.hex()
        self.span_id: str = span.span_id.hex()
        self.parent_id: str = span.parent_span_id.hex()
        self.start_ns: int = span.start_time_unix_nano
        self.end_ns: int = span.end_time_unix_nano
        self.attributes = {item.key: _value(item.value) for item in span.attributes}

    @override
    def __repr__(self) -> str:
        return f"{self.service}:{self.name}({self.span_id} of {self.parent_id or 'none'} in {self.trace_id})"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`endpoint` is what a service gets as INFINILORA_OTLP_ENDPOINT."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Span] = []

    @override
    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            named = {item.key: _value(item.value) for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [Span(str(named.get("service.name")), span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _value(value: Any) -> object:
    return getattr(value, value.WhichOneof("value") or "string_value")
