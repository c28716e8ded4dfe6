"""Spans of requests and transformations, in memory and at a collector."""

import queue
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from live_server import TIMEOUT_S, Live, code_and_text, wait_until
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from typer.testing import CliRunner

from amoeba_jax.client._proto import inference_pb2 as pb
from serving.cli import app
from serving.grpc_server.tracing import Tracing

pytestmark = pytest.mark.usefixtures("quick_compile")

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(start: Callable[..., Live], spans: InMemorySpanExporter) -> Live:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return start(tracing=Tracing(provider))


def finished(spans: InMemorySpanExporter, count: int) -> list[ReadableSpan]:
    """Return this number of spans. A span may end after the client has its whole answer."""
    wait_until(lambda: len(spans.get_finished_spans()) >= count)
    found = list(spans.get_finished_spans())
    assert len(found) == count
    spans.clear()
    return found


def attributes(span: ReadableSpan) -> dict:
    assert span.attributes is not None
    return dict(span.attributes)


def generate(live: Live, metadata: tuple[tuple[str, str], ...] = (), **fields: object) -> list:
    fields.setdefault("params", pb.SamplingParams(temperature=0, max_tokens=8))
    return list(live.inference.Generate(pb.GenerateRequest(**fields), timeout=TIMEOUT_S, metadata=metadata))


def test_request_has_a_span_with_its_figures(traced: Live, spans: InMemorySpanExporter):
    generate(traced, text="hello", request_id="seven")
    (span,) = finished(spans, 1)
    values = attributes(span)
    assert (span.name, span.kind, span.parent) == ("llm_request", SpanKind.SERVER, None)
    assert span.status.status_code is StatusCode.UNSET
    assert values["gen_ai.request.id"] == "seven"
    assert values["gen_ai.response.model"] == traced.llm.name
    assert (values["gen_ai.usage.prompt_tokens"], values["gen_ai.usage.completion_tokens"]) == (5, 8)
    assert (values["gen_ai.request.max_tokens"], values["gen_ai.request.temperature"]) == (8, 0)
    assert values["gen_ai.response.finish_reasons"] == ("length",)
    queued, first, end = (values[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e"))
    assert span.start_time is not None
    assert span.end_time is not None
    assert 0 <= queued <= first <= end <= (span.end_time - span.start_time) / 1e9


def test_span_belongs_to_the_trace_of_the_client(traced: Live, spans: InMemorySpanExporter):
    generate(traced, (("traceparent", f"00-{TRACE:032x}-{PARENT:016x}-01"), ("tracestate", "a=b")), text="hello")
    (span,) = finished(spans, 1)
    assert span.context.trace_id == TRACE
    assert span.parent is not None
    assert span.parent.span_id == PARENT
    # The trace context says not to record, is malformed, or is missing.
    generate(traced, (("traceparent", f"00-{TRACE:032x}-{PARENT:016x}-00"),), text="hello")
    generate(traced, (("traceparent", "00-what-is-this"),), text="hello")
    generate(traced, text="hello")
    first, second = finished(spans, 2)
    assert first.parent is second.parent is None
    assert TRACE not in (first.context.trace_id, second.context.trace_id)


def test_span_of_what_fails_has_its_status(traced: Live, spans: InMemorySpanExporter):
    long = pb.SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
    code_and_text(lambda: generate(traced, text="x", params=pb.SamplingParams(max_tokens=5000)))
    stream = traced.generate(text="x", params=long)
    next(stream)
    stream.cancel()
    code_and_text(lambda: list(traced.generate(text="x", params=long, timeout=0.1)))
    refused, cancelled, late = finished(spans, 3)
    assert attributes(refused)["error.type"] == "INVALID_ARGUMENT"
    assert "gen_ai.usage.prompt_tokens" not in attributes(refused)
    assert attributes(cancelled)["error.type"] == "CANCELLED"
    assert attributes(cancelled)["gen_ai.usage.completion_tokens"] >= 1
    # The type depends on which deadline expires first: the server's or the client's.
    assert attributes(late)["error.type"] in ("DEADLINE_EXCEEDED", "CANCELLED")
    assert {span.status.status_code for span in (refused, cancelled, late)} == {StatusCode.ERROR}


def test_transformation_has_a_span(traced: Live, spans: InMemorySpanExporter):
    for degree in (2, 1):
        report = traced.admin.Transform(pb.TransformRequest(tensor_parallel_size=degree), timeout=TIMEOUT_S)
        (span,) = finished(spans, 1)
        values = attributes(span)
        assert span.name == "transformation"
        assert values["amoeba.transform.tensor_parallel_size"] == degree
        assert values["amoeba.transform.from_degrees"] == (3 - degree,)
        assert values["amoeba.transform.devices"] == (0, 1)
        assert values["amoeba.transform.variant"] == "in_place_overlapped"
        assert span.start_time is not None
        assert span.end_time is not None
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(report.seconds, abs=1e-6)


def test_refused_transformation_has_a_span(traced: Live, spans: InMemorySpanExporter):
    code_and_text(lambda: traced.admin.Transform(pb.TransformRequest(tensor_parallel_size=4), timeout=TIMEOUT_S))
    (span,) = finished(spans, 1)
    assert span.name == "transformation"
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "refused")
    assert attributes(span) == {"amoeba.transform.kind": "scale_up", "amoeba.transform.variant": "in_place_overlapped"}


def test_change_of_a_placement_has_a_span(traced: Live, spans: InMemorySpanExporter):
    layers = pb.LayerRange(first=0, end=1)
    report = traced.admin.Replicate(pb.ReplicateRequest(layers=layers, device=1), timeout=TIMEOUT_S)
    traced.admin.Evict(pb.EvictRequest(layers=layers, device=1), timeout=TIMEOUT_S)
    replicated, evicted = finished(spans, 2)
    assert {span.name for span in (replicated, evicted)} == {"placement_change"}
    values = attributes(replicated)
    assert (values["amoeba.placement.kind"], values["amoeba.placement.device"]) == ("replicate", 1)
    assert values["amoeba.placement.layers"] == (0, 1)
    assert values["amoeba.placement.shared_bytes"] == report.shared_bytes > 0
    code_and_text(lambda: traced.admin.Evict(pb.EvictRequest(layers=layers, device=1), timeout=TIMEOUT_S))
    (span,) = finished(spans, 1)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "refused")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """OTLP collector that records the names of spans."""

    def __init__(self) -> None:
        self.names: queue.SimpleQueue[str] = queue.SimpleQueue()

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext):
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.names.put(span.name)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    """Yield a collector and its URL."""
    servicer, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


def test_collector_gets_what_there_is_at_the_latest_at_the_end(
    start: Callable[..., Live], collector: tuple[Collector, str]
):
    servicer, endpoint = collector
    tracing = Tracing.to_collector(endpoint)
    live = start(tracing=tracing)
    generate(live, text="hello")
    live.check_idle()
    tracing.close()
    assert [servicer.names.get(timeout=TIMEOUT_S) for _ in range(2)] == ["llm_request", "llm_request"]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "serving.grpc_server.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    result = CliRunner().invoke(app, ["serve", "--otlp-traces-endpoint", "http://127.0.0.1:4317", "--port", "0"])
    assert result.exit_code == 2
    assert "amoeba-jax[otel]" in result.stderr
    assert "Traceback" not in result.stderr
