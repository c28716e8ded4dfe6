"""Costs, compared with arithmetic, measured profiles and measured steps."""

import csv
import gzip
import json
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from shapes import QWEN_32B

from serving.simulator.batching import EngineBuckets
from serving.simulator.comparators import (
    HostMemoryCost,
    LayerExchangeCost,
    PipelineCost,
    SequenceParallelCost,
    UlyssesCost,
)
from serving.simulator.device_spec import device_names, find_device
from serving.simulator.errors import SimulationError
from serving.simulator.memory import MemoryPlan
from serving.simulator.model_shape import ModelShape
from serving.simulator.operator_profile import OperatorProfile, read_points
from serving.simulator.step_cost import PROMPT_EXTRA_KEYS, ModelStepCost, StepShape, prompt_pairs, roofline_s
from serving.simulator.transformation_cost import PHASE_PAGES, PHASES_AT_ONCE, InPlaceCost, count_moves


def test_unknown_devices_and_bad_files_say_so(tmp_path: Path):
    with pytest.raises(SimulationError, match=r"--device 'B9000' is unknown: it must be one of A100-40"):
        find_device("B9000")
    data = {name: getattr(find_device("H20"), name) for name in ("memory_bytes", "flops")}
    (tmp_path / "own.json").write_text(json.dumps({"name": "own", **data}))
    with pytest.raises(SimulationError, match="a field of the device is missing or invalid"):
        find_device(str(tmp_path / "own.json"))
    assert find_device("a100-80GB").memory_bytes == 80e9


@pytest.mark.parametrize("name", device_names())
def test_each_number_of_a_device_has_a_source_and_is_plausible(name: str):
    device = find_device(name)
    numbers = {item.name for item in fields(device)} - {"name", "sources", "step_overhead_s"}
    assert set(device.sources) == numbers
    assert all(len(source) > 20 for source in device.sources.values())
    assert device.step_overhead_s == 0.0, "the engine launches steps ahead"
    assert 100e12 < device.flops < 3e15
    assert device.memory_bandwidth / device.link_bandwidth > 3
    times = [device.all_reduce_s(0.0, ranks) for ranks in range(2, 17)]
    assert times == sorted(times)
    assert times[0] > 0


def test_latencies_that_fall_with_ranks_are_refused():
    with pytest.raises(SimulationError, match="do not fall as ranks grow"):
        replace(find_device("H100"), all_reduce_latency_s={2: 3e-5, 4: 2e-5})


def test_names_of_vendors_are_aliases():
    assert find_device("A100") is not None
    assert find_device("A100") == find_device("a100-80GB") == find_device("A100-80")
    assert find_device("A100-PCIe-80GB").link_bandwidth < 40e9


PROFILES = [f"{device}_{model}_mlp.csv.gz" for device, model in (
    ("a100", "CodeLlama-34b-Instruct-hf"), ("a100", "Llama-2-7b-hf"), ("a100", "Meta-Llama-3-8B"),
    ("h100", "CodeLlama-34b-Instruct-hf"), ("h100", "Llama-2-7b-hf"),
)]  # fmt: skip


def test_all_profiles_are_checked(shared_data: Path):
    assert sorted(file.name for file in (shared_data / "profiles").glob("*mlp.csv.gz")) == PROFILES


