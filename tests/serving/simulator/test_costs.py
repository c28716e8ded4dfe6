"""Costs against arithmetic and measured profiles; sizes against published parameter counts."""

import json
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
from serving.simulator.step_cost import ModelStepCost, StepShape, prompt_pairs
from serving.simulator.transformation_cost import InPlaceCost, count_moves

PARAMETERS = {
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-2-7B": 6_738_415_616,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "gpt-oss-120b": 116_829_156_672,
}
"""As transformers counts them."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_are_those_of_the_published_configs(shared_data: Path, name: str):
    shape = ModelShape.read(shared_data / "configs" / name)
    assert shape.weight_bytes / shape.item_bytes == pytest.approx(PARAMETERS[name], rel=0.003)


def test_kv_cache_of_a_token(shared_data: Path):
    assert QWEN_32B.kv_token_bytes() == 262_144
    assert QWEN_32B.kv_token_bytes(4) == 65_536
    assert QWEN_32B.kv_token_bytes(16) == QWEN_32B.kv_token_bytes(8), "each KV head is stored twice"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size=None in config.json must be a positive integer"),
        ({"num_hidden_layers": -3}, "num_hidden_layers=-3 in config.json"),
        ({"torch_dtype": "int3"}, "dtype='int3' in config.json is unknown"),
    ],
)
def test_bad_configs_name_the_field(change: dict, message: str):
    config = {
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99,
    }  # fmt: skip
    with pytest.raises(SimulationError, match=message):
        ModelShape.from_hf("m", config | change)


def test_unknown_devices_and_bad_files_say_so(tmp_path: Path):
    with pytest.raises(SimulationError, match=r"--device 'B9000' is unknown: it must be one of A100-40"):
        find_device("B9000")
    data = {name: getattr(find_device("H20"), name) for name in ("memory_bytes", "flops")}
    (tmp_path / "own.json").write_text(json.dumps({"name": "own", **data}))
    with pytest.raises(SimulationError, match="a field of the device is missing"):
        find_device(str(tmp_path / "own.json"))
    assert find_device("a100-80GB").memory_bytes == 80e9


@pytest.mark.parametrize("name", device_names())
def test_devices_have_sources_and_plausible_rates(name: str):
    device = find_device(name)
    assert len(device.sources) >= 2
    assert 100e12 < device.flops < 3e15
    assert device.memory_bandwidth / device.link_bandwidth > 3


@pytest.mark.parametrize("device", ["a100", "h100"])
def test_linear_operators_at_held_out_points(shared_data: Path, device: str):
    """A fifth of the token counts is held out: median error at most 5%, 90th percentile at most 10%."""
    files = sorted((shared_data / "profiles").glob(f"{device}*mlp.csv.gz"))
    errors = []
    for file in files:
        points = read_points(file)
        counts = sorted({point.tokens for point in points})
        held = set(np.random.default_rng(0).choice(counts[1:-1], len(counts) // 5, replace=False).tolist())
        profile = OperatorProfile(point for point in points if point.tokens not in held)
        for point in points:
            if point.tokens in held:
                seconds = profile.seconds(point.inputs, point.outputs, point.tokens)
                assert seconds is not None
                errors.append(abs(seconds / point.seconds - 1))
    assert np.median(errors) <= 0.05
    assert np.percentile(errors, 90) <= 0.10


def test_roofline_stands_in_for_matrices_that_were_not_measured(shared_data: Path):
    """The efficiencies were fitted to these profiles; the error is larger than that of interpolation."""
    points = read_points(shared_data / "profiles" / "a100_Llama-2-7b-hf_mlp.csv.gz")
    from serving.simulator.step_cost import roofline_s

    device = find_device("A100-80")
    errors = [abs(roofline_s(device, p.inputs, p.outputs, p.tokens, 2) / p.seconds - 1) for p in points]
    assert np.median(errors) < 0.10


def test_bad_profiles_name_the_column_or_the_line(tmp_path: Path):
    file = tmp_path / "p.csv"
    file.write_text("n_head,num_tokens\n1,2\n")
    with pytest.raises(SimulationError, match="has no column n_kv_head"):
        read_points(file)


def test_a_decode_step_takes_at_least_the_reading_of_all_weights():
    device = find_device("H20")
    cost = ModelStepCost(QWEN_32B, device)
    for degree in (1, 2, 4):
        least_s = QWEN_32B.weight_bytes / degree / device.memory_bandwidth
        assert cost.fixed_s(degree, StepShape(1)) > 0.9 * least_s
    prompt_s = cost.fixed_s(1, StepShape(0, 1, 2048, 2048))
    assert prompt_s > 2 * 2048 * 32e9 / device.flops


def test_pairs_of_chunks_are_those_of_the_whole_prompt():
    assert sum(prompt_pairs(start, 100) for start in range(0, 1000, 100)) == prompt_pairs(0, 1000) == 500_500


def test_buckets_are_the_engines():
    from amoeba_jax.programs.buckets import Buckets

    for seqs, tokens, degree in ((8, 128, 1), (32, 512, 1), (4, 32, 1), (8, 128, 4), (1, 64, 4), (3, 64, 2)):
        engine, mine = Buckets(seqs * degree, tokens, 1), EngineBuckets(seqs, tokens)  # as `CompilePlan` has them
        assert mine.chunk_sizes == engine.chunk_sizes
        for length in (1, 9, 16, 31, 40, 64, 127, 128, 500, 2000):
            assert mine.chunk_size(length) == engine.chunk_size(length)
            chunk = engine.chunk_size(length)
            for decodes in range(seqs * degree):
                for waiting in (1, 2, 3, 7, 8, 20):
                    expected = engine.most_prompts(decodes, waiting, chunk)
                    assert mine.most_prompts(decodes, waiting, chunk, degree) == expected


def test_moves_are_those_of_the_planner():
    """A quarter of pages by heads stays on each of four devices that merge."""
    assert count_moves(1, 2, 100).share == 0.5
    assert count_moves(1, 4, 100).share == 0.75
    assert count_moves(1, 4, 400).phases_per_page == pytest.approx(count_moves(1, 4, 200).phases_per_page, rel=0.5)


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
    with pytest.raises(SimulationError, match=r"Qwen2.5-32B fits at no degree: at TP1 weights"):
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
    through_host = HostMemoryCost(QWEN_32B, device).change(1, 4, 40_000).seconds(64)
    assert through_host > 5 * InPlaceCost(QWEN_32B, device).change(1, 4, 40_000).seconds(64)
    decodes = StepShape(32)
    assert PipelineCost(base).fixed_s(4, decodes) > base.fixed_s(4, decodes), "a token passes all stages"
    prompt = StepShape(0, 1, 8192, 8192)
    for cost in (SequenceParallelCost(base), UlyssesCost(base)):
        assert cost.fixed_s(4, StepShape(1)) > base.fixed_s(4, StepShape(1)), "each device reads all weights"
        assert cost.fixed_s(4, prompt) < base.fixed_s(1, prompt) / 2
