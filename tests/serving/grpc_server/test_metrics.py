"""Names and meanings of the metrics, and the dashboard, which uses no other names."""

import asyncio
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
from live_server import TIMEOUT_S, Live, code_and_text
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.outputs import CompletionDelta, RequestDelta, RequestMetrics
from serving.runtime.metrics import ServerMetrics
from serving.runtime.metrics_server import MetricsServer
from serving.runtime.scheduling_config import SchedulingConfig

pytestmark = pytest.mark.usefixtures("quick_compile")

ROOT = Path(__file__).resolve().parents[3]
NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "nan_logits_total",
    "iteration_tokens_total_bucket",
    "step_overhead_ratio",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "instances",
    "transformations_total",
    "transformation_seconds_bucket",
    "transformation_bytes_total",
    "weight_bytes",
    "kv_bytes",
    "compiles_after_ready_total",
    "layer_replicas",
    "scaling_operations_total",
    "scaling_seconds_bucket",
    "device_vacancy_ratio",
    "slo_violation_ratio",
    "placement_speedup",
}


def scrape(live: Live) -> dict[str, float]:
    """Return the values by name and labels, after the engine's next report."""
    before = live.server.metrics.latest

    async def looked_again() -> None:
        while live.server.metrics.latest is before:
            await asyncio.sleep(0.01)

    live.loop.run(asyncio.wait_for(looked_again(), TIMEOUT_S))
    values = {}
    for family in text_string_to_metric_families(generate_latest(live.server.metrics.registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            values[f"{sample.name}{{{labels}}}"] = sample.value
    return values


def transform(live: Live, degree: int) -> None:
    live.admin.Transform(pb.TransformRequest(tensor_parallel_size=degree), timeout=TIMEOUT_S)


def test_requests_and_tokens_are_counted(live: Live):
    for text in ("the same beginning of a prompt, 1", "the same beginning of a prompt, 2"):
        list(live.generate(text=text))
    stream = live.generate(text="x", params=pb.SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
    next(stream)
    assert scrape(live)["amoeba:num_requests_running{}"] == 1
    stream.cancel()
    code_and_text(lambda: list(live.generate(text="y", params=pb.SamplingParams(max_tokens=5000))))
    live.loop.run(asyncio.wait_for(live.server.request_handler._idle.wait(), TIMEOUT_S))
    values = scrape(live)
    assert values["amoeba:prompt_tokens_total{}"] == 33 + 33 + 1
    assert values["amoeba:prefix_cache_queries_total{}"] == 67
    assert values["amoeba:prefix_cache_hits_total{}"] >= 16
    assert values["amoeba:generation_tokens_total{}"] >= 8 + 8 + 1
    assert values["amoeba:request_success_total{finished_reason=length}"] == 2
    assert values["amoeba:request_success_total{finished_reason=abort}"] == 1
    assert values["amoeba:request_success_total{finished_reason=refused}"] == 1
    assert values["amoeba:request_success_total{finished_reason=error}"] == 0
    assert values["amoeba:time_to_first_token_seconds_count{}"] == 3
    assert values["amoeba:e2e_request_latency_seconds_count{}"] == 2
    assert values["amoeba:num_requests_running{}"] == values["amoeba:num_requests_waiting{}"] == 0
    assert values["amoeba:kv_cache_usage_perc{}"] == 0


def test_intervals_are_between_tokens_of_one_sample(monkeypatch: pytest.MonkeyPatch):
    """Samples of a request may run on several instances, whose steps are independent."""
    metrics, times = ServerMetrics(), iter((0.0, 1.0, 10.0, 12.0))
    monkeypatch.setattr("serving.runtime.metrics.time", SimpleNamespace(monotonic=times.__next__))
    record = metrics.start_request()
    for index in (0, 1, 0, 1):
        completion = CompletionDelta(index, "x", (7,), None, None, None, None)
        record.take(RequestDelta("r", 1, (completion,), RequestMetrics(0.0), False))
    (family,) = metrics.itl.collect()
    values = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
    assert (values["count"], values["sum"]) == (2, 10 + 11)


def test_steps_are_counted_by_their_tokens(live: Live):
    name = "amoeba:iteration_tokens_total"
    before = scrape(live)
    list(live.generate(text="another prompt of 23 b.", params=pb.SamplingParams(temperature=0, max_tokens=5)))
    live.loop.run(asyncio.wait_for(live.server.request_handler._idle.wait(), TIMEOUT_S))
    after = scrape(live)

    def new(suffix: str) -> float:
        return after[f"{name}_{suffix}"] - before[f"{name}_{suffix}"]

    # One step computes the prompt, and four steps compute one token each. The last token is not computed.
    assert [new(f"bucket{{le={bound}}}") for bound in ("1.0", "16.0", "32.0", "+Inf")] == [4, 4, 5, 5]
    assert new("count{}") == 5
    assert new("sum{}") == 23 + 4


def test_steps_of_a_transformation_are_counted(live: Live):
    stream = live.generate(text="hello", params=pb.SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
    next(stream)
    before = live.llm.stats.steps
    report = live.admin.Transform(pb.TransformRequest(tensor_parallel_size=2), timeout=TIMEOUT_S)
    assert live.llm.stats.steps - before >= report.steps > 0
    overhead = scrape(live)["amoeba:step_overhead_ratio{kind=scale_up}"]
    assert 0 <= overhead < 1
    transform(live, 1)
    stream.cancel()
    live.check_idle()


def test_transformations_are_counted(live: Live):
    assert scrape(live)["amoeba:instances{tensor_parallel_size=1}"] == 2
    transform(live, 2)
    values = scrape(live)
    assert values["amoeba:instances{tensor_parallel_size=2}"] == 1
    assert values["amoeba:instances{tensor_parallel_size=1}"] == 0
    merged = values["amoeba:kv_bytes{device=0}"]
    transform(live, 1)
    code_and_text(lambda: transform(live, 4))
    values = scrape(live)
    variant = "variant=in_place_overlapped"
    assert values[f"amoeba:transformations_total{{kind=scale_up,result=done,{variant}}}"] == 1
    assert values[f"amoeba:transformations_total{{kind=scale_down,result=done,{variant}}}"] == 1
    assert values[f"amoeba:transformations_total{{kind=scale_up,result=refused,{variant}}}"] == 1
    assert values["amoeba:transformation_seconds_count{kind=scale_up}"] == 1
    assert values["amoeba:kv_bytes{device=0}"] < merged, "released weights were KV cache"


OPEN_METRICS = "application/openmetrics-text;version=0.0.1"
ACCEPT = {
    "2.45": f"application/openmetrics-text;version=1.0.0,{OPEN_METRICS};q=0.75,text/plain;version=0.0.4;q=0.5,"
    "*/*;q=0.1",
    "2.53": f"application/openmetrics-text;version=1.0.0;q=0.5,{OPEN_METRICS};q=0.4,text/plain;version=0.0.4;q=0.3,"
    "*/*;q=0.2",
    "3 with UTF-8 names": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    f"{OPEN_METRICS};q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
    "3 with legacy names": "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.5,"
    f"{OPEN_METRICS};q=0.4,text/plain;version=1.0.0;escaping=underscores;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
    "3 with native histograms": "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;"
    f"encoding=delimited;q=0.6,application/openmetrics-text;version=1.0.0;q=0.5,{OPEN_METRICS};q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "none": None,
}
QUERIED = re.compile(r"amoeba:(\w+)")


@pytest.fixture
def metrics_url(start: Callable[..., Live]) -> Iterator[str]:
    live = start(scheduling=SchedulingConfig(policy="round_robin"))
    transform(live, 2)
    transform(live, 1)
    scrape(live)
    endpoint = MetricsServer(live.server.metrics.registry, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{endpoint.port}/metrics"
    endpoint.close()


@pytest.mark.parametrize("version", ACCEPT)
def test_prometheus_gets_the_names_of_dashboard_and_documents(metrics_url: str, version: str):
    """Each version requests different formats. All versions must get the names with a colon."""
    accept = ACCEPT[version]
    request = urllib.request.Request(metrics_url, headers={} if accept is None else {"Accept": accept})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        content_type, text = answer.headers["Content-Type"], answer.read().decode()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    described = set(re.findall(r"^# TYPE (\S+)", text, re.M))
    sampled = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert {name for name in described | sampled if not name.startswith("amoeba:")} == set()
    known = {name.removeprefix("amoeba:") for name in described | sampled}
    queried = set(QUERIED.findall(files("serving").joinpath("dashboards/amoeba.json").read_text()))
    documents = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    queried |= {name for file in documents for name in QUERIED.findall(file.read_text(encoding="utf-8"))}
    assert queried - known == set()


def test_every_name_is_exported_and_the_dashboard_uses_exactly_these(start: Callable[..., Live]):
    live = start(scheduling=SchedulingConfig(policy="static"))
    transform(live, 2)
    transform(live, 1)
    exported = {name.partition("{")[0].removeprefix("amoeba:") for name in scrape(live)}
    assert exported >= NAMES
    dashboard = files("serving").joinpath("dashboards/amoeba.json").read_text()
    targets = [target["expr"] for panel in json.loads(dashboard)["panels"] for target in panel["targets"]]
    used = {name for expression in targets for name in re.findall(r"amoeba:(\w+)", expression)}
    assert used == NAMES
