"""Reading Hugging Face configs: shapes of real models, rotary frequencies, windows and refusals."""

import copy
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from tiny_models import TINY_CONFIGS, tensor_shapes, tiny_config

from amoeba_jax.errors import CheckpointError
from amoeba_jax.models.config import SUPPORTED_FAMILIES, ModelConfig, RopeConfig
from amoeba_jax.models.decoder import num_parameters
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.models.kinds import LayerKind
from amoeba_jax.models.rope import read_rope

SUPPORTED = (
    "Llama-2-7B",
    "Llama-3-8B",
    "Llama-3.1-8B",
    "Llama-3.1-70B",
    "Qwen2.5-32B",
    "Qwen2.5-32B-Instruct",
    "Qwen3-0.6B",
    "Qwen3-8B",
    "Qwen3-32B",
    "Mixtral-8x7B-v0.1",
    "Qwen3-30B-A3B",
)
GPT_OSS = ("gpt-oss-20b", "gpt-oss-120b")


def load(shared_data: Path, model: str) -> dict:
    return json.loads((shared_data / "configs" / model / "config.json").read_text())


def published(shared_data: Path) -> dict[str, tuple[int, int]]:
    """Return parameters and bf16 bytes of KV per token of each model, from the table beside the configs."""
    rows = re.findall(
        r"^\| (\S+) \| ([\d,]+) \| ([\d,]+) B \|",
        (shared_data / "configs" / "README.md").read_text(),
        re.MULTILINE,
    )
    return {model: (int(count.replace(",", "")), int(kv.replace(",", ""))) for model, count, kv in rows}


def test_every_real_config_is_covered_here(shared_data):
    models = {path.parent.name for path in (shared_data / "configs").glob("*/config.json")}
    assert models == {*SUPPORTED, *GPT_OSS} == set(published(shared_data))


@pytest.mark.parametrize("model", SUPPORTED)
def test_real_models_have_their_published_size(shared_data, model):
    raw = load(shared_data, model)
    config = ModelConfig.from_hf(raw)
    parameters, kv_bytes = published(shared_data)[model]
    assert num_parameters(ModelDims(config, 1, 16, "bfloat16")) == parameters
    assert config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2 == kv_bytes
    assert config.family == raw["model_type"]
    assert config.rope.theta == raw["rope_theta"]
    assert config.max_position == raw["max_position_embeddings"]
    assert config.norm_eps == raw["rms_norm_eps"]
    assert config.tied_embeddings == raw["tie_word_embeddings"]
    assert config.dtype == raw["torch_dtype"]
    assert config.qkv_bias == model.startswith("Qwen2.5")
    assert not config.output_bias
    assert config.qk_norm == model.startswith("Qwen3")
    assert config.sliding_windows == (None,) * config.num_layers
    scaled = model.startswith("Llama-3.1")
    assert config.rope == (
        RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192) if scaled else RopeConfig(float(raw["rope_theta"]))
    )


