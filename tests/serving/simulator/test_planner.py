"""Answers for planners: refusals, classes, ranks, limits, layouts, sweeps, prices and sensitivity."""

import json
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shapes import QWEN_32B, config

from amoeba_jax.errors import ConfigError
from serving.bench.workload import WorkloadConfig
from serving.commands.simulate_run import OutputConfig, read_factors, run_simulation
from serving.scheduler import DegreeLimits, UnknownPolicyError, load_policy
from serving.simulator import search
from serving.simulator.device_spec import find_device
from serving.simulator.errors import DoesNotFitError, SimulationError
from serving.simulator.explain import compare, explain, limits_line, ranking
from serving.simulator.faults import Faults
from serving.simulator.layouts import degrees_at_start, read_parts
from serving.simulator.requests import RequestTable
from serving.simulator.result import PolicyResult
from serving.simulator.sensitivity import CONSTANTS, changed_devices, sensitivity, sensitivity_lines
from serving.simulator.settings import SimulationConfig
from serving.simulator.setups import make_setup, make_setups
from serving.simulator.simulate import request_table, simulate
from serving.simulator.slo import Slo
from serving.simulator.step_cost import StepShape
from serving.simulator.tally import Ending, Limit


def trace(tmp_path: Path, *rows: str, header: str = "arrival_s,input_tokens,output_tokens") -> WorkloadConfig:
    """Return a workload from rows of a CSV file."""
    path = tmp_path / "mine.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return WorkloadConfig(dataset_name="trace", trace=path)


# Requests


def test_requests_longer_than_the_context_are_refused_and_not_cut(tmp_path: Path, capsys: pytest.CaptureFixture):
    rows = [f"{n},1000,50" for n in range(8)] + ["8,9000,50", "9,8100,200"]
    settings = SimulationConfig(
        replace(QWEN_32B, max_position=8192), trace(tmp_path, *rows), "H20", policies=("static-tp4", "amoeba")
    )
    table = request_table(settings)
    assert table.input_len.tolist() == [1000] * 8 + [9000, 8100], "nothing is cut"
    for name in settings.policies:
        result = simulate(settings, name, table)
        assert result.ending.tolist() == [Ending.COMPLETED] * 8 + [Ending.NEVER_FITS] * 2
        assert result.report()["too_long"] == result.report()["failed"] == 2
        assert result.kept_share == 0.8
    assert run_simulation(settings, OutputConfig()) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "WARNING: 2 of 10 requests have more tokens than the context of the model (8,192; the longest has 9,050)"
        in text
    )


def test_a_benchmark_still_shortens_requests_of_a_trace(tmp_path: Path):
    from serving.bench.workload import plan_requests

    (request,) = plan_requests(trace(tmp_path, "0,9000,50"), 8192)
    assert (request.input_len + request.output_len, request.shortened) == (8192, True)


CLASSES = "arrival_s,input_tokens,output_tokens,class,priority"


def test_classes_and_priorities_of_a_trace_have_figures_of_their_own(tmp_path: Path):
    rows = [f"{n},{900 + n},40,{'chat' if n % 3 else 'rag'},{-(n % 3 == 2)}" for n in range(30)]
    load = trace(tmp_path, *rows, header=CLASSES)
    settings = config(slo=Slo.from_text(["ttft:5", "rag:ttft:0.0001", "chat:tpot:9"]))
    settings = replace(settings, workload=load)
    table = request_table(settings)
    assert table.kind_names == ("chat, priority -1", "chat, priority 0", "rag, priority 0")
    assert [int((table.kinds == kind).sum()) for kind in range(3)] == [10, 10, 10]
    assert table.priority is not None
    assert set(table.priority[table.kinds == 0].tolist()) == {-1}
    classes = simulate(settings, "static-tp4", table).report()["classes"]
    assert classes["rag, priority 0"]["slo_share"] == 0.0, "no first token comes in 0.1 ms"
    assert classes["chat, priority 0"]["slo_share"] == 1.0
    assert all(classes[name]["completed"] == 10 for name in table.kind_names)


