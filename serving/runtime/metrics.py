"""Prometheus metrics of a server. They have the names of vLLM's metrics, with the prefix `amoeba:`."""

import itertools
import time
from collections.abc import Iterable
from typing import Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from amoeba_jax.outputs import RequestDelta
from amoeba_jax.stats import STEP_TOKENS, EngineStats
from amoeba_jax.transform.options import PlacementKind
from amoeba_jax.transform.report import PlacementReport, TransformReport
from serving.runtime.snapshot import Snapshot
from serving.runtime.timeline import Timeline
from serving.scheduler import SchedulerCounters
from serving.scheduler.cocoserve.monitor import Monitor

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_SCALING_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 40, 80)
_REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
FINISH_REASONS = ("stop", "length", "abort", "refused", "error")


class ChangeObserver(Protocol):
    """Receiver of the results of merges, splits and changes of placement. Any thread may call the methods."""

    def transformed(self, report: TransformReport) -> None: ...

    def not_transformed(self, kind: str, variant: str, result: str) -> None: ...

    def scaled(self, report: PlacementReport) -> None: ...

    def not_scaled(self, kind: str, result: str) -> None: ...


class ServerMetrics:
    """All Prometheus metrics of one server, in a registry of their own.

    The event loop updates the metrics. Any thread may read them.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.latest: Snapshot | None = None
        """Latest snapshot of the engine, for the gauges."""
        self.timeline = Timeline()
        """Tokens, TTFT and ITL of the last seconds. Only the event loop uses it."""
        self.ready_programs: int | None = None
        """Value of `EngineStats.awaited_programs` when the server became ready. None: it is not ready yet."""
        self.scheduler: SchedulerCounters | None = None
        """Numbers of the scheduler's decisions. None: no scheduler."""
        self.monitor: Monitor | None = None
        """Averages of vacancy and SLO violations. None: no scheduler."""
        self.observer: ChangeObserver | None = None
        """Further receiver of the results of merges, splits and changes of placement, such as a `Tracing`."""
        registry = self.registry
        self.prompt_tokens = Counter("amoeba:prompt_tokens", "Prompt tokens of requests.", registry=registry)
        self.generation_tokens = Counter("amoeba:generation_tokens", "Tokens generated.", registry=registry)
        self.prefix_queries = Counter(
            "amoeba:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", registry=registry
        )
        self.prefix_hits = Counter(
            "amoeba:prefix_cache_hits", "Prompt tokens found in the prefix cache.", registry=registry
        )
        self.requests = Counter(
            "amoeba:request_success", "Requests that ended, by reason.", ["finished_reason"], registry=registry
        )
        for reason in FINISH_REASONS:
            self.requests.labels(reason)
        self.ttft = Histogram(
            "amoeba:time_to_first_token_seconds",
            "Time from the arrival to the first token.",
            buckets=_TTFT_S,
            registry=registry,
        )
        self.itl = Histogram(
            "amoeba:inter_token_latency_seconds",
            "Time between two tokens of a sample.",
            buckets=_TOKEN_S,
            registry=registry,
        )
        self.tpot = Histogram(
            "amoeba:request_time_per_output_token_seconds",
            "Mean time between a request's tokens.",
            buckets=_TOKEN_S,
            registry=registry,
        )
        self.e2e = Histogram(
            "amoeba:e2e_request_latency_seconds",
            "Time from the arrival to the end of a request.",
            buckets=_REQUEST_S,
            registry=registry,
        )
        self.queue = Histogram(
            "amoeba:request_queue_time_seconds",
            "Time from the arrival to the start on an instance.",
            buckets=_REQUEST_S,
            registry=registry,
        )
        self.transformations = Counter(
            "amoeba:transformations", "Requested transformations.", ["kind", "variant", "result"], registry=registry
        )
        self.transformation_s = Histogram(
            "amoeba:transformation_seconds",
            "Time of one transformation.",
            ["kind"],
            buckets=_REQUEST_S,
            registry=registry,
        )
        self.transformation_bytes = Counter(
            "amoeba:transformation_bytes", "KV bytes that transformations moved.", ["kind"], registry=registry
        )
        self.step_overhead = Gauge(
            "amoeba:step_overhead_ratio",
            "Share of the time of the latest transformation that its steps lost.",
            ["kind"],
            registry=registry,
        )
        for kind in ("scale_up", "scale_down"):
            self.step_overhead.labels(kind)
        self.scaling = Counter(
            "amoeba:scaling_operations", "Requested changes of placements.", ["kind", "result"], registry=registry
        )
        self.scaling_s = Histogram(
            "amoeba:scaling_seconds",
            "Time of one change of a placement.",
            ["kind"],
            buckets=_SCALING_S,
            registry=registry,
        )
        for kind in get_args(PlacementKind):
            self.scaling.labels(kind, "done")
            self.scaling_s.labels(kind)
        registry.register(_EngineMetrics(self))

    def start_request(self) -> "RequestRecord":
        """Return the record of a new request."""
        return RequestRecord(self)

    def transformed(self, report: TransformReport) -> None:
        """Count a successful transformation (merge or split of instances)."""
        if self.observer is not None:
            self.observer.transformed(report)
        for group in report.groups:
            kind = "scale_up" if group.to_degree > group.from_degree else "scale_down"
            self.transformations.labels(kind, str(report.variant), "done").inc()
            self.transformation_s.labels(kind).observe(group.seconds)
            self.transformation_bytes.labels(kind).inc(sum(layer.moved_bytes for layer in group.layers))
            if group.step_overhead is not None:
                self.step_overhead.labels(kind).set(group.step_overhead)

    def not_transformed(self, kind: str, variant: str, result: str) -> None:
        """Count a transformation (merge or split of instances) that was refused or has failed.

        Args:
            kind: `scale_up`, `scale_down` or `unchanged` (see `kinds_of` in `transform_call.py`).
            variant: name of the `TransformVariant`.
            result: `refused` or `failed`.
        """
        if self.observer is not None:
            self.observer.not_transformed(kind, variant, result)
        self.transformations.labels(kind, variant, result).inc()

    def scaled(self, report: PlacementReport) -> None:
        """Count a successful change of placement (layers copied, moved or removed)."""
        if self.observer is not None:
            self.observer.scaled(report)
        self.scaling.labels(report.kind, "done").inc()
        self.scaling_s.labels(report.kind).observe(report.seconds)

    def not_scaled(self, kind: str, result: str) -> None:
        """Count a change of placement that was refused or has failed.

        `kind` is a `PlacementKind`, such as `replicate`. `result` is `refused` or `failed`.
        """
        if self.observer is not None:
            self.observer.not_scaled(kind, result)
        self.scaling.labels(kind, result).inc()


