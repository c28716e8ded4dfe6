"""Traces in CSV, JSON lines and statistics, and scaled rates."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from amoeba_jax.errors import ConfigError
from serving.bench.trace_file import Trace, read_trace, scale_rate
from serving.bench.workload import WorkloadConfig, plan_columns, plan_requests


def test_csv_and_json_lines_say_the_same(tmp_path: Path):
    rows = [(3.5, 20, 7), (1.5, 10, 5), (2.0, 15, 0)]
    table = tmp_path / "mine.csv"
    table.write_text("arrival,prompt,output\n" + "".join(f"{a},{i},{o}\n" for a, i, o in rows))
    lines = tmp_path / "mine.jsonl.gz"
    text = "\n".join(json.dumps({"arrival_s": a, "input_tokens": i, "output_tokens": o}) for a, i, o in rows)
    lines.write_bytes(gzip.compress(text.encode()))
    for path in (table, lines):
        trace = read_trace(path)
        assert trace.arrival_s is not None
        assert trace.arrival_s.tolist() == [0.0, 0.5, 2.0]
        assert trace.input_tokens.tolist() == [10, 15, 20]
        assert trace.output_tokens.tolist() == [5, 0, 7]


def test_dates_and_prefix_blocks(tmp_path: Path):
    table = tmp_path / "azure.csv"
    table.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,9"
    )
    times = read_trace(table).arrival_s
    assert times is not None
    assert times[1] == pytest.approx(4.314579, abs=1e-6)
    lines = tmp_path / "kimi.jsonl"
    lines.write_text('{"timestamp": 2500, "input_length": 6, "output_length": 5, "hash_ids": [0, 7]}')
    assert read_trace(lines).prefix_blocks == {0: (0, 7)}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "arrival_s,output\n1,2\n", r"no column of prompt tokens named input_tokens; it has"),
        ("t.csv", "arrival_s,input,output\n-1,2,3\n", r"line 2: arrival_s='-1' must be seconds, 0 or more"),
        ("t.csv", "arrival_s,input,output\n1,-2,3\n", r"line 2: input='-2' must be a number of tokens, 0 or more"),
        ("t.csv", "arrival_s,input,output\n1,2,3\n1,2.5,3\n", r"line 3: input='2.5' must be a number of tokens"),
        ("t.csv", "timestamp,input,output\nnoon,2,3\n", r"timestamp='noon' must be milliseconds, 0 or more, or a date"),
        ("t.csv", "arrival_s,input,output\n", "has no rows"),
        ("t.jsonl", '{"input": 1, "output": 1}\n[1]\n', r"line 2: it must be an object, not list"),
        ("t.jsonl", "{", r"line 1, is not JSON"),
        ("t.csv.gz", "a,b\n", "cannot be read"),
    ],
)
def test_bad_text_traces_name_the_column_or_the_line(tmp_path: Path, name: str, text: str, message: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / name)


def test_rate_is_scaled_with_the_same_lengths_and_span():
    random = np.random.default_rng(0)
    arrivals = np.sort(random.uniform(0, 1000, 4000))
    trace = Trace(random.integers(1, 9, 4000), random.integers(1, 9, 4000), arrivals)
    for scale in (0.25, 3.5):
        scaled = scale_rate(trace, scale, np.random.default_rng(1))
        assert scaled.arrival_s is not None
        assert len(scaled.arrival_s) == pytest.approx(4000 * scale, rel=0.1)
        assert (np.diff(scaled.arrival_s) >= 0).all()
        assert scaled.arrival_s[-1] < 1031
        assert scaled.input_tokens.mean() == pytest.approx(trace.input_tokens.mean(), rel=0.05)


def test_requests_of_statistics_follow_rates_and_lengths(shared_data: Path):
    path = shared_data / "traces" / "servegen_deepseek-r1.npz"
    with np.load(path) as file:
        rates, values, shares = (file[k] for k in ("rate_rps", "output_tokens_value", "output_tokens_prob"))
    config = WorkloadConfig(dataset_name="trace", trace=path, duration_s=6000.0, trace_rate_scale=2.0)
    plan = plan_columns(config, 100_000)
    assert len(plan) == pytest.approx(2 * rates[:10].sum() * 600, rel=0.03)
    assert plan.output_len.mean() == pytest.approx((values * shares).sum() / shares.sum(), rel=0.02)
    assert plan_columns(config, 100_000).arrival_s.tolist() == plan.arrival_s.tolist()


def test_columns_are_the_requests(shared_data: Path):
    path = shared_data / "traces" / "mooncake_conversation.jsonl.gz"
    config = WorkloadConfig(dataset_name="trace", trace=path, num_prompts=50)
    plan, requests = plan_columns(config, 200_000), plan_requests(config, 200_000)
    assert [r.input_len for r in requests] == plan.input_len.tolist()
    npz = plan_columns(
        WorkloadConfig(dataset_name="trace", trace=path.with_name("mooncake_conversation.npz"), num_prompts=50), 200_000
    )
    assert npz.prefix_blocks[3] == plan.prefix_blocks[3]
    assert npz.arrival_s.tolist() == plan.arrival_s.tolist()


def test_blocks_of_a_table_are_lists(tmp_path: Path):
    table = tmp_path / "blocks.csv"
    table.write_text('input_tokens,output_tokens,hash_ids\n1000,1,"[46, 47]"\n10,1,\n')
    assert read_trace(table).prefix_blocks == {0: (46, 47), 1: ()}
    for cell, shown in (("4647", "'4647'"), ('"[1, 2.5]"', r"'\[1, 2.5\]'"), ("x", "'x'")):
        table.write_text(f"input_tokens,output_tokens,hash_ids\n1,1,{cell}\n")
        with pytest.raises(ConfigError, match=f"line 2: hash_ids={shown} must be a list of integers"):
            read_trace(table)


def test_a_row_with_more_cells_than_columns_is_named(tmp_path: Path):
    table = tmp_path / "cells.csv"
    table.write_text("input_tokens,output_tokens\n1,1,7\n")
    with pytest.raises(ConfigError, match="line 2, has more cells than the first line has columns"):
        read_trace(table)


def test_a_factor_that_leaves_no_request_is_named(tmp_path: Path):
    table = tmp_path / "few.csv"
    table.write_text("input_tokens,output_tokens\n1,1\n")
    with pytest.raises(ConfigError, match=r"trace_rate_scale=0\.25 leaves no request"):
        plan_columns(WorkloadConfig(dataset_name="trace", trace=table, trace_rate_scale=0.25, request_rate=1.0), 100)
    with pytest.raises(ConfigError, match=r"trace_rate_scale=2e\+06 makes 2000000 requests, but the maximum is"):
        plan_columns(WorkloadConfig(dataset_name="trace", trace=table, trace_rate_scale=2e6), 100)