def test_classes_survive_a_higher_rate(tmp_path: Path):
    rows = [f"{n},{100 if n % 2 else 200},40,{'chat' if n % 2 else 'rag'},{n % 2}" for n in range(30)]
    load = replace(trace(tmp_path, *rows, header=CLASSES), trace_rate_scale=2.0)
    table = request_table(replace(config(), workload=load))
    assert len(table) == 60
    assert table.kind_names == ("chat, priority 1", "rag, priority 0")
    assert (table.input_len == np.where(table.kinds == 0, 100, 200)).all()


def test_urgent_requests_have_figures(tmp_path: Path):
    settings = config({"duration_s": 30.0, "long_per_minute": 0.0}, urgent_share=0.5)
    report = simulate(settings, "static-tp4").report()
    assert set(report["classes"]) == {"priority -1", "priority 0"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0,10,10,,0", "class='' must be a text of 1 to 64 characters"),
        (f"0,10,10,{'x' * 65},0", "must be a text of 1 to 64 characters"),
        ("0,10,10,a,high", "priority='high' must be an integer"),
        ("0,10,10,a,1e99", "priority='1e99' must be an integer"),
    ],
)
def test_bad_classes_name_the_line(tmp_path: Path, row: str, message: str):
    with pytest.raises(ValueError, match=f"line 2: {message}|line 2.*{message}"):
        request_table(replace(config(), workload=trace(tmp_path, row, header=CLASSES)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chat:speed:1", "the name must be one of ttft, tpot, e2el"),
        ("chat:e2el:1", "must be a limit of ttft or tpot"),
        ("chat:ttft:0", "above 0 seconds"),
        ("nobody:ttft:1", "--slo has the class 'nobody', but the classes of the requests are short, long"),
    ],
)
def test_bad_limits_of_classes_are_refused(text: str, message: str):
    with pytest.raises(SimulationError, match=message):
        request_table(config(slo=Slo.from_text([text])))


def test_without_objectives_no_share_is_shown(capsys: pytest.CaptureFixture):
    settings = config({"duration_s": 10.0, "long_per_minute": 0.0}, policies=("static-tp4",))
    assert simulate(settings, "static-tp4").report()["slo_share"] is None
    run_simulation(settings, OutputConfig(explain=True))
    text = capsys.readouterr().out
    assert "no objective is set" in text
    assert "within the objectives" not in text


# Ranks


def test_equal_policies_are_ties_whatever_their_order():
    result = simulate(config({"duration_s": 10.0, "long_per_minute": 0.0}), "static-tp4")
    for names in (("one", "two"), ("two", "one")):
        results = {name: replace(result, policy=name) for name in names}
        assert compare(*results.values()) == 0
        (line,) = explain(results)
        assert line.startswith(f"Best: {names[0]}, {names[1]} (no relevant difference)")


def test_a_policy_that_refuses_requests_does_not_win_over_an_equal_share():
    served = simulate(config({"duration_s": 30.0, "long_per_minute": 8.0}), "amoeba")
    count = len(served.ending)
    long = int(np.argmax(served.requests.input_len))
    assert served.requests.input_len[long] == 50_000
    late, refused = served.kept.copy(), served.ending.copy()
    late[long] = False
    refused[long] = Ending.NEVER_FITS
    slow = replace(served, policy="slow", kept=late, ttft_s=served.ttft_s + 1.0, prefill_s=served.prefill_s + 1.0)
    picky = replace(served, policy="picky", kept=late, ending=refused)
    assert slow.kept_share == picky.kept_share == pytest.approx(1 - 1 / count)
    assert ranking({"picky": picky, "slow": slow}) == ["slow", "picky"]
    lines = explain({"picky": picky, "slow": slow})
    assert "picky" in lines[1]
    assert "1 requests fit none of its instances (1 long)" in lines[1], lines[1]