class RequestRecord:
    """Metrics of one request.

    Attributes:
        latest: latest output of the request. None: no output yet.
        num_tokens: generated tokens of all samples.
        finish_reasons: finish reasons of the samples that have ended.
    """

    def __init__(self, metrics: ServerMetrics):
        self._metrics = metrics
        self.latest: RequestDelta | None = None
        self.num_tokens = 0
        self.finish_reasons: list[str] = []
        self._last_token_at: dict[int, float] = {}  # by sample

    def take(self, delta: RequestDelta) -> None:
        """Add new output of the request to the metrics, and store the output as `latest`."""
        metrics, now = self._metrics, time.monotonic()
        if self.latest is None:
            prompt = delta.num_prompt_tokens
            metrics.prompt_tokens.inc(prompt)
            metrics.prefix_queries.inc(prompt)
            metrics.prefix_hits.inc(delta.metrics.num_cached_tokens)
            if delta.metrics.queue_s is not None:
                metrics.queue.observe(delta.metrics.queue_s)
            if delta.metrics.ttft_s is not None:
                metrics.ttft.observe(delta.metrics.ttft_s)
                metrics.timeline.add_ttft(delta.metrics.ttft_s)
        for completion in delta.completions:
            if completion.token_ids:
                if (before := self._last_token_at.get(completion.index)) is not None:
                    metrics.itl.observe(now - before)
                    metrics.timeline.add_itl(now - before)
                self._last_token_at[completion.index] = now
        if added := delta.num_tokens:
            metrics.generation_tokens.inc(added)
            metrics.timeline.add_tokens(added)
            self.num_tokens += added
        self.finish_reasons += [c.finish_reason for c in delta.completions if c.finish_reason is not None]
        self.latest = delta

    def end(self, reason: str | None) -> None:
        """Count the end of the request under its finish reason.

        If the engine has finished the request, the finish reason comes from the samples of the request, and `reason` is
        ignored. If not, the finish reason is `reason` (one of `FINISH_REASONS`), or `error` if `reason` is None.
        """
        metrics, latest = self._metrics, self.latest
        if latest is None or not latest.finished:
            metrics.requests.labels(reason or "error").inc()
            return
        metrics.requests.labels(next(r for r in ("abort", "length", "stop") if r in self.finish_reasons)).inc()
        if latest.metrics.e2e_s is not None:
            metrics.e2e.observe(latest.metrics.e2e_s)
        if latest.metrics.tpot_s is not None:
            metrics.tpot.observe(latest.metrics.tpot_s)


