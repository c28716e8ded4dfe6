"""Whole simulations: policies, failures, results, and equal bytes from equal seeds."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shapes import config

from serving.simulator.errors import SimulationError
from serving.simulator.explain import explain, ranking
from serving.simulator.faults import Faults
from serving.simulator.search import find_max_rate, find_min_devices
from serving.simulator.setups import make_setup, policy_names
from serving.simulator.simulate import report, request_table, simulate
from serving.simulator.slo import Slo
from serving.simulator.tally import Ending

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_serves_all_requests_that_its_instances_hold(policy: str):
    result = simulate(config(), policy)
    assert set(result.ending.tolist()) <= {Ending.COMPLETED, Ending.NEVER_FITS}
    generated = int(result.requests.output_len[result.completed].sum())
    assert result.tally.generated_tokens == generated
    assert (result.ttft_s[result.completed] > 0).all()
    assert (result.e2el_s[result.completed] >= result.ttft_s[result.completed]).all()
    assert sum(result.device_seconds().values()) == pytest.approx(8 * result.duration_s, rel=1e-6)


def test_static_policies_refuse_what_amoeba_merges_for():
    static, amoeba = simulate(config(), "static-tp1"), simulate(config(), "amoeba")
    assert static.counters["rejected_never_fits"] > 0
    assert amoeba.counters["rejected_never_fits"] == 0
    assert amoeba.counters["scale_ups"] > 0
    assert "fit none of its instances" in "".join(explain({"a": amoeba, "s": replace(static, policy="s")}))
    assert amoeba.completed.all()


def test_the_same_seed_gives_the_same_bytes():
    settings = config({"duration_s": 60.0}, urgent_share=0.2, policies=("amoeba", "round_robin"))
    texts = []
    for _ in range(2):
        results = {name: simulate(settings, name) for name in settings.policies}
        texts.append(json.dumps(report(settings, results), allow_nan=False))
    assert texts[0] == texts[1]
    other = {name: simulate(config({"duration_s": 60.0, "seed": 1}), name) for name in settings.policies}
    assert json.dumps(report(settings, other)) != texts[0]


def test_urgent_requests_wait_less_where_many_wait():
    crowded = config({"short_per_minute": 1800.0, "long_per_minute": 0.0, "duration_s": 30.0}, urgent_share=0.1)
    result = simulate(replace(crowded, max_num_seqs=4), "amoeba")
    priority = result.requests.priority
    assert priority is not None
    assert np.median(result.ttft_s[priority < 0]) < 0.5 * np.median(result.ttft_s[priority == 0])


def test_priorities_and_slos_of_the_load_are_those_of_its_requests():
    """SLOs of requests take precedence over SLOs of the simulation."""
    settings = {"priority_share": 0.3, "urgent_priority": -1, "ttft_slo_s": 30.0, "urgent_ttft_slo_s": 0.2}
    result = simulate(config(settings, slo=Slo(ttft_s=1e-6)), "amoeba")
    requests = result.requests
    waiting = [requests.waiting(index) for index in range(len(requests))]
    assert {(it.priority, it.ttft_slo_s, it.tpot_slo_s) for it in waiting} == {(-1, 0.2, None), (1, 30.0, None)}
    limits_s = np.array([it.ttft_slo_s for it in waiting])
    assert result.kept.tolist() == (result.completed & (result.ttft_s <= limits_s)).tolist()
    assert result.kept.any()


def test_requests_are_given_up_at_their_deadline():
    crowded = config({"short_per_minute": 2400.0, "duration_s": 20.0}, deadline_s=5.0, max_num_seqs=4)
    result = simulate(crowded, "amoeba")
    late = result.ending == Ending.DEADLINE
    assert late.any()
    assert result.e2el_s[late] == pytest.approx(5.0, abs=0.01)
    assert (result.e2el_s[result.completed] <= 5.0 + 1e-6).all()


def test_failures_are_survived():
    load = {"short_per_minute": 300.0, "duration_s": 60.0}
    faults = Faults.from_text(["transformations:1", "device:0@20+10", "device:5@30"])
    broken, whole = simulate(config(load, faults=faults), "amoeba"), simulate(config(load), "amoeba")
    assert broken.completed.all()
    assert broken.counters["transformations_failed"] == 1
    assert broken.preempted > whole.preempted
    assert broken.tally.prompt_tokens > whole.tally.prompt_tokens, "what is lost is computed again"
    for text, message in (
        ("disk:1", "--fail 'disk:1' is invalid"),
        ("device:-1@3", "device=-1 must be at least 0"),
    ):
        with pytest.raises(SimulationError, match=message):
            Faults.from_text([text])
    with pytest.raises(SimulationError, match="device=8 must be below num_devices=8"):
        config(faults=Faults.from_text(["device:8@3"]))


def test_prefixes_spare_prompt_tokens(shared_data: Path):
    trace = {
        "dataset_name": "trace", "trace": shared_data / "traces" / "mooncake_conversation.npz", "num_prompts": 150,
        "trace_length_scale": 0.2,
    }  # fmt: skip
    settings = config({**trace, "duration_s": None})
    table = request_table(settings)
    with_prefixes = simulate(settings, "static-tp4", table)
    without = simulate(settings, "static-tp4", replace(table, prefix_blocks={}))
    assert with_prefixes.tally.prefix_tokens > 0
    assert with_prefixes.tally.prompt_tokens + with_prefixes.tally.prefix_tokens == without.tally.prompt_tokens


def test_a_cluster_of_hosts_serves_what_they_serve_alone():
    load = {"short_per_minute": 960.0, "duration_s": 60.0}
    many = simulate(config(load, num_devices=64), "amoeba")
    one = simulate(config(load, num_devices=64, devices_per_scheduler=64), "amoeba")
    assert many.completed.all()
    assert one.completed.all()
    assert sum(many.device_seconds().values()) == pytest.approx(64 * many.duration_s)
    short = many.requests.kinds == 0
    assert np.median(many.ttft_s[short]) == pytest.approx(np.median(one.ttft_s[short]), rel=0.2)


def test_a_run_that_stops_is_judged_by_what_could_have_ended():
    load = {"long_per_minute": 0.0, "short_per_minute": 60.0, "short_output_len": 200, "duration_s": 30.0}
    settings = config(load, slo=Slo(ttft_s=2.0, tpot_s=0.1), until_s=30.0)
    result = simulate(settings, "static-tp1")
    assert (result.ending == Ending.OPEN).any()
    assert result.kept_share == 1.0
    assert result.report()["slo_share"] == 1.0
    latest_s = 2.0 + 199 * 0.1
    assert result.judged.tolist() == (result.requests.arrival_s <= 30.0 - latest_s).tolist()
    missed = simulate(replace(settings, slo=Slo(ttft_s=1e-3, tpot_s=0.1)), "static-tp1")
    assert missed.kept_share == 0.0
    only_first = simulate(replace(settings, slo=Slo(ttft_s=2.0)), "static-tp1")
    assert (only_first.ending[~only_first.judged] == Ending.OPEN).all()
    assert only_first.kept_share == 1.0


def test_a_step_computes_all_prompts_that_its_budget_has_room_for():
    load = {"dataset_name": "random", "num_prompts": 64, "duration_s": None, "random_input_len": 32}
    settings = config(load, num_devices=1, max_num_batched_tokens=2048, max_num_seqs=64)
    table = request_table(settings)
    first_s = simulate(settings, "static-tp1", table).ttft_s
    assert np.ptp(first_s) == 0.0


def test_rates_and_devices_are_found_at_the_edge():
    load = {"long_per_minute": 0.0, "short_per_minute": 600.0, "duration_s": 30.0}
    settings = config(load, slo=Slo(ttft_s=2.0, tpot_s=0.1, share=0.95))
    answer = find_max_rate(settings, "static-tp1")
    passed = [t.value for t in answer.trials if t.passed]
    failed = [t.value for t in answer.trials if not t.passed]
    assert answer.value == max(passed)
    assert max(passed) < min(failed)
    assert not any(t.passed for t in answer.trials if t.kept_share < 0.95)
    fewest = find_min_devices(replace(settings, num_devices=16), "static-tp1")
    assert fewest.value is not None
    assert {t.value: t.passed for t in fewest.trials}[fewest.value]
    with pytest.raises(SimulationError, match="needs an objective"):
        find_max_rate(config(load), "static-tp1")


def test_lost_time_is_told():
    load = {"short_per_minute": 1500.0, "duration_s": 20.0}
    results = {name: simulate(config(load), name) for name in ("amoeba", "static-tp4")}
    lines = explain(results)
    assert len(lines) == 2
    loser = "static-tp4" if ranking(results)[0] == "amoeba" else "amoeba"
    assert lines[1].startswith(f"{loser}: ")
    assert "Mean TTFT" in lines[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_devices": 0}, "num_devices=0 must be from 1 to 100000"),
        ({"devices_per_scheduler": 3}, "devices_per_scheduler=3 must be at least 1 and divide num_devices=8"),
        ({"page_size": 10}, "page_size=10 must be a power of two"),
        ({"deadline_s": -1.0}, "deadline_s=-1.0 must be above 0"),
        ({"urgent_share": 1.5}, "urgent_share=1.5 must be from 0 to 1"),
        ({"degrees": (3,)}, "degrees has 3"),
        ({"router": "magic"}, "router='magic' must be one of two_choices, round_robin"),
        ({"memory_utilization": 0.0}, "memory_utilization=0.0 must be in"),
        ({"device": "A100-40"}, "fits at no degree|needs|fits"),
    ],
)
def test_bad_settings_name_the_value(changes: dict, message: str):
    with pytest.raises(SimulationError, match=message):
        simulate(config(**{"degrees": (1,), **changes} if "device" in changes else changes), "amoeba")


def test_unknown_policies_and_degrees_that_do_not_fit_say_so():
    with pytest.raises(SimulationError, match=r"policy 'best' is unknown: it must be one of amoeba"):
        simulate(config(), "best")
    with pytest.raises(SimulationError, match=r"'static-tp8' needs TP8, but on 4 devices the model fits only at TP1"):
        simulate(config(num_devices=4), "static-tp8")
    with pytest.raises(SimulationError, match=r"--slo 'speed:3': the name must be one of ttft, tpot, e2el"):
        Slo.from_text(["speed:3"])
    with pytest.raises(SimulationError, match=r"--slo ttft:-1 must be above 0"):
        Slo.from_text(["ttft:-1"])


def test_the_simulator_imports_no_jax():
    code = (
        "import sys, pkgutil, importlib, serving.simulator as s; "
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(s.__path__, 'serving.simulator.')]; "
        "print(sorted({n.partition('.')[0] for n in sys.modules} & {'jax', 'jaxlib', 'flax', 'transformers', 'grpc'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_rates_of_traces_are_found(tmp_path: Path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{n},8000,8\n" for n in range(40)))
    load = {"dataset_name": "trace", "trace": trace, "num_prompts": 40, "duration_s": None}
    slo = Slo(ttft_s=20.0, share=0.9)
    answer = find_max_rate(config(load, slo=slo, num_devices=1), "static-tp1")
    assert answer.value is not None
    assert 0 < answer.value < 1, "half of the trace's rate and less is tried, with fewer requests"
    small = config(load | {"trace_length_scale": 1e-4}, slo=slo, num_devices=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serving.bench.workload.MAX_REQUESTS", 200)
        answer = find_max_rate(small, "static-tp1")
    assert answer.at_limit, "no more requests than that"
    assert [trial.passed for trial in answer.trials] == [True, True, True], "1, 2 and 4 times the rate"
    for changes in ({"request_rate": float("inf")}, {"trace": _without_times(tmp_path)}):
        with pytest.raises(SimulationError, match="all requests arrive at once"):
            find_max_rate(config(load | changes, slo=slo, num_devices=1), "static-tp1")


def _without_times(folder: Path) -> Path:
    path = folder / "lengths.csv"
    path.write_text("input_tokens,output_tokens\n" + "800,8\n" * 40)
    return path


def test_devices_that_no_instance_would_take_are_an_error():
    whole = config(num_devices=8, devices_per_scheduler=8, activation_gb=40.0)
    degrees = [limit.degree for limit in make_setup(whole, "static-tp4").host.limits]
    assert min(degrees) > 1, "the model fits on no single device here"
    four = replace(whole, num_devices=4, devices_per_scheduler=4, degrees=(4,), activation_gb=60.0)
    with pytest.raises(SimulationError, match=r"'static-mixed' needs instances of two degrees, .* fits only at TP4"):
        make_setup(four, "static-mixed")
    fewest = find_min_devices(replace(whole, activation_gb=60.0, slo=Slo(ttft_s=60.0)), "static-tp4")
    assert fewest.value == 4
    with pytest.raises(SimulationError, match="6 devices are not a multiple of 4: an instance needs TP4"):
        make_setup(config(num_devices=6, devices_per_scheduler=6), "static-tp4")
