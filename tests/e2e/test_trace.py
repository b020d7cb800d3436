"""One request, one trace: gateway, engine and LoRA server, received over OTLP by a collector of our own."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from support.oracle import ATTENTION, write_adapter
from support.stacks import StackFactory
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    span_id: str
    parent_id: str


class Collector:
    """An OTLP/gRPC receiver that keeps the spans of one trace."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=trace_service_pb2.ExportTraceServiceRequest.FromString,
            response_serializer=trace_service_pb2.ExportTraceServiceResponse.SerializeToString,
        )
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXPORT, {"Export": handler}),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    async def _export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, _context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            for scope in resource.scope_spans:
                self.spans += [
                    Span(service, s.name, s.span_id.hex(), s.parent_span_id.hex())
                    for s in scope.spans
                    if s.trace_id.hex() == TRACE_ID
                ]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    made = Collector()
    await made.server.start()
    yield made
    await made.server.stop(grace=None)


async def test_one_request_is_one_trace_across_three_services(
    collector: Collector, stacks: StackFactory, tmp_path: Path
) -> None:
    checkpoint = make_tiny_model("llama", tmp_path / "tiny").directory
    adapter = write_adapter(tmp_path / "a", checkpoint, rank=4, targets=ATTENTION, seed=1)
    api = await stacks.start(checkpoint, env={"INFINILORA_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}"})
    await api.register("a", adapter)
    answer = await api.http.post(
        "/v1/completions",
        json={"model": "a", "prompt": [5, 77, 12, 3], "max_tokens": 4, "ignore_eos": True},
        headers={"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"},
    )
    assert answer.status_code == 200
    wanted = {"gateway", "engine", "lora-server"}
    async with asyncio.timeout(20):
        while not wanted <= {s.service for s in collector.spans}:
            await asyncio.sleep(0.1)

    by_id = {s.span_id: s for s in collector.spans}
    roots = [s for s in collector.spans if s.parent_id not in by_id]
    assert {s.parent_id for s in roots} == {"00f067aa0ba902b7"}, "every span hangs under the caller's"
    for service in ("engine", "lora-server"):
        span = next(s for s in collector.spans if s.service == service)
        assert span.parent_id in by_id