class _EngineMetrics(Collector):
    """Collector of the engine's metrics for the Prometheus client. The values come from the latest snapshot."""

    def __init__(self, metrics: ServerMetrics):
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        snapshot = self._metrics.latest
        if snapshot is None:
            return
        yield _gauge("num_requests_running", "Requests that run on an instance.", snapshot.running)
        yield _gauge("num_requests_paused", "Paused requests, which keep their pages.", snapshot.paused)
        yield _gauge("num_requests_waiting", "Requests in the queue.", snapshot.waiting)
        yield _gauge("kv_cache_usage_perc", "Share of KV pages in use, from 0 to 1.", snapshot.kv_usage)
        yield _counter(
            "num_preemptions", "Requests that lost their pages and were queued again.", snapshot.stats.preemptions
        )
        yield _counter(
            "nan_logits", "Samples that ended because their logits were not numbers.", snapshot.stats.nan_logits
        )
        yield _counter("failed_steps", "Steps that failed on their devices.", snapshot.stats.failed_steps)
        yield _gauge("output_backlog", "Tokens that were not converted to outputs yet.", snapshot.stats.output_backlog)
        yield _counter(
            "output_stalls",
            "Times that no steps were launched because of the output backlog.",
            snapshot.stats.output_stalls,
        )
        yield _step_tokens(snapshot.stats)
        instances = GaugeMetricFamily(
            "amoeba:instances", "Instances by tensor-parallel degree.", labels=["tensor_parallel_size"]
        )
        for degree, count in snapshot.instances_by_degree().items():
            instances.add_metric([str(degree)], count)
        yield instances
        replicas = GaugeMetricFamily(
            "amoeba:layer_replicas",
            "Layers of an instance that a device computes.",
            labels=["instance", "device"],
        )
        for (instance, device), count in snapshot.layer_replicas().items():
            replicas.add_metric([str(instance), str(device)], count)
        yield replicas
        speedup = GaugeMetricFamily(
            "amoeba:placement_speedup",
            "Estimated speed-up of the steps of an instance by its replicas; 1 without replicas.",
            labels=["instance"],
        )
        for instance, ratio in snapshot.placement_speedups().items():
            speedup.add_metric([str(instance)], ratio)
        yield speedup
        imbalance = GaugeMetricFamily(
            "amoeba:expert_load_imbalance",
            "Largest load of a rank over the mean load, in tokens of its experts, over all layers; 1 if equal.",
            labels=["instance"],
        )
        for view in snapshot.instances:
            if view.expert_load_imbalance is not None:
                imbalance.add_metric([str(view.id)], view.expert_load_imbalance)
        yield imbalance
        if (monitor := self._metrics.monitor) is not None:
            vacancy = GaugeMetricFamily(
                "amoeba:device_vacancy_ratio",
                "Average of the smaller one of the free shares of memory and of computing time, from 0 to 1.",
                labels=["device"],
            )
            for device, ratio in monitor.vacancy.items():
                vacancy.add_metric([str(device)], ratio)
            yield vacancy
            yield _gauge(
                "slo_violation_ratio", "Average share of requests that violate their SLOs.", monitor.violations
            )
        for name, text, sizes in (
            ("weight_bytes", "Bytes of weights on a device.", snapshot.weight_bytes()),
            ("kv_bytes", "Bytes of KV cache on a device.", snapshot.kv_bytes()),
        ):
            family = GaugeMetricFamily(f"amoeba:{name}", text, labels=["device"])
            for device, size in sizes.items():
                family.add_metric([str(device)], size)
            yield family
        if (counters := self._metrics.scheduler) is not None:
            family = CounterMetricFamily(
                "amoeba:scheduler_decisions", "Decisions of the scheduler, by outcome.", labels=["decision"]
            )
            for name, count in counters.by_name().items():
                family.add_metric([name], count)
            yield family
        ready = self._metrics.ready_programs
        awaited = 0 if ready is None else snapshot.stats.awaited_programs - ready
        yield _counter(
            "compiles_after_ready",
            "Programs that requests waited for since the server was ready. Should be 0.",
            awaited,
        )
        programs = GaugeMetricFamily(
            "amoeba:programs",
            "Programs of a degree that is compiled in the background.",
            labels=["tensor_parallel_size", "state"],
        )
        for it in snapshot.stats.degrees:
            programs.add_metric([str(it.degree), "ready"], it.num_ready)
            programs.add_metric([str(it.degree), "missing"], it.num_programs - it.num_ready)
        yield programs


def _step_tokens(stats: EngineStats) -> Metric:
    """Return the histogram of the number of tokens in a step. Each bucket includes all lower buckets."""
    bounds = [*(str(float(bound)) for bound in STEP_TOKENS), "+Inf"]
    return HistogramMetricFamily(
        "amoeba:iteration_tokens_total",
        "Tokens computed in a step of an instance.",
        buckets=list(zip(bounds, itertools.accumulate(stats.steps_by_tokens), strict=True)),
        sum_value=stats.prompt_tokens + stats.decode_tokens,
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"amoeba:{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"amoeba:{name}", text, value=value)