# Limits


def test_each_policy_names_what_limits_it():
    crowded = config({"short_per_minute": 2400.0, "duration_s": 20.0, "long_per_minute": 0.0})
    slots = simulate(replace(crowded, max_num_seqs=4), "static-tp1")
    assert max(slots.tally.limited_s, key=lambda limit: slots.tally.limited_s[limit]) is Limit.SLOTS
    assert "32 slots. Limit: slots (--max-num-seqs)" in limits_line(slots)
    cache = simulate(replace(crowded, activation_gb=16.0, max_num_seqs=256), "static-tp1")
    assert "Limit: room in the KV cache" in limits_line(cache)
    idle = simulate(config({"duration_s": 20.0, "long_per_minute": 0.0}), "static-tp4")
    assert limits_line(idle).endswith("Limit: none, requests hardly waited.")
    assert "2 x TP4; degrees: fixed; " in limits_line(idle)


def test_one_possible_degree_is_told():
    """70B on H100: `amoeba` copies attention weights, so only TP4 fits, with less cache than a static layout."""
    model = replace(QWEN_32B, hidden_size=8192, ffn_size=28672, num_heads=64, num_layers=80)
    settings = SimulationConfig(model, WorkloadConfig(num_prompts=4, request_rate=1.0), "H100")
    amoeba, static = (simulate(settings, name) for name in ("amoeba", "static-tp4"))
    assert "2 x TP4; degrees: TP4 only; " in limits_line(amoeba)
    assert amoeba.limits()["cache_tokens"] < 0.7 * static.limits()["cache_tokens"]


def test_slots_come_from_memory_by_default():
    settings = config(activation_gb=14.3)
    (one, *_), given = make_setup(settings, "static-tp1").host.limits, replace(settings, max_num_seqs=4)
    assert one.capacity_tokens / 1024 / 16 < one.max_requests, "slots are no tighter than the cache"
    assert make_setup(given, "static-tp1").host.limits[0].max_requests == 4
    wide = simulate(config({"short_per_minute": 1200.0, "duration_s": 20.0, "long_per_minute": 0.0}), "static-tp4")
    assert Limit.SLOTS not in wide.tally.limited_s


def test_a_policy_that_does_not_fit_gets_a_row_with_the_reason(capsys: pytest.CaptureFixture):
    settings = config(
        {"duration_s": 10.0, "long_per_minute": 0.0}, activation_gb=40.0, policies=("static-tp1", "static-tp4")
    )
    assert run_simulation(settings, OutputConfig()) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "static-tp1: not possible: policy 'static-tp1' needs TP1" in text
    with pytest.raises(DoesNotFitError, match="needs TP1"):
        run_simulation(replace(settings, policies=("static-tp1",)), OutputConfig())


def test_a_mixed_layout_of_equal_instances_is_refused():
    with pytest.raises(DoesNotFitError, match="'static-mixed' needs instances of two degrees"):
        degrees_at_start("static-mixed", 8, [DegreeLimits(4, 1000, 8)])


@pytest.mark.parametrize("name", ["kunserve", "shift", "seesaw", "loongserve"])
def test_comparators_do_not_fall_back_to_other_limits(name: str):
    """70B in bf16 on A100-40: a device can hold neither all weights nor two copies of a part."""
    model = replace(QWEN_32B, hidden_size=8192, ffn_size=28672, num_heads=64, num_layers=80)
    settings = SimulationConfig(model, WorkloadConfig(), "A100-40", activation_gb=30.0)
    with pytest.raises(DoesNotFitError, match="fits at no degree"):
        make_setup(settings, name)


def test_seesaw_divides_all_weights_as_its_transfers_do():
    settings = config()
    seesaw, static, amoeba = (
        {limit.degree: limit.capacity_tokens for limit in make_setup(settings, name).host.limits}
        for name in ("seesaw", "static-tp4", "amoeba")
    )
    assert seesaw[4] == static[4] > amoeba[4]