@pytest.mark.parametrize("model", GPT_OSS)
def test_gpt_oss_has_its_published_size(shared_data, model):
    raw = load(shared_data, model)
    config = ModelConfig.from_hf(raw)
    parameters, kv_bytes = published(shared_data)[model]
    assert num_parameters(ModelDims(config, 1, 16, "bfloat16")) == parameters
    assert config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2 == kv_bytes
    assert config.sliding_windows == (128, None) * (config.num_layers // 2)
    assert config.longest_context == 131072
    assert config.rope.attention_factor == pytest.approx(0.1 * math.log(32) + 1)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v3", "multi-head latent attention"),
        ("gemma3", "vision tower"),
        ("gpt2", "supported families are llama, mistral"),
    ],
)
def test_unsupported_families_are_refused_by_name(family, reason):
    with pytest.raises(CheckpointError, match=f"model_type='{family}' is not supported.*{reason}"):
        ModelConfig.from_hf({"model_type": family})


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds the 8 experts"),
        ("qwen3-moe", {"moe_intermediate_size": 0}, "moe_intermediate_size=0 must be a positive integer"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be a positive integer"),
        ("gemma", {"hidden_act": "relu"}, "hidden_act='relu' is not supported for gemma"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping=-1.0 must be a positive number"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported for gemma3_text"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported"),
        ("phi3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor|short_factor"),
        ("phi3", {"original_max_position_embeddings": 1}, "original_max_position_embeddings=1 of LongRoPE must be ab"),
        ("qwen3-moe", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: 'mxfp4'"),
    ],
)
def test_bad_fields_of_new_families_are_refused_by_name(name, fields, message):
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(tiny_config(name) | fields)


def test_layers_have_kinds():
    kinds = {name: ModelConfig.from_hf(tiny_config(name)).kinds for name in ("qwen3-moe-mixed", "gemma3", "gpt-oss")}
    assert kinds["qwen3-moe-mixed"] == (LayerKind(), LayerKind(has_experts=True))
    assert kinds["gemma3"] == (LayerKind(13, local_rope=True), LayerKind())
    assert kinds["gpt-oss"] == (LayerKind(13, has_experts=True), LayerKind(has_experts=True))


def test_config_without_a_family_is_refused():
    with pytest.raises(CheckpointError, match="model_type=None is not supported"):
        ModelConfig.from_hf({"hidden_size": 8})


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_parameters_are_those_of_the_checkpoint(name):
    config = tiny_config(name)
    dims = ModelDims(ModelConfig.from_hf(config), 1, 16, "bfloat16")
    assert num_parameters(dims) == sum(map(math.prod, tensor_shapes(config).values()))


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_reading_leaves_the_config_as_it_was(name):
    """`transformers` completes nested dicts in place, but a config is saved again with the weights."""
    config = tiny_config(name)
    before = copy.deepcopy(config)
    ModelConfig.from_hf(config)
    assert config == before


# --- rotary embedding ---------------------------------------------------------------------------------------

ROPES = {
    "llama 3.1": (128, RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)),
    "llama 3.2": (64, RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)),
    "tiny llama3": (16, RopeConfig(500.0, "llama3", 8.0, 1.0, 4.0, 64)),
    "linear": (64, RopeConfig(10000.0, "linear", 2.5)),
    "qwen": (128, RopeConfig(1000000.0)),
    "yarn": (64, RopeConfig(150000.0, "yarn", 4.0, original_max_position_embeddings=4096)),
    "yarn of gpt-oss": (
        64,
        RopeConfig(150000.0, "yarn", 32.0, original_max_position_embeddings=4096, truncate=False),
    ),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", ROPES)
def test_inverse_frequencies_are_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim, rope = ROPES[name]
    parameters = {"rope_type": rope.rope_type, "rope_theta": rope.theta, "factor": rope.factor}
    if rope.rope_type == "llama3":
        parameters |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    if rope.rope_type == "yarn":
        parameters |= {"original_max_position_embeddings": rope.original_max_position_embeddings}
        parameters |= {"truncate": rope.truncate}
    if rope.rope_type == "default":
        expected = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
    else:
        config = LlamaConfig(
            head_dim=head_dim,
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            rope_parameters=parameters,
            max_position_embeddings=131072,
        )
        expected, attention_factor = ROPE_INIT_FUNCTIONS[rope.rope_type](config, torch.device("cpu"))
        if rope.rope_type == "yarn":
            assert attention_factor == read_rope(parameters, 131072, head_dim).attention_factor > 1
        else:
            assert attention_factor == 1.0
    np.testing.assert_allclose(rope.inverse_frequencies(head_dim), expected.numpy(), rtol=2e-6)


def test_linear_scaling_stretches_the_context():
    longest = {name: ModelConfig.from_hf(tiny_config(name)).longest_context for name in TINY_CONFIGS}
    # `max_position_embeddings` of Gemma 3 already includes its linear factor.
    assert longest == {name: 512 if name == "llama-bias-linear-rope" else 256 for name in TINY_CONFIGS}


