"""Sizes of models, compared with published parameter counts, checkpoints and configurations."""

from pathlib import Path
from typing import Any

import pytest
from shapes import QWEN_32B

from serving.simulator.batching import TokenBudget
from serving.simulator.device_spec import find_device
from serving.simulator.errors import SimulationError
from serving.simulator.model_shape import ModelShape, Window
from serving.simulator.pricing import Pricing
from serving.simulator.step_cost import ModelStepCost, StepShape, prompt_pairs

PARAMETERS = {
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-2-7B": 6_738_415_616,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
"""Parameter counts in transformers."""
CHECKPOINTS = {"gpt-oss-20b": 12.8 * 2**30, "gpt-oss-120b": 60.8 * 2**30}
"""Bytes of the published checkpoints (model card of gpt-oss, table 1)."""
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61, "vocab_size": 129280,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
"""Sizes of the published config.json of DeepSeek-V3: 671 billion parameters, of which a token uses 37 billion."""
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 99,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_are_those_of_the_published_configs(shared_data: Path, name: str):
    shape = ModelShape.read(shared_data / "configs" / name)
    assert shape.num_parameters == pytest.approx(PARAMETERS[name], rel=0.001)
    expected = CHECKPOINTS.get(name, 2 * PARAMETERS[name])
    assert shape.weight_bytes == pytest.approx(expected, rel=0.01)


def test_kv_cache_of_a_token(shared_data: Path):
    assert QWEN_32B.kv_token_bytes() == 262_144
    assert QWEN_32B.kv_token_bytes(4) == 65_536
    assert QWEN_32B.kv_token_bytes(16) == QWEN_32B.kv_token_bytes(8), "each KV head is stored twice"


def test_latent_attention_stores_one_compressed_vector_for_each_token():
    shape = ModelShape.from_hf("DeepSeek-V3", DEEPSEEK_V3)
    assert shape.num_parameters == pytest.approx(671e9, rel=0.002)
    assert shape.weight_bytes == pytest.approx(671e9 + 2 * 129280 * 7168, rel=0.003), "FP8, but not the vocabulary"
    assert shape.kv_token_bytes() == 70_272
    assert shape.kv_token_bytes(8) == 70_272, "each rank stores the vectors of all heads"
    active = 37e9 * 1.0
    one = ModelStepCost(shape, find_device("H200")).fixed_s(8, StepShape(1))
    rate = find_device("H200").memory_bandwidth * find_device("H200").memory_efficiency
    assert active / 8 / rate < one < active / 8 / rate + 61 * 150e-6


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 0.5 + 2.5 / 64),
        ({"quant_method": "fp8"}, 1.0),
    ],
)
def test_quantized_weights_have_their_sizes(quantization: dict, expected: float):
    shape, plain = (ModelShape.from_hf("m", SMALL | more) for more in ({"quantization_config": quantization}, {}))
    assert shape.ffn_bytes == pytest.approx(plain.ffn_bytes * expected / 2)
    assert shape.attention_bytes == pytest.approx(plain.attention_bytes * expected / 2)
    assert shape.kv_token_bytes() == plain.kv_token_bytes(), "the cache is not quantized"
    assert plain.other_bytes - 4 * plain.attention_bytes == shape.other_bytes - 4 * shape.attention_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size=None in config.json must be a positive integer"),
        ({"num_hidden_layers": -3}, "num_hidden_layers=-3 in config.json"),
        ({"torch_dtype": "int3"}, "dtype='int3' in config.json is unknown"),
        ({"model_type": "mamba2"}, "model_type='mamba2' cannot be simulated: it must be one of llama"),
        ({"quantization_config": {"quant_method": "bitnet"}}, "quant_method='bitnet' cannot be simulated"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4' without experts cannot be simulated"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, "bits=5 and group_size=128 cannot"),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["mlp.down_proj"]}},
            "modules_to_not_convert has 'mlp.down_proj'",
        ),
        ({"sliding_window": 16}, "neither layer_types nor model_type=None says in which layers"),
        ({"sliding_window": 16, "layer_types": ["linear_attention"] * 4}, "layer_types has 'linear_attention'"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim=None in config.json must be a positive integer"),
    ],
)
def test_bad_configs_name_the_field(change: dict, message: str):
    with pytest.raises(SimulationError, match=message):
        ModelShape.from_hf("m", SMALL | change)


@pytest.mark.parametrize(
    ("change", "share"),
    [
        ({"model_type": "mistral"}, 1.0),
        ({"model_type": "qwen2", "use_sliding_window": False}, None),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}, 0.25),
        ({"layer_types": ["full_attention"] + ["sliding_attention"] * 3}, 0.75),
        ({"model_type": "gemma2"}, 0.5),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 4}, 0.75),
    ],
)
def test_layers_with_sliding_windows_are_counted(change: dict, share: float | None):
    shape = ModelShape.from_hf("m", SMALL | {"sliding_window": 16} | change)
    assert shape.window == (None if share is None else Window(share, 16))


def test_attention_of_sliding_layers_ends_at_the_window():
    """The reference is a sum over all tokens of a chunk."""
    for start, length in ((0, 5), (0, 40), (10, 20), (30, 8)):
        pairs = sum(min(start + place, 16) for place in range(1, length + 1))
        assert prompt_pairs(start, length, 16) == pairs
    cost = ModelStepCost(QWEN_32B, find_device("H100"))
    plain, half = (Pricing(cost, TokenBudget(), window=window) for window in (None, Window(0.5, 128)))
    for length in (100, 10_000):
        seen = 0.5 * length + 0.5 * min(length, 128)
        assert half.attention_s(1, 8, 8 * length) == pytest.approx(plain.attention_s(1, 8, 8 * seen))
        slope_s = half.attention_s(1, 8, 8 * length + 8) - half.attention_s(1, 8, 8 * length)
        assert half.attention_slope_s(1, 8, 8 * length) == pytest.approx(slope_s)


def test_a_step_reads_the_experts_that_its_tokens_use(shared_data: Path):
    """Qwen3-30B-A3B uses 8 of 128 experts for one token, and nearly all for 128 tokens."""
    shape = ModelShape.read(shared_data / "configs" / "Qwen3-30B-A3B")
    cost = ModelStepCost(shape, find_device("H100"))
    rate = find_device("H100").memory_bandwidth * find_device("H100").memory_efficiency
    all_s, (one_s, many_s) = shape.ffn_bytes / rate, (cost._experts_s(1, tokens) * 48 for tokens in (1, 128))
    assert one_s == pytest.approx(all_s * 8 / 128, rel=0.5)
    assert many_s == pytest.approx(all_s, rel=0.05)