# Layouts


def test_layouts_are_named_by_their_parts():
    assert read_parts("static:tp4x1+tp1x4") == ((4,), (1, 1, 1, 1))
    assert read_parts("static-tp4") is None
    host = make_setup(config(), "static:tp4x1+tp1x4").host
    assert host.degrees_at_start == (4, 1, 1, 1, 1)
    result = simulate(config({"duration_s": 20.0}), "static:tp4x1+tp1x4")
    assert result.limits()["instances_at_start"] == {"1": 4, "4": 1}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("static:tp3x1", "must be parts such as tp4x1"),
        ("static:4x1", "must be parts such as tp4x1"),
        ("static:tp4x0", "must be parts such as tp4x1"),
        ("static:" + "+".join(["tp1x1"] * 17), "must be parts such as tp4x1"),
        ("amoeba:tp4x1", "only static:PARTS and disaggregated:PREFILL.DECODE list"),
        ("disaggregated:tp4x2", "only static:PARTS and disaggregated:PREFILL.DECODE list"),
        ("static:tp4x1", "needs 4 devices, but a scheduler has 8"),
        ("static:tp16x1", "needs TP16"),
    ],
)
def test_bad_layouts_are_refused(name: str, message: str):
    with pytest.raises(SimulationError, match=message):
        make_setup(config(), name)


def test_disaggregated_instances_compute_prompts_or_decode():
    load = {"duration_s": 60.0, "long_per_minute": 0.0, "short_output_len": 100}
    settings = config(load, max_num_batched_tokens=512)
    mixed, apart = (simulate(settings, name) for name in ("static-tp4", "disaggregated:tp4x1+tp4x1"))
    assert apart.completed.all()
    assert apart.tally.interference_s == 0.0, "no prompt in a decode step"
    assert mixed.tally.interference_s > 0.0
    assert apart.tally.generated_tokens == mixed.tally.generated_tokens == 100 * len(apart.requests)
    tokens = float((apart.requests.input_len + 1).sum())
    assert apart.tally.kv_bytes == pytest.approx(tokens * QWEN_32B.kv_token_bytes(), rel=1e-6)
    assert np.nanmean(apart.tpot_s) < np.nanmean(mixed.tpot_s)


def test_disaggregation_holds_pages_until_a_decode_instance_has_room():
    """More requests arrive at once than the decode instance has slots."""
    load = {"dataset_name": "random", "num_prompts": 40, "duration_s": None, "random_output_len": 50}
    settings = config(load, max_num_seqs=2)
    result = simulate(settings, "disaggregated:tp4x1+tp4x1")
    assert result.completed.all()
    assert result.tally.generated_tokens == 40 * 50
    failing = replace(settings, faults=Faults.from_text(["device:0@1"]))
    with pytest.raises(SimulationError, match="failures of devices cannot be simulated with disaggregated"):
        make_setups(failing, "disaggregated")


# Devices


def test_hosts_may_have_different_devices():
    load = {"duration_s": 60.0, "long_per_minute": 0.0, "short_per_minute": 600.0}
    settings = config(load, device="H200:8+H20:8", num_devices=16)
    setups = make_setups(settings, "static-tp4")
    fast, slow = (setup.host.pricing.fixed_s(4, StepShape(1, 1, 2048, 2048)) for setup in setups)
    assert slow > 4 * fast, "148 TFLOPS beside 989"
    assert setups[0].host.limits[0].capacity_tokens > setups[1].host.limits[0].capacity_tokens
    mixed = simulate(settings, "static-tp4")
    ends = [simulate(replace(settings, device=name), "static-tp4") for name in ("H200", "H20")]
    assert ends[0].report()["mean_ttft_ms"] < mixed.report()["mean_ttft_ms"] < ends[1].report()["mean_ttft_ms"]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("H100+A100", "'H100' must be a device and a number"),
        ("H100:8+A100:0", "'A100:0' must be a device and a number"),
        ("H100:8+A100:16", "has 24 devices, but num_devices=16"),
        ("H100:8+B9000:8", "'B9000' is unknown"),
    ],
)
def test_bad_kinds_of_devices_are_refused(device: str, message: str):
    with pytest.raises(SimulationError, match=message):
        make_setups(config(device=device, num_devices=16), "amoeba")


