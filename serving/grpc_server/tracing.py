"""OpenTelemetry spans of requests, transformations and changes of placement. Needs the extra `otel`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import amoeba_jax
from amoeba_jax.address import is_local, read_url
from amoeba_jax.transform.report import PlacementReport, TransformReport
from serving.grpc_server.calls import Call
from serving.grpc_server.statuses import code_of
from serving.runtime.metrics import RequestRecord

_EXPORT_TIMEOUT_S = 5
Attribute = str | int | float | Sequence[str] | Sequence[int]


class Tracing:
    """Sender of trace spans. Any thread may call the methods. No method waits for the collector, except `close`."""

    def __init__(self, provider: TracerProvider):
        self._provider = provider
        self._tracer = provider.get_tracer("amoeba_jax", amoeba_jax.__version__)
        self._parents = TraceContextTextMapPropagator()

    @classmethod
    def to_collector(cls, endpoint: str) -> "Tracing":
        """Return a sender that sends batches of spans to an OTLP collector over gRPC.

        `endpoint` is the address of the collector, http://HOST:PORT or https://HOST:PORT.
        """
        _, host, _ = read_url(endpoint, "endpoint")
        options: Any = (("grpc.enable_http_proxy", 0),) if is_local(host) else ()
        provider = TracerProvider(resource=Resource.create({"service.name": "amoeba-jax"}))
        exporter = OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT_S, channel_options=options)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def request(
        self,
        call: Call,
        model: str,
        started_ns: int,
        record: RequestRecord,
        error: BaseException | None,
    ) -> None:
        """Record a span of a request that ends now. The attributes of the span have vLLM's names.

        Args:
            call: request. If it has `trace_headers`, they name the parent of the span.
            model: name of the model.
            started_ns: time of arrival, in nanoseconds since 1970.
            record: counts and times of the request.
            error: error that ended the request. None: the request succeeded.
        """
        attributes: dict[str, Attribute | None] = {
            "gen_ai.request.id": call.name,
            "gen_ai.response.model": model,
            "gen_ai.request.max_tokens": call.params.max_tokens,
            "gen_ai.request.temperature": call.params.temperature,
            "gen_ai.request.top_p": call.params.top_p,
            "gen_ai.request.n": call.params.n,
        }
        if (latest := record.latest) is not None:
            metrics = latest.metrics
            attributes |= {
                "gen_ai.usage.prompt_tokens": latest.num_prompt_tokens,
                "gen_ai.usage.completion_tokens": record.num_tokens,
                "gen_ai.usage.num_sequences": call.params.n,
                "gen_ai.latency.time_in_queue": metrics.queue_s,
                "gen_ai.latency.time_to_first_token": metrics.ttft_s,
                "gen_ai.latency.e2e": metrics.e2e_s,
                "gen_ai.response.finish_reasons": list(record.finish_reasons),
            }
        if error is not None:
            attributes["error.type"] = code_of(error).name
        parent = self._parents.extract(call.trace_headers)
        span = self._tracer.start_span(
            "llm_request", parent, SpanKind.SERVER, _given(attributes), start_time=started_ns
        )
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, code_of(error).name))
        span.end()

    def transformed(self, report: TransformReport) -> None:
        """Record a span of a transformation (merge or split of instances) that ends now."""
        now_ns = time.time_ns()
        attributes: dict[str, Attribute | None] = {
            "amoeba.transform.tensor_parallel_size": report.tensor_parallel_size,
            "amoeba.transform.variant": str(report.variant),
            "amoeba.transform.devices": sorted(device for group in report.groups for device in group.devices),
            "amoeba.transform.from_degrees": sorted({group.from_degree for group in report.groups}),
            "amoeba.transform.prepare_s": report.prepare_s,
            "amoeba.transform.waited_s": report.waited_s,
            "amoeba.transform.moved_bytes": report.moved_bytes,
            "amoeba.transform.steps": report.steps,
            "amoeba.transform.tokens": report.tokens,
            "amoeba.transform.step_overhead": max(
                (group.step_overhead for group in report.groups if group.step_overhead is not None), default=None
            ),
        }
        self._record("transformation", attributes, report.seconds, now_ns)

    def not_transformed(self, kind: str, variant: str, result: str) -> None:
        """Record a span of a transformation that did not succeed. `result` is `refused` or `failed`."""
        self._record_error(
            "transformation", {"amoeba.transform.kind": kind, "amoeba.transform.variant": variant}, result
        )

    def scaled(self, report: PlacementReport) -> None:
        """Record a span of a change of placement (layers copied, moved or removed) that ends now."""
        names = ("kind", "instance", "device", "layers", "copied_bytes", "shared_bytes", "kv_moved_bytes", "steps")
        attributes = {f"amoeba.placement.{name}": getattr(report, name) for name in names}
        self._record("placement_change", attributes, report.seconds, time.time_ns())

    def not_scaled(self, kind: str, result: str) -> None:
        """Record a span of a change of placement (layers copied, moved or removed) that did not succeed.

        `result` is `refused` or `failed`.
        """
        self._record_error("placement_change", {"amoeba.placement.kind": kind}, result)

    def _record(self, name: str, attributes: Mapping[str, Attribute | None], seconds: float, now_ns: int) -> None:
        started_ns = now_ns - round(seconds * 1e9)
        self._tracer.start_span(name, attributes=_given(attributes), start_time=started_ns).end(now_ns)

    def _record_error(self, name: str, attributes: Mapping[str, Attribute], result: str) -> None:
        span = self._tracer.start_span(name, attributes=attributes)
        span.set_status(Status(StatusCode.ERROR, result))
        span.end()

    def close(self) -> None:
        """Send the remaining spans. This waits a few seconds for the collector."""
        self._provider.shutdown()


def _given(attributes: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    return {name: value for name, value in attributes.items() if value is not None}
