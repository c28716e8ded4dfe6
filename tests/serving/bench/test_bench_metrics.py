"""Figures of a run, compared with NumPy over all tokens and with counts."""

import math

import numpy as np
import pytest
from bench_records import make_records, make_run, make_samples

from amoeba_jax.errors import ConfigError
from serving.bench.cluster_watch import ClusterWatch, changes_of, count_transformations, device_seconds
from serving.bench.load import Outcome, Record
from serving.bench.metrics import MetricsConfig, compute_metrics, tokens_per_bin
from serving.bench.report import failures_of, make_report
from serving.bench.workload import PlannedRequest

DURATION_S = 20.0
ALL = MetricsConfig(("ttft", "tpot", "itl", "e2el", "client_queue_time"), (50, 90, 99.9))


@pytest.mark.parametrize("seed", range(4))
def test_latencies_are_those_of_the_tokens(seed: int):
    records = make_records(60, seed)
    figures = compute_metrics(records, DURATION_S, ALL)
    samples_ms: dict[str, list[float]] = {name: [] for name in ALL.percentile_metrics}
    for record in records:
        if record.outcome != "completed":
            continue
        chunks = np.array(record.chunk_times) * 1e3
        start = record.start_s * 1e3  # type: ignore[operator]
        samples_ms["ttft"].append(chunks[0] - start)
        samples_ms["e2el"].append(chunks[-1] - start)
        samples_ms["itl"] += np.diff(chunks).tolist()
        samples_ms["client_queue_time"].append(start - record.arrival_s * 1e3)
        if sum(record.chunk_tokens) > 1:
            samples_ms["tpot"].append((chunks[-1] - chunks[0]) / (sum(record.chunk_tokens) - 1))
    for name, values in samples_ms.items():
        ordered = np.sort(values)
        assert figures[f"mean_{name}_ms"] == pytest.approx(math.fsum(values) / len(values))
        assert figures[f"median_{name}_ms"] == pytest.approx(np.quantile(ordered, 0.5))
        assert figures[f"std_{name}_ms"] == pytest.approx(math.sqrt(np.mean((ordered - ordered.mean()) ** 2)))
        for share in (50, 90, 99.9):
            # Linear interpolation between the two nearest values.
            place = share / 100 * (len(ordered) - 1)
            low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
            expected = low + (high - low) * (place - math.floor(place))
            assert figures[f"p{share:g}_{name}_ms"] == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(4))
def test_rates_count_what_completed(seed: int):
    records = make_records(60, seed)
    figures = compute_metrics(records, DURATION_S, MetricsConfig())
    done = [r for r in records if r.outcome == "completed"]
    assert figures["completed"] == len(done)
    assert figures["failed"] == sum(r.outcome == "failed" for r in records)
    prompts = sum(r.request.input_len for r in done)
    outputs = sum(tokens for r in done for tokens in r.chunk_tokens)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (prompts, outputs)
    assert figures["request_throughput"] == len(done) / 20
    assert figures["output_throughput"] == outputs / 20
    assert figures["total_token_throughput"] == (prompts + outputs) / 20
    assert figures["request_goodput"] is None
    assert "p99_client_queue_time_ms" not in figures


@pytest.mark.parametrize("seed", range(4))
def test_peaks_are_those_found_by_counting(seed: int):
    records = make_records(60, seed)
    figures = compute_metrics(records, DURATION_S, MetricsConfig())
    starts, ends = (np.array([getattr(r, name) for r in records]) for name in ("start_s", "end_s"))
    assert figures["max_concurrent_requests"] == max(int(((starts <= t) & (t < ends)).sum()) for t in starts)
    moments = [(t, n) for r in records for t, n in zip(r.chunk_times, r.chunk_tokens, strict=True)]
    by_second = [sum(n for t, n in moments if second <= t < second + 1) for second in range(20)]
    assert figures["max_output_tokens_per_s"] == max(by_second)
    assert tokens_per_bin(records, DURATION_S, 1.0) == by_second
    assert sum(tokens_per_bin(records, DURATION_S, 0.3)) == sum(n for _, n in moments)


def test_goodput_counts_requests_within_all_limits():
    def record(ttft_s: float, tpot_s: float, tokens: int, outcome: Outcome = Outcome.COMPLETED) -> Record:
        chunk_times = [1 + ttft_s + place * tpot_s for place in range(tokens)]
        request = PlannedRequest(0, "random", 0.0, 10, tokens)
        return Record(request, 0.0, 1.0, chunk_times, [1] * tokens, chunk_times[-1], outcome)

    records = [
        record(0.5, 0.05, 10),
        record(2.0, 0.05, 10),  # too late
        record(0.5, 0.2, 10),  # too slow
        record(0.5, 0.2, 1),  # no TPOT without a second token
        record(0.5, 0.05, 10, Outcome.FAILED),
    ]
    good = {
        ("ttft:1000", "tpot:100"): 2,
        ("ttft:1000",): 3,
        ("tpot:100",): 3,
        ("e2el:1000",): 2,
        ("e2el:960", "ttft:499"): 0,
    }
    for objectives, expected in good.items():
        config = MetricsConfig.from_text("ttft", "99", objectives)
        assert compute_metrics(records, 10.0, config)["request_goodput"] == expected / 10


