"""Planned requests of a benchmark, compared with their distributions and files."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amoeba_jax.errors import ConfigError
from serving.bench.arrivals import draw_arrivals
from serving.bench.trace_file import fit_context, read_trace
from serving.bench.workload import PlannedRequest, WorkloadConfig, plan_requests

CONTEXT = 100_000


def plan(**settings: Any) -> list[PlannedRequest]:
    return plan_requests(WorkloadConfig(**settings), CONTEXT)


def times(planned: list[PlannedRequest], kind: str | None = None) -> np.ndarray:
    return np.array([request.arrival_s for request in planned if kind in (None, request.kind)])


def write_trace(path: Path, inputs: Any, outputs: Any, **more: Any) -> Path:
    lengths = {"input_tokens": np.array(inputs, np.int32), "output_tokens": np.array(outputs, np.int32)}
    np.savez(path, **{**lengths, **more})
    return path


@given(
    st.floats(0.01, 1000), st.floats(0.05, 50) | st.just(math.inf), st.integers(1, 300), st.none() | st.floats(0.1, 100)
)
def test_arrivals_ascend_and_stay_within_number_and_time(
    rate: float, burstiness: float, count: int, duration_s: float | None
):
    arrivals = draw_arrivals(np.random.default_rng(1), rate, burstiness, count, duration_s)
    assert (np.diff(arrivals) >= 0).all()
    assert len(arrivals) <= count
    if duration_s is None:
        assert len(arrivals) == count
    else:
        assert (arrivals < duration_s).all()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float):
    duration_s, rate = 10_000.0, 5.0
    arrivals = times(plan(request_rate=rate, burstiness=burstiness, duration_s=duration_s))
    # With gamma intervals, the variance of the count is the variance of a Poisson process divided by the shape.
    spread = math.sqrt(rate * duration_s / burstiness)
    assert abs(len(arrivals) - rate * duration_s) <= 5 * spread + 1
    intervals = np.diff(arrivals)
    assert intervals.std() / intervals.mean() == pytest.approx(1 / math.sqrt(burstiness), abs=0.05)


def test_a_number_of_requests_takes_the_time_that_it_has_at_the_rate():
    for seed in range(5):
        assert times(plan(request_rate=4.0, num_prompts=50, seed=seed))[-1] == pytest.approx(12.5)
    assert not times(plan(num_prompts=50)).any(), "without a rate, all come at once"


def test_mix_is_two_poisson_processes():
    planned = plan(dataset_name="mix", duration_s=100_000.0)
    for kind, per_minute, length in (("short", 60, 1000), ("long", 1, 50_000)):
        arrivals, expected = times(planned, kind), per_minute / 60 * 100_000
        assert abs(len(arrivals) - expected) < 5 * math.sqrt(expected)
        assert np.diff(arrivals).std() / np.diff(arrivals).mean() == pytest.approx(1, abs=0.15)
        assert {request.input_len for request in planned if request.kind == kind} == {length}
    assert (np.diff(times(planned)) >= 0).all()
    assert [request.index for request in planned] == list(range(len(planned)))


def test_rate_of_one_class_does_not_move_the_other():
    one, other = (plan(dataset_name="mix", duration_s=600.0, long_per_minute=rate) for rate in (0.0, 12.0))
    assert "long" not in {request.kind for request in one}
    assert "long" in {request.kind for request in other}
    np.testing.assert_array_equal(times(one, "short"), times(other, "short"))


@pytest.mark.parametrize(
    "settings", [{"request_rate": 3.0, "random_range_ratio": 0.5}, {"dataset_name": "mix"}], ids=["random", "mix"]
)
def test_a_seed_gives_the_same_requests_again(settings: dict[str, Any]):
    first, again, other = (plan(num_prompts=40, seed=seed, **settings) for seed in (3, 3, 4))
    assert first == again
    assert times(first).tolist() != times(other).tolist()
    assert first[7].prompt(3, 256) == again[7].prompt(3, 256)
    assert len({tuple(request.prompt(seed, 256)) for request in first[:2] for seed in (3, 4)}) == 4
    assert len(first) == 40


@given(st.integers(1, 5000), st.integers(2, 300))
def test_prompts_have_their_length_and_stay_in_the_vocabulary(length: int, vocab_size: int):
    tokens = PlannedRequest(5, "random", 0.0, length, 1).prompt(0, vocab_size)
    assert len(tokens) == length
    assert min(tokens) >= 0
    assert max(tokens) < vocab_size


def test_random_lengths_fill_their_range():
    planned = plan(num_prompts=3000, random_input_len=15, random_output_len=3, random_range_ratio=0.5)
    assert {request.input_len for request in planned} == set(range(7, 24))  # floor(7.5) to ceil(22.5)
    assert {request.output_len for request in planned} == set(range(1, 6))
    planned = plan(num_prompts=300, random_input_len=15, random_output_len=1, random_range_ratio=0.9)
    assert min(request.output_len for request in planned) == 1


@given(st.integers(1, 400), st.integers(1, 400), st.integers(2, 300))
def test_too_long_requests_are_shortened_no_more_than_needed(input_len: int, output_len: int, context: int):
    fitted = fit_context(np.array([input_len]), np.array([output_len]), context)
    inputs, outputs = (int(values[0]) for values in fitted)
    if input_len + output_len <= context:
        assert (inputs, outputs) == (input_len, output_len)
        return
    assert inputs + outputs == context
    assert min(input_len, context // 2) <= inputs <= input_len
    assert min(output_len, context // 2) <= outputs <= output_len


def test_trace_keeps_order_lengths_and_times(tmp_path: Path):
    file = write_trace(tmp_path / "t.npz", [10, 20, 0, 400], [1, 2, 3, 300], arrival_s=np.array([9.0, 5.0, 7.0, 30.0]))
    planned = plan(dataset_name="trace", trace=file, trace_length_scale=0.5, trace_time_scale=2.0, duration_s=49.0)
    assert [(r.arrival_s, r.input_len, r.output_len) for r in planned] == [(0, 10, 1), (4, 1, 2), (8, 5, 1)]
    config = WorkloadConfig(dataset_name="trace", trace=file)
    planned = plan_requests(config, 500)
    assert [(r.input_len, r.output_len, r.shortened) for r in planned] == [
        (20, 2, False),
        (1, 3, False),
        (10, 1, False),
        (250, 250, True),
    ]
    assert len(plan_requests(replace(config, num_prompts=2), 500)) == 2
    paced = plan_requests(replace(config, request_rate=2.0), 500)
    assert paced[-1].arrival_s == pytest.approx(2.0), "a rate takes the place of the file's times"


def test_trace_without_times_comes_at_the_rate(tmp_path: Path):
    file = write_trace(tmp_path / "t.npz", [10] * 8, [1] * 8)
    assert not times(plan(dataset_name="trace", trace=file)).any()
    assert times(plan(dataset_name="trace", trace=file, request_rate=0.5))[-1] == pytest.approx(16.0)
    with pytest.raises(ConfigError, match=r"duration_s=5 needs a request_rate"):
        plan(dataset_name="trace", trace=file, duration_s=5.0)
    with pytest.raises(ConfigError, match=r"num_prompts=9 is more than the 8 requests"):
        plan(dataset_name="trace", trace=file, num_prompts=9)


def test_real_trace(shared_data: Path):
    file = shared_data / "traces" / "azure2023_conv.npz"
    with np.load(file) as arrays:
        within = arrays["arrival_s"] < 600
        expected = arrays["input_tokens"][within], arrays["output_tokens"][within]
    planned = plan(dataset_name="trace", trace=file, duration_s=600.0)
    assert [r.input_len for r in planned] == np.maximum(expected[0], 1).tolist()
    assert [r.output_len for r in planned] == np.maximum(expected[1], 1).tolist()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"input_tokens": np.array([1])}, "has no output_tokens: it has input_tokens"),
        ({"input_tokens": np.array([1.5]), "output_tokens": np.array([1])}, "input_tokens .* float64 of shape"),
        ({"input_tokens": np.array([[1]]), "output_tokens": np.array([1])}, r"shape \(1, 1\)"),
        ({"input_tokens": np.array([], int), "output_tokens": np.array([], int)}, r"shape \(0,\)"),
        ({"input_tokens": np.array([1, 2]), "output_tokens": np.array([1])}, "has 1 values, input_tokens 2"),
        ({"input_tokens": np.array([1]), "output_tokens": np.array([-4])}, "output_tokens .* has -4"),
        (
            {"input_tokens": np.array([1]), "output_tokens": np.array([1]), "arrival_s": np.array([math.nan])},
            "must be 1 finite numbers",
        ),
        (
            {"input_tokens": np.array([1]), "output_tokens": np.array([1]), "arrival_s": np.array([1.0, 2.0])},
            "must be 1 finite numbers",
        ),
        ({"input_tokens": np.array([None]), "output_tokens": np.array([1])}, "cannot be read"),
    ],
)
def test_bad_trace_says_what_is_wrong(tmp_path: Path, arrays: dict[str, np.ndarray], message: str):
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_what_is_no_trace_says_so(tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("arrival,input,output\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "text.npz")
    whole = write_trace(tmp_path / "whole.npz", range(5000), range(5000)).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "cut.npz")
    np.save(tmp_path / "single.npy", np.arange(3))
    with pytest.raises(ConfigError, match="single array"):
        read_trace(tmp_path / "single.npy")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset_name": "sharegpt"}, "dataset_name='sharegpt' must be one of random, mix, burst, trace"),
        ({"num_prompts": 0}, "num_prompts=0 must be from 1 to 1000000"),
        ({"seed": -1}, "seed=-1 must be from 0"),
        ({"random_output_len": 0}, "random_output_len=0 must be from 1"),
        ({"duration_s": 0.0}, "duration_s=0.0 must be above 0"),
        ({"trace_time_scale": math.nan}, "trace_time_scale=nan must be above 0"),
        ({"request_rate": -1.0}, "request_rate=-1.0 must be above 0"),
        ({"burstiness": math.nan}, "burstiness=nan must be at least 0.01"),
        ({"random_range_ratio": 1.0}, "random_range_ratio=1.0 must be at least 0 and below 1"),
        ({"dataset_name": "trace"}, "needs a file"),
        ({"trace": Path("some.npz")}, "takes no trace"),
        ({"dataset_name": "mix", "request_rate": 1.0}, "request_rate=1.0 is not for the mix"),
        ({"dataset_name": "mix", "short_per_minute": 0.0, "long_per_minute": 0.0}, "no request would arrive"),
        ({"duration_s": 10.0}, "duration_s=10 needs a request_rate"),
        ({"duration_s": 1e6, "request_rate": 1e3}, "about 1000000000 requests"),
    ],
)
def test_bad_settings_say_what_is_wrong(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        WorkloadConfig(**settings)


def test_lengths_over_the_context_are_refused_before_anything_is_sent():
    with pytest.raises(ConfigError, match=r"long_input_len plus long_output_len .* 50128 tokens, .* context is 8192"):
        plan_requests(WorkloadConfig(dataset_name="mix"), 8192)
    with pytest.raises(ConfigError, match=r"1536 \+ 192 = 1728 tokens, .* context is 1727"):
        plan_requests(WorkloadConfig(random_range_ratio=0.5), 1727)
    assert plan_requests(WorkloadConfig(random_range_ratio=0.5), 1728)
    with pytest.raises(ConfigError, match=r"no request arrives within duration_s=1e-06"):
        plan(request_rate=1.0, duration_s=1e-6)