@pytest.mark.parametrize(
    ("max_position", "max_model_len", "long"),
    [(256, None, True), (256, 129, True), (256, 128, False), (128, None, False)],
)
def test_longest_request_chooses_the_factors_of_longrope(
    max_position: int, max_model_len: int | None, long: bool, caplog: pytest.LogCaptureFixture
):
    """The original context has 128 tokens."""
    caplog.set_level("INFO", "amoeba_jax")
    config = ModelConfig.from_hf(tiny_config("phi3") | {"max_position_embeddings": max_position})
    assert config.for_context(max_model_len).rope.long == long
    assert f"{'long' if long else 'short'} factors" in caplog.text


@pytest.mark.parametrize("name", ROPES)
def test_inverse_frequencies_one_by_one(name):
    """The reference computes each pair's frequency in plain Python, like `apply_scaling` in Meta's llama-models."""
    head_dim, rope = ROPES[name]
    got = rope.inverse_frequencies(head_dim)
    assert got.dtype == np.float32
    assert got.shape == (head_dim // 2,)
    for i in range(head_dim // 2):
        frequency = rope.theta ** (-2 * i / head_dim)
        if rope.rope_type == "linear":
            frequency /= rope.factor
        elif rope.rope_type == "yarn":
            frequency = yarn_frequency(rope, head_dim, i)
        elif rope.rope_type == "llama3":
            context = rope.original_max_position_embeddings
            rotations = context * frequency / (2 * math.pi)
            if rotations < rope.low_freq_factor:
                frequency /= rope.factor
            elif rotations < rope.high_freq_factor:
                share = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
                frequency *= (1 - share) / rope.factor + share
        assert got[i] == pytest.approx(frequency, rel=1e-6)


def yarn_frequency(rope: RopeConfig, head_dim: int, pair: int) -> float:
    """Return the frequency of a pair by equation 23 of the YaRN paper, between pairs that turn 32 times and once."""
    plain = rope.theta ** (-2 * pair / head_dim)

    def pair_of(turns: int) -> float:
        return head_dim / 2 * math.log(rope.original_max_position_embeddings / (2 * math.pi * turns), rope.theta)

    first, last = pair_of(32), pair_of(1)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    slowed = min(max((pair - first) / (last - first), 0), 1)
    return plain * (1 - slowed) + plain / rope.factor * slowed


def test_llama3_scaling_spares_fast_pairs_and_slows_slow_ones():
    """By hand for Llama 3.1: pairs that turn 4 times in 8,192 tokens stay. Pairs below one turn are 8x slower."""
    plain, scaled = (rope.inverse_frequencies(128) for rope in (RopeConfig(500000.0), ROPES["llama 3.1"][1]))
    # 8192 * f / 2 pi = 4 at f = 0.003068 (pair 28.2), and = 1 at f = 0.000767 (pair 35.0).
    np.testing.assert_allclose(scaled[:29], plain[:29], rtol=1e-6)
    np.testing.assert_allclose(scaled[35:], plain[35:] / 8, rtol=1e-6)
    assert (np.diff(scaled) < 0).all()


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 777.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}},
    ],
)
def test_rotary_settings_are_read_in_old_and_new_form(fields):
    config = {key: value for key, value in tiny_config("llama2").items() if key != "rope_theta"} | fields
    assert ModelConfig.from_hf(config).rope == RopeConfig(777.0, "linear", 2.0)


# --- sliding windows ----------------------------------------------------------------------------------------

QWEN_WINDOW = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 6}