@pytest.mark.parametrize("name", PROFILES)
def test_linear_operators_at_held_out_points(shared_data: Path, name: str):
    """A fifth of the token counts is held out. The median error is at most 5%, and the 90th percentile at most 10%."""
    points = read_points(shared_data / "profiles" / name)
    counts = sorted({point.tokens for point in points})
    held = set(np.random.default_rng(0).choice(counts[1:-1], len(counts) // 5, replace=False).tolist())
    profile = OperatorProfile(point for point in points if point.tokens not in held)
    errors = [
        abs((profile.seconds(point.inputs, point.outputs, point.tokens) or math.inf) / point.seconds - 1)
        for point in points
        if point.tokens in held
    ]
    assert len(errors) > 100
    assert np.median(errors) <= 0.05
    assert np.percentile(errors, 90) <= 0.10


@pytest.mark.parametrize("name", PROFILES)
def test_roofline_stands_in_for_matrices_that_were_not_measured(shared_data: Path, name: str):
    """The efficiencies were fitted to these profiles. Interpolation has a smaller error."""
    device = find_device({"a100": "A100-80", "h100": "H100"}[name[:4]])
    ratios = [
        (device.launch_s + roofline_s(device, p.inputs, p.outputs, p.tokens, 2)) / p.seconds
        for p in read_points(shared_data / "profiles" / name)
    ]
    assert np.median(np.abs(np.array(ratios) - 1)) < 0.12
    assert np.median(ratios) == pytest.approx(1, abs=0.1), "neither too slow nor too fast"


def test_bad_profiles_name_the_column_or_the_line(tmp_path: Path):
    file = tmp_path / "p.csv"
    file.write_text("n_head,num_tokens\n1,2\n")
    with pytest.raises(SimulationError, match="has no column n_kv_head"):
        read_points(file)


def test_a_decode_step_at_batch_1_is_the_one_measured_on_an_h100(shared_data: Path):
    """docs/performance.md: 6.56 ms for Qwen3-8B with a context of 128."""
    model = ModelShape.read(shared_data / "configs" / "Qwen3-8B")
    cost = ModelStepCost(model, find_device("H100"))
    assert cost.fixed_s(1, StepShape(1)) + 128 * cost.context_s(1) == pytest.approx(6.56e-3, rel=0.15)


EIGHT_KV_HEADS = replace(QWEN_32B, num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096)


@pytest.mark.parametrize(("sequences", "tokens", "measured_us"), [(64, 4096, 429), (256, 1024, 443), (8, 32_768, 424)])
def test_decode_attention_is_the_one_measured_on_an_h100(sequences: int, tokens: int, measured_us: float):
    """docs/kernels.md: 32 query heads and 8 KV heads of size 128."""
    cost = ModelStepCost(EIGHT_KV_HEADS, find_device("H100"))
    assert cost.context_s(1) * sequences * tokens == pytest.approx(measured_us * 1e-6, rel=0.15)


@pytest.mark.parametrize(("context", "measured_us"), [(0, 176), (32_768, 3214)])
def test_prompt_attention_is_the_one_measured_on_an_h100(context: int, measured_us: float):
    """docs/kernels.md: a chunk of 2,048 tokens."""
    cost = ModelStepCost(EIGHT_KV_HEADS, find_device("H100"))
    pairs = prompt_pairs(context, 2048) + 2048 * PROMPT_EXTRA_KEYS
    assert cost.pair_s(1) * pairs == pytest.approx(measured_us * 1e-6, rel=0.15)


@pytest.mark.parametrize("name", device_names())
def test_a_decode_step_reads_all_weights_and_little_else(name: str):
    """The step reads all weights except the embedding. A layer has two all-reduces and 11 operators: four products,
    attention, two norms, activation, rotary positions and two sums."""
    device = find_device(name)
    cost = ModelStepCost(QWEN_32B, device)
    read_bytes = 65.53e9 - 2 * 152_064 * 5120
    for degree in (1, 2, 4, 8):
        read_s = read_bytes / degree / (device.memory_bandwidth * device.memory_efficiency)
        latency_s = device.all_reduce_s(0.0, degree) if degree > 1 else 0.0
        expected_s = read_s + 64 * (11 * device.kernel_s + 2 * latency_s)
        assert cost.fixed_s(degree, StepShape(1)) == pytest.approx(expected_s, rel=0.02)
    prompt_s = cost.fixed_s(1, StepShape(0, 1, 2048, 2048))
    assert 2 * 2048 * 32e9 / device.flops < prompt_s < 4 * 2048 * 32e9 / device.flops


def test_most_of_a_step_shrinks_with_the_degree(shared_data: Path):
    """Llama-3.1-70B at TP8: 6 ms of reads, and at most as much for launches and all-reduces."""
    model = ModelShape.read(shared_data / "configs" / "Llama-3.1-70B")
    device = find_device("H100")
    read_s = model.weight_bytes / 8 / (device.memory_bandwidth * device.memory_efficiency)
    assert read_s < ModelStepCost(model, device).fixed_s(8, StepShape(1)) < 2 * read_s


def test_host_work_overlaps_with_the_device():
    quick, slow = find_device("H100"), replace(find_device("H100"), host_s=0.02)
    fixed = [ModelStepCost(QWEN_32B, device).fixed_s(1, StepShape(1)) for device in (quick, slow)]
    assert fixed[0] == ModelStepCost(QWEN_32B, replace(quick, host_s=0.0)).fixed_s(1, StepShape(1)), "hidden"
    assert fixed[1] == max(fixed[0], 0.02), "the longer of both"


def test_a_profile_gives_the_time_of_the_work_and_not_of_the_launch(shared_data: Path):
    """A step is one captured program: each operator costs `kernel_s`, not the launch that the profile contains."""
    profile = OperatorProfile.read([shared_data / "profiles" / "h100_Llama-2-7b-hf_mlp.csv.gz"])
    device, model = find_device("H100"), ModelShape.read(shared_data / "configs" / "Llama-2-7B")
    matrix = model.ffn_matrices()[0]
    measured_s = profile.seconds(*matrix.at(1), 1)
    assert measured_s is not None
    expected_s = measured_s - device.launch_s + device.kernel_s
    assert ModelStepCost(model, device, profile).product_s(matrix, 1, 1) == pytest.approx(expected_s)


def test_pairs_of_chunks_are_those_of_the_whole_prompt():
    assert sum(prompt_pairs(start, 100) for start in range(0, 1000, 100)) == prompt_pairs(0, 1000) == 500_500


def test_buckets_are_the_engines():
    from amoeba_jax.programs.buckets import Buckets

    for seqs, tokens, degree in ((8, 128, 1), (32, 512, 1), (4, 32, 1), (8, 128, 4), (1, 64, 4), (3, 64, 2)):
        engine, mine = Buckets(seqs * degree, tokens, 1), EngineBuckets(seqs, tokens)  # as in `CompilePlan`
        assert mine.chunk_sizes == engine.chunk_sizes
        for length in (1, 9, 16, 31, 40, 64, 127, 128, 500, 2000):
            assert mine.chunk_size(length) == engine.chunk_size(length)
            chunk = engine.chunk_size(length)
            for decodes in range(seqs * degree):
                for waiting in (1, 2, 3, 7, 8, 20):
                    expected = engine.most_prompts(decodes, waiting, chunk)
                    assert mine.most_prompts(decodes, waiting, chunk, degree) == expected


def test_moves_are_those_of_the_planner():
    """If four devices merge, a quarter of each device's KV cache stays in place."""
    assert count_moves(1, 2, 100).share == 0.5
    assert count_moves(1, 4, 100).share == 0.75
    assert count_moves(1, 4, 400).phases_per_page == pytest.approx(count_moves(1, 4, 200).phases_per_page, rel=0.5)
    assert count_moves(1, 4, 512).phases_per_page == 0.75 / PHASE_PAGES


def test_phases_are_those_of_the_engine():
    from amoeba_jax.programs.memory import DEFAULT_PHASE_PAGES
    from kvcache.exchange import PHASES_AT_ONCE as PHASES_OF_PROGRAM

    assert PHASE_PAGES == DEFAULT_PHASE_PAGES
    assert PHASES_AT_ONCE == PHASES_OF_PROGRAM


@pytest.mark.parametrize(("name", "prefix"), [("A100-80", "a100"), ("H100", "h100")])
def test_two_devices_exchange_a_phase_in_the_time_of_a_profile(shared_data: Path, name: str, prefix: str):
    """No constant of the model was fitted to these sends of 1 MiB."""
    with gzip.open(shared_data / "profiles" / f"{prefix}_dgx_send_recv.csv.gz", "rt") as file:
        measured = [
            float(row["time_stats.send_recv.median"]) / 1e3
            for row in csv.DictReader(file)
            if row["devices_per_node"] == "2" and abs(int(row["size"]) / 2**20 - 1) < 0.1
        ]
    device = find_device(name)
    phase_s = device.all_reduce_s(0.0, 2) + 2**20 / (device.link_bandwidth * device.link_efficiency)
    assert len(measured) > 10
    assert phase_s == pytest.approx(np.median(measured), rel=0.25)


def test_layers_switch_in_the_time_of_their_phases():
    """Each of four H20 has 55,520 tokens, and three quarters move in 163 phases of 16 pages."""
    device, pages = find_device("H20"), 3470
    sent_bytes = 0.75 * pages * 65_536
    expected_s = sent_bytes / (0.753 * 450e9) + 4 * sent_bytes / (0.6 * 4e12)
    expected_s += 163 * (2 * 3.4e-6 + 6e-6) + (4 + 163 / 3) * 8.2e-6
    change = InPlaceCost(QWEN_32B, device).change(1, 4, 4 * 16 * pages)
    assert change.layer_s == pytest.approx(expected_s, rel=0.02)


def test_a_split_also_brings_back_the_weights_that_were_released():
    cost = InPlaceCost(QWEN_32B, find_device("H20"))
    up, down = cost.change(1, 4, 40_000), cost.change(4, 1, 40_000)
    assert up.weight_bytes == 0
    assert down.weight_bytes == pytest.approx(3 * QWEN_32B.ffn_bytes)
    assert down.seconds(64) > up.seconds(64)
    assert up.kv_bytes == pytest.approx(0.75 * 40_000 * QWEN_32B.kv_token_bytes(), rel=0.01)


def test_capacity_is_what_weights_and_activations_leave():
    device = find_device("H20")
    plan = MemoryPlan(QWEN_32B, device, 1.0, 14.3e9)
    assert plan.capacity_tokens(1) == pytest.approx((96e9 - QWEN_32B.weight_bytes - 14.3e9) / 262_144, rel=0.001)
    static = MemoryPlan(QWEN_32B, device, 1.0, 14.3e9, changes_degree=False)
    assert static.capacity_tokens(1) == plan.capacity_tokens(1)
    assert static.capacity_tokens(4) > plan.capacity_tokens(4), "attention weights are whole where degrees change"
    with pytest.raises(SimulationError, match=r"Qwen2.5-32B fits at no degree: at TP1 the weights"):
        MemoryPlan(QWEN_32B, find_device("A100-40")).limits((1,), 8)


def test_pipelines_exchange_the_cache_of_dropped_layers_and_take_all_their_parameters_back():
    cost = LayerExchangeCost(QWEN_32B, find_device("H20"))
    up, down = cost.change(1, 4, 40_000), cost.change(4, 1, 40_000)
    assert up.kv_bytes == down.kv_bytes == pytest.approx(0.75 * 40_000 * QWEN_32B.kv_token_bytes())
    assert up.weight_bytes == 0
    assert down.weight_bytes == pytest.approx(3 * QWEN_32B.weight_bytes), "each of four has a quarter"


def test_mechanisms_of_others_cost_what_they_say():
    device = find_device("H20")
    base = ModelStepCost(QWEN_32B, device)
    through_host_s = HostMemoryCost(QWEN_32B, device).change(1, 4, 40_000).seconds(64)
    assert through_host_s == pytest.approx((2 * 40_000 * 262_144 + 65.53e9) / 4 / 50e9, rel=0.001)
    decodes = StepShape(32)
    assert PipelineCost(base).fixed_s(4, decodes) > base.fixed_s(4, decodes), "a token passes all stages"
    prompt = StepShape(0, 1, 8192, 8192)
    for cost in (SequenceParallelCost(base), UlyssesCost(base)):
        assert cost.fixed_s(4, StepShape(1)) > base.fixed_s(4, StepShape(1)), "each device reads all weights"
        assert cost.fixed_s(4, prompt) < base.fixed_s(1, prompt) / 2