def test_goodput_counts_the_slos_that_requests_were_sent_with():
    """SLOs of a request take precedence over SLOs of the report."""

    def record(ttft_slo_s: float | None, tpot_slo_s: float | None) -> Record:
        """Return a record with 0.5 s to the first token and 0.1 s for each further token."""
        request = PlannedRequest(0, "random", 0.0, 10, 3, ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s)
        return Record(request, 0.0, 1.0, [1.5, 1.6, 1.7], [1, 1, 1], 1.7, Outcome.COMPLETED)

    plain, own = record(None, None), [record(0.6, None), record(0.4, None), record(None, 0.11), record(0.6, 0.09)]
    for records, objectives, good in (
        ([plain], [], None),
        ([plain, *own], [], 3),
        ([plain, *own], ["ttft:450"], 1),  # only the request with a TTFT SLO of 0.6 s and no TPOT SLO
        ([plain, *own], ["tpot:95"], 1),  # only the request with a TPOT SLO of 0.11 s
    ):
        figure = compute_metrics(records, 10.0, MetricsConfig.from_text("ttft", "99", objectives))["request_goodput"]
        assert figure == (None if good is None else good / 10)


def test_no_completed_request_has_no_latency():
    figures = compute_metrics([], 1.0, MetricsConfig())
    assert figures["completed"] == figures["max_concurrent_requests"] == figures["output_throughput"] == 0
    assert figures["mean_ttft_ms"] is None
    assert figures["p99_itl_ms"] is None


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("ttft,latency", "99", []), "percentile_metrics has 'latency'"),
        (("ttft", "99,x", []), "metric_percentiles='99,x' must be numbers"),
        (("ttft", "101", []), "metric_percentiles has 101: each must be from 0 to 100"),
        (("ttft", "nan", []), "metric_percentiles has nan"),
        (("ttft", "99", ["ttft"]), "goodput has 'ttft': it must be a name and milliseconds"),
        (("ttft", "99", ["itl:5"]), "goodput has 'itl': each must be one of ttft, tpot, e2el"),
        (("ttft", "99", ["ttft:-1"]), "goodput has ttft:-1: milliseconds must be"),
    ],
)
def test_bad_settings_say_what_is_wrong(texts: tuple[str, str, list[str]], message: str):
    with pytest.raises(ConfigError, match=message):
        MetricsConfig.from_text(*texts)


def test_failures_are_counted_by_status():
    records = [r for r in make_records(40) if r.outcome is Outcome.FAILED]
    records[1].status, records[1].error = "INTERNAL", "other"
    assert failures_of(records) == [
        {"status": "UNAVAILABLE", "count": len(records) - 1, "text": records[0].error},
        {"status": "INTERNAL", "count": 1, "text": "other"},
    ]


def test_report_says_what_did_not_complete_and_what_was_not_seen():
    run = make_run(40, ClusterWatch(problem="PERMISSION_DENIED: not the admin's"))
    report = make_report(run, MetricsConfig(), None, detailed=True)
    unfinished = [r for r in run.records if r.outcome != "completed"]
    assert report["unfinished_output_tokens"] == sum(tokens for r in unfinished for tokens in r.chunk_tokens) > 0
    assert report["interrupted_requests"] == sum(r.outcome == "interrupted" for r in unfinished)
    assert report["completed"] + report["failed"] + report["interrupted_requests"] == len(report["ttfts"]) == 40
    assert report["output_lens"] == [sum(r.chunk_tokens) for r in run.records]
    assert report["instances"] == {
        "problem": "PERMISSION_DENIED: not the admin's",
        "merges": None,
        "splits": None,
        "transitions": None,
        "device_seconds": {},
        "degrees_over_time": [],
    }


@pytest.mark.parametrize(
    ("degrees", "merges", "splits"),
    [
        (["1111", "1111"], 0, 0),
        (["1111", "4", "1111"], 1, 1),
        (["1111", "22", "4", "22", "1111"], 3, 3),
        (["1111", "211", "22", "112"], 2, 1),
        (["4", "22", "1111", "4"], 1, 3),
        (["22", "112", "211"], 1, 2),
    ],
)
def test_merges_and_splits_are_counted_by_devices(degrees: list[str], merges: int, splits: int):
    samples = make_samples(*enumerate(degrees))
    assert count_transformations(samples) == (merges, splits)
    assert len(changes_of(samples)) == len([d for place, d in enumerate(degrees) if d not in degrees[:place][-1:]])


def test_device_seconds_follow_the_samples():
    samples = make_samples((0.4, "1111"), (2.0, "1111"), (3.0, "112"), (5.0, "4"), (6.5, "1111"), (9.0, "22"))
    assert device_seconds(samples, 8.0) == pytest.approx({1: 4 * 3 + 2 * 2 + 4 * 1.5, 2: 2 * 2, 4: 4 * 1.5})
    assert device_seconds([], 8.0) == {}
    assert ClusterWatch(samples).end_s(20.0) == 20.0
    assert ClusterWatch(samples, "UNAVAILABLE: gone").end_s(20.0) == 9.0