@pytest.mark.parametrize(
    ("name", "fields", "windows"),
    [
        ("mistral-window", {}, (13, 13)),
        ("mistral-window", {"sliding_window": None}, (None, None)),
        ("llama2", {"sliding_window": 13}, (None, None)),
        ("qwen2", {**QWEN_WINDOW, "max_window_layers": 3}, (None, None, None, 6)),
        ("qwen2", {**QWEN_WINDOW, "max_window_layers": 0}, (6, 6, 6, 6)),
        ("qwen2", {**QWEN_WINDOW, "max_window_layers": 4}, (None,) * 4),
        ("qwen2", {**QWEN_WINDOW, "max_window_layers": 1, "use_sliding_window": False}, (None,) * 4),
        ("qwen3", {**QWEN_WINDOW, "max_window_layers": 2}, (None, None, 6, 6)),
        (
            "qwen3",
            {**QWEN_WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (6, None, 6, None),
        ),
    ],
)
def test_sliding_window_of_each_layer(name, fields, windows):
    assert ModelConfig.from_hf(tiny_config(name) | fields).sliding_windows == windows


def test_mistral_without_the_field_has_the_window_of_its_first_release():
    config = tiny_config("mistral-window")
    del config["sliding_window"]
    assert ModelConfig.from_hf(config).sliding_windows == (4096, 4096)


# --- biases, heads, dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "qkv", "output"),
    [
        ("llama2", {}, False, False),
        ("llama2", {"attention_bias": True}, True, True),
        ("mistral-window", {}, False, False),
        ("qwen2", {}, True, False),
        ("qwen3", {}, False, False),
        ("qwen3", {"attention_bias": True}, True, True),
    ],
)
def test_biases_of_each_family(name, fields, qkv, output):
    config = ModelConfig.from_hf(tiny_config(name) | fields)
    assert (config.qkv_bias, config.output_bias) == (qkv, output)


def test_defaults_of_absent_fields():
    config = {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
    read = ModelConfig.from_hf(config)
    assert (read.num_kv_heads, read.head_dim) == (4, 12)
    assert (read.tied_embeddings, read.dtype, read.rope) == (False, "float32", RopeConfig(10000.0))


@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtype_in_old_and_new_form(field, dtype):
    config = tiny_config("llama2")
    del config["torch_dtype"]
    assert ModelConfig.from_hf(config | {field: dtype}).dtype == dtype


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama2", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for llama: it must be 'silu'"),
        ("llama2", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("llama2", {"torch_dtype": "float64"}, "dtype='float64' is not supported"),
        ("llama2", {"torch_dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn' is not supported"),
        ("llama2", {"rope_scaling": {"rope_type": "yarn", "factor": 0.0}}, "factor"),
        ("llama2", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("llama2", {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ("llama2", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("qwen3", {"rope_scaling": LINEAR | {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config: 'fp8' is not supported"),
        ("llama2", {"hidden_size": 0}, "hidden_size=0 must be a positive integer"),
        ("llama2", {"hidden_size": "48"}, "hidden_size"),
        ("llama2", {"hidden_size": 50, "head_dim": None}, "50"),
        ("llama2", {"num_hidden_layers": 0}, "num_hidden_layers=0 must be a positive integer"),
        ("llama2", {"num_attention_heads": -4}, "num_attention_heads=-4 must be a positive integer"),
        ("llama2", {"num_key_value_heads": -2}, "num_key_value_heads=-2 must be a positive integer"),
        ("llama2", {"num_key_value_heads": 3}, "num_attention_heads=4 .* num_key_value_heads=3"),
        ("llama2", {"head_dim": 13}, "head_dim"),
        ("llama2", {"head_dim": -2}, "head_dim=-2 must be a positive integer"),
        ("llama2", {"intermediate_size": 1.5}, "intermediate_size"),
        ("llama2", {"vocab_size": -1}, "vocab_size=-1 must be a positive integer"),
        ("llama2", {"max_position_embeddings": 0}, "max_position_embeddings=0 must be a positive integer"),
        ("llama2", {"rms_norm_eps": None}, "rms_norm_eps"),
        ("mistral-window", {"sliding_window": -3}, "sliding_window=-3 must be a positive integer"),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention"]}, "layer_types"),
    ],
)
def test_bad_fields_are_refused_by_name(name, fields, message):
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(tiny_config(name) | fields)


def test_supported_families_all_have_a_tiny_model():
    assert {config["model_type"] for config in TINY_CONFIGS.values()} == set(SUPPORTED_FAMILIES)