def test_routers_give_faster_hosts_more_requests():
    from serving.simulator.router import TwoChoicesRouter

    table = RequestTable(np.zeros(3000), *(np.full(3000, 10) for _ in range(3)), np.zeros(3000, int))
    router = TwoChoicesRouter([3.0, 1.0], 0, 3000)
    chosen = [router.choose(index, table) for index in range(3000)]
    assert chosen.count(0) / chosen.count(1) == pytest.approx(3, rel=0.05)


# Questions


def test_a_sweep_prints_goodput_of_all_policies_at_each_rate(tmp_path: Path, capsys: pytest.CaptureFixture):
    settings = config(
        {"duration_s": 20.0, "long_per_minute": 0.0, "short_per_minute": 600.0}, slo=Slo(ttft_s=1.0),
        policies=("static-tp1", "static-tp4"), price_per_hour=2.0,
    )  # fmt: skip
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    assert run_simulation(settings, OutputConfig(json=out, plot=plot, sweep_rate=(0.5, 2.0))) == 0
    points = json.loads(out.read_text())["sweep"]
    assert len(points) == 2
    assert points[1]["rate"] == pytest.approx(4 * points[0]["rate"], rel=0.3)
    assert all(set(point["policies"]) == {"static-tp1", "static-tp4"} for point in points)
    prices = [point["policies"]["static-tp1"]["usd_per_million_tokens"] for point in points]
    assert prices[1] < prices[0], "a busier device is cheaper"
    assert "<svg" in plot.read_text()
    captured = capsys.readouterr()
    assert "static-tp4: " in captured.err, "progress without a terminal"


