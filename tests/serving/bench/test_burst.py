"""Load in phases with priorities, figures of each phase and priority, and figures during and outside transitions."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from bench_records import make_run, make_samples

from amoeba_jax.errors import ConfigError
from serving.bench.burst import draw_phases, read_rates
from serving.bench.cluster_watch import ClusterWatch
from serving.bench.load import Outcome, Record
from serving.bench.metrics import PEAK_WINDOW_S, MetricsConfig, compute_metrics
from serving.bench.phases import by_phase, by_priority, transition_windows, transitions
from serving.bench.report import make_report
from serving.bench.workload import PlannedRequest, WorkloadConfig, plan_columns, plan_requests

BURST = WorkloadConfig(dataset_name="burst", duration_s=240.0, priority_share=0.2, random_input_len=8, seed=3)
CONFIG = MetricsConfig(metric_percentiles=(90.0,))


def test_phases_alternate_and_their_rates_are_from_their_ranges():
    planned = plan_requests(BURST, 4096)
    assert [r.arrival_s for r in planned] == sorted(r.arrival_s for r in planned)
    counts = np.zeros(8)
    for request in planned:
        phase = int(request.arrival_s // 30)
        counts[phase] += 1
        assert request.phase == ("low", "high")[phase % 2]
    rates = counts / 30
    # Five standard deviations of a Poisson count around the range.
    assert all(2 - 5 * (2 / 30) ** 0.5 <= rate <= 5 + 5 * (5 / 30) ** 0.5 for rate in rates[::2])
    assert all(10 - 5 * (10 / 30) ** 0.5 <= rate <= 30 + 5 * (30 / 30) ** 0.5 for rate in rates[1::2])
    assert len(set(rates)) == 8, "each phase has a rate of its own"


def test_a_seed_gives_the_same_load_and_priorities_change_nothing_else():
    planned, again = plan_requests(BURST, 4096), plan_requests(BURST, 4096)
    assert planned == again
    alike = plan_requests(dataclasses.replace(BURST, priority_share=0.0), 4096)
    assert {r.priority for r in alike} == {0}
    assert [dataclasses.replace(r, priority=0) for r in planned] == alike
    share = sum(r.priority == 0 for r in planned) / len(planned)
    assert 0.15 < share < 0.25
    assert {r.priority for r in planned} == {0, 1}


def test_other_datasets_have_priorities_too():
    mix = WorkloadConfig(dataset_name="mix", duration_s=600.0, priority_share=0.5, urgent_priority=-1, long_input_len=9)
    assert {r.priority for r in plan_requests(mix, 4096)} == {-1, 1}


def test_a_number_of_requests_ends_the_last_phase():
    drawn = list(draw_phases(np.random.default_rng(0), (4, 4), (8, 8), 10.0, 1.0, 100, None))
    assert len(drawn) == 100
    assert len(plan_requests(dataclasses.replace(BURST, num_prompts=50), 4096)) == 50


@pytest.mark.parametrize("text", ["", "5:2", "0:3", "a:b", "1:2:3", "2:inf", "nan"])
def test_rates_that_cannot_be_are_refused(text: str):
    with pytest.raises(ConfigError, match="low_rate="):
        read_rates("low_rate", text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"phase_s": 0.5}, "phase_s=0.5"),
        ({"priority_share": 1.2}, "priority_share=1.2"),
        ({"urgent_priority": 2**31}, "urgent_priority=2147483648"),
        ({"request_rate": 3.0}, "request_rate=3.0 is not for burst"),
        ({"high_rate": "30:10"}, "high_rate='30:10'"),
    ],
)
def test_settings_are_checked(settings: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        WorkloadConfig(dataset_name="burst", **settings)


def record(arrival_s: float, times: list[float], phase: str = "", priority: int = 0, queue_s: float = 0.0) -> Record:
    request = PlannedRequest(0, "burst", arrival_s, 10, len(times), phase=phase, priority=priority)
    made = Record(request, arrival_s, arrival_s, outcome=Outcome.COMPLETED, server_queue_s=queue_s)
    made.chunk_times, made.chunk_tokens, made.end_s = times, [1] * len(times), times[-1]
    return made


def test_figures_of_a_phase_are_over_its_own_seconds():
    """The run has a low phase until 10 s, a high phase until 20 s, and a low phase until its end at 25 s."""
    records = [record(1, [2.0, 3.0], "low"), record(21, [22.0], "low"), record(12, [13.0] * 30, "high")]
    phases = by_phase(records, 25.0, 10.0, 25.0, CONFIG)
    assert list(phases) == ["low", "high"]
    assert (phases["low"]["seconds"], phases["high"]["seconds"]) == (15.0, 10.0)
    assert phases["low"]["output_throughput"] == pytest.approx(3 / 15)
    assert phases["high"]["output_throughput"] == pytest.approx(30 / 10)
    assert phases["low"]["p90_ttft_ms"] == pytest.approx(1000)
    assert by_phase([record(1, [2.0])], 25.0, 10.0, 25.0, CONFIG) == {}


@pytest.mark.parametrize(
    ("duration_s", "load_s", "seconds"),
    [
        (29.5, 25.0, 15.0),  # requests came for 25 s, and the last ended 4.5 s later
        (29.5, None, 14.0),  # a fixed number of requests, the last at 24 s
        (24.5, 60.0, 14.5),  # interrupted
    ],
)
def test_the_last_phase_ends_with_the_load(duration_s: float, load_s: float | None, seconds: float):
    records = [record(1, [2.0], "low"), record(12, [13.0], "high"), record(24, [24.5, duration_s], "low")]
    phases = by_phase(records, duration_s, 10.0, load_s, CONFIG)
    assert (phases["low"]["seconds"], phases["high"]["seconds"]) == (seconds, 10.0)
    assert phases["low"]["output_throughput"] == pytest.approx(3 / seconds)
    assert phases["high"]["request_throughput"] == pytest.approx(1 / 10)
    (only,) = by_phase([record(0, [1.0], "low")], 1.0, 10.0, None, CONFIG).values()
    assert only["request_throughput"] is None, "all came at once"


def test_figures_of_each_priority():
    records = [record(0, [1.0]), record(0, [3.0], priority=1), record(0, [5.0], priority=1)]
    figures = by_priority(records, 10.0, CONFIG)
    assert list(figures) == ["0", "1"]
    assert (figures["0"]["median_ttft_ms"], figures["1"]["median_ttft_ms"]) == (1000, 4000)
    assert by_priority(records[:1], 10.0, CONFIG) == {}


def test_queue_time_of_the_server_and_the_best_window():
    config = MetricsConfig(percentile_metrics=("server_queue_time",), metric_percentiles=(50.0,))
    records = [record(0, [6.0, 7.0, 8.0], queue_s=2.0), record(0, [1.0], queue_s=4.0)]
    figures = compute_metrics(records, 10.0, config)
    assert figures["p50_server_queue_time_ms"] == 3000
    assert figures["peak_output_throughput"] == 3 / PEAK_WINDOW_S
    assert compute_metrics([record(0, [0.5, 1.5])], 2.0, config)["peak_output_throughput"] == 2 / 2.0


def test_transitions_are_from_the_look_before_a_change_until_it_has_settled():
    samples = make_samples((0, "1111"), (1, "1111"), (2, "211"), (3, "22"), (9, "22"), (10, "1111"))
    assert transition_windows(samples, 1.0) == [(1, 4.0), (9, 11.0)]
    assert transition_windows(samples[:2], 1.0) == []


def test_intervals_are_split_by_transitions():
    samples = make_samples((0, "11"), (4, "11"), (5, "2"))
    records = [record(0, [1.0, 2.0, 4.5, 8.0]), record(3, [5.5])]
    found = transitions(records, samples, changes=1, watched_s=1800.0, settle_s=1.0, config=CONFIG)
    assert found["per_hour"] == 2
    assert found["seconds"] == 2.0
    during, outside = found["during"], found["outside"]
    assert (during["num_ttft"], during["num_itl"]) == (1, 2)
    assert (outside["num_ttft"], outside["num_itl"]) == (1, 1)
    assert (during["median_ttft_ms"], outside["median_ttft_ms"]) == (2500, 1000)
    assert during["mean_itl_ms"] == 3000
    empty = transitions([], [], 0, 0.0, 1.0, CONFIG)
    assert empty["per_hour"] is None
    assert empty["during"]["mean_ttft_ms"] is None


def test_the_report_has_all_of_them():
    watch = ClusterWatch(make_samples((0, "1111"), (1, "4"), (6, "1111")))
    run = make_run(60, watch)
    marked = [
        dataclasses.replace(r, request=dataclasses.replace(r.request, phase="low", priority=n % 2))
        for n, r in enumerate(run.records)
    ]
    run = dataclasses.replace(run, records=marked, workload=BURST)
    report = make_report(run, CONFIG, None, detailed=True)
    assert list(report["phases"]) == ["low"]
    assert list(report["priorities"]) == ["0", "1"]
    assert report["instances"]["transitions"]["per_hour"] == pytest.approx(2 * 3600 / run.duration_s)
    done = [r for r in marked if r.outcome is Outcome.COMPLETED]
    parts = report["instances"]["transitions"]
    itls = sum(len(list(pairwise(r.chunk_times))) for r in done)
    assert parts["during"]["num_itl"] + parts["outside"]["num_itl"] == itls
    assert report["priorities_of_requests"][:2] == [0, 1]


def test_urgent_requests_may_have_slos_of_their_own():
    slos = {"ttft_slo_s": 5.0, "tpot_slo_s": 0.2}
    both = dataclasses.replace(BURST, urgent_ttft_slo_s=0.5, **slos)
    assert {r.priority: (r.ttft_slo_s, r.tpot_slo_s) for r in plan_requests(both, 4096)} == {
        0: (0.5, 0.2),
        1: (5.0, 0.2),
    }
    assert {(r.ttft_slo_s, r.tpot_slo_s) for r in plan_requests(BURST, 4096)} == {(None, None)}
    assert set(plan_columns(dataclasses.replace(BURST, **slos), 4096).ttft_slo_s.tolist()) == {5.0}


@pytest.mark.parametrize("value", [0.0, -1.0, 86_401.0, float("nan")])
def test_slos_out_of_range_are_refused(value: float):
    for name in ("ttft_slo_s", "urgent_tpot_slo_s"):
        with pytest.raises(ConfigError, match=rf"^{name}=.* must be seconds above 0 and at most 86400"):
            WorkloadConfig(**{name: value})