def test_a_search_tells_each_trial_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Without a terminal, progress goes to stderr and the table to stdout."""
    settings = config(
        {"duration_s": 10.0, "long_per_minute": 0.0, "short_per_minute": 600.0}, slo=Slo(ttft_s=1.0),
        policies=("static-tp1", "static-tp4"),
    )  # fmt: skip
    told, tables = [], ""

    def watched(config: SimulationConfig, policy: str, queue_limit: int | None = None) -> PolicyResult:
        nonlocal tables
        out, err = capsys.readouterr()
        told.append(err)
        tables += out
        return simulate(config, policy, queue_limit=queue_limit)

    monkeypatch.setattr(search, "simulate", watched)
    out = tmp_path / "out.json"
    assert run_simulation(settings, OutputConfig(json=out, find_max_rate=True)) == 0
    captured = capsys.readouterr()
    expected = [""]
    for answer in json.loads(out.read_text())["answers"]:
        expected[-1] += f"{answer['policy']}: search started\n"
        for trial in answer["trials"]:
            passed = trial["lacks"] or "within the objectives"
            expected.append(f"{answer['policy']}: {trial['value']:.4g} requests/s: {passed}\n")
    assert [*told, captured.err] == expected
    assert tables + captured.out
    assert "search started" not in tables + captured.out


def test_the_price_of_tokens_is_that_of_the_devices():
    settings = config({"duration_s": 60.0, "long_per_minute": 0.0}, price_per_hour=3.0)
    result = simulate(settings, "static-tp4")
    paid = 8 * 3.0 * result.duration_s / 3600
    tokens = result.requests.output_len.sum() / 1e6
    assert result.report()["usd_per_million_tokens"] == pytest.approx(paid / tokens)


def test_output_options_without_an_effect_are_refused():
    with pytest.raises(ConfigError, match="--explain cannot be combined with --sweep-rate"):
        OutputConfig(explain=True, sweep_rate=(1.0,))
    with pytest.raises(ConfigError, match="--plot cannot be combined with --find-max-rate"):
        OutputConfig(plot=Path("a.svg"), find_max_rate=True)


def test_factors_of_a_sweep_are_checked():
    assert read_factors("0.5,2") == (0.5, 2.0)
    for text in ("", "0", "1,x", "2000", "nan", ",".join(["1"] * 51)):
        with pytest.raises(ValueError, match="--sweep-rate"):
            read_factors(text)


def test_sensitivity_says_which_conclusions_survive():
    settings = config(
        {"duration_s": 20.0, "long_per_minute": 0.0, "short_per_minute": 300.0}, slo=Slo(ttft_s=10.0),
        policies=("static-tp1", "static-tp4"),
    )  # fmt: skip
    table = request_table(settings)
    results = {name: simulate(settings, name, table) for name in settings.policies}
    conclusions, changes = sensitivity(settings, results, table)
    assert changes == 2 * len(CONSTANTS)
    (conclusion,) = conclusions
    better, worse = conclusion.better, conclusion.worse
    device = changed_devices(find_device("H20"))["kernel_s +20%"]
    assert device.kernel_s == pytest.approx(1.2 * find_device("H20").kernel_s)
    changed = {name: simulate(replace(settings, device=device), name, table) for name in settings.policies}
    broken = {*conclusion.equal, *conclusion.reversed}
    assert (compare(changed[better], changed[worse]) < 0) == ("kernel_s +20%" not in broken)
    assert any(better in line for line in sensitivity_lines(conclusions, changes))


def test_a_conclusion_that_is_reversed_is_told():
    from serving.simulator.sensitivity import Conclusion

    text = Conclusion("a", "b", ("kernel_s +20%",), ("link_efficiency -20%",)).text(14)
    assert text == (
        "a is better than b: does not survive: reversed with link_efficiency -20%; equal with kernel_s +20%."
    )


# Policies from files


def policy_of_the_document(tmp_path: Path) -> Path:
    """Write the shortest-job-first policy of docs/extending.md to a file."""
    text = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
    path = tmp_path / "my_policy.py"
    path.write_text(textwrap.dedent(text.split("   ```python\n")[1].split("   ```\n")[0]))
    return path


def test_the_policy_of_the_document_is_simulated(tmp_path: Path):
    path = policy_of_the_document(tmp_path)
    rows = [f"0.{n:02d},{3000 if n % 2 == 0 else 300},20" for n in range(60)]
    settings = replace(config(num_devices=1, max_num_seqs=2, device="H200"), workload=trace(tmp_path, *rows))
    plain, shortest = (simulate(settings, name) for name in ("amoeba", f"{path}:Sjf"))
    short = plain.requests.input_len == 300
    assert shortest.completed.all()
    assert np.mean(shortest.ttft_s[short]) < 0.7 * np.mean(plain.ttft_s[short])


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (None, "Sjf", "there is no file"),
        ("x = 1", "Sjf", "AttributeError"),
        ("raise RuntimeError('broken')", "Sjf", "RuntimeError: broken"),
        ("class Sjf:\n    name = 'sjf'", "Sjf", r"must have a name, and a method decide\(view\)"),
    ],
)
def test_bad_policy_files_say_why(tmp_path: Path, text: str | None, name: str, message: str):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnknownPolicyError, match=message):
        load_policy(f"{path}:{name}")


def test_a_server_loads_a_policy_file_at_its_start_only(tmp_path: Path):
    """A call of `SetPolicy` comes over the network and must not run files."""
    from serving.runtime.scheduling_config import SchedulingConfig

    path = policy_of_the_document(tmp_path)
    config = SchedulingConfig(policy=f"{path}:Sjf")
    assert config.make_policy().name == "sjf"
    with pytest.raises(UnknownPolicyError):
        config.make_policy(f"{path}:Sjf")
