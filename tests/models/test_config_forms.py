"""RoPE and dtype settings of a config.json mean the same as in transformers, in the forms of versions 4 and 5."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny_config, write_model

from amoeba_jax import LLM
from amoeba_jax.errors import CheckpointError
from amoeba_jax.models.config import ModelConfig, RopeConfig

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LAYERS = ["full_attention", "full_attention"]

# Family, RoPE part of its config.json, and the recorded reading of transformers 5.
FORMS: dict[str, tuple[str, dict[str, Any], RopeConfig]] = {
    "nothing": ("llama", {}, RopeConfig(10000.0)),
    "theta": ("llama", {"rope_theta": 777.0}, RopeConfig(777.0)),
    "theta, null scaling": ("llama", {"rope_theta": 777.0, "rope_scaling": None}, RopeConfig(777.0)),
    "theta, empty scaling": ("llama", {"rope_theta": 777.0, "rope_scaling": {}}, RopeConfig(777.0)),
    "type": (
        "llama",
        {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        RopeConfig(777.0, "linear", 2.0),
    ),
    "rope_type": (
        "llama",
        {"rope_theta": 777.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        RopeConfig(777.0, "linear", 2.0),
    ),
    "type and rope_type": (
        "llama",
        {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}},
        RopeConfig(10000.0),
    ),
    "theta in scaling": (
        "qwen2",
        {"rope_scaling": {"rope_type": "linear", "factor": 4, "rope_theta": 777.0}},
        RopeConfig(777.0, "linear", 4.0),
    ),
    "default by name": ("qwen3", {"rope_theta": 777, "rope_scaling": {"rope_type": "default"}}, RopeConfig(777.0)),
    "llama3 in scaling": (
        "llama",
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        RopeConfig(500.0, "llama3", 8.0, 1.0, 4.0, 64),
    ),
    "llama3, original length beside scaling": (
        "llama",
        {"original_max_position_embeddings": 32, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 32),
    ),
    "parameters": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}},
        RopeConfig(777.0, "linear", 2.0),
    ),
    "parameters with type": (
        "mistral",
        {"rope_parameters": {"type": "linear", "factor": 2.0, "rope_theta": 777.0}},
        RopeConfig(777.0, "linear", 2.0),
    ),
    "parameters without type": ("qwen2", {"rope_parameters": {"rope_theta": 777.0}}, RopeConfig(777.0)),
    "theta beside parameters": (
        "qwen3",
        {"rope_theta": 777.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        RopeConfig(777.0, "linear", 2.0),
    ),
    "two thetas": ("llama", {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 777.0}}, RopeConfig(777.0)),
    "parameters and scaling": (
        "llama",
        {
            "rope_theta": 777.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        RopeConfig(777.0, "linear", 2.0),
    ),
    "llama3 in parameters": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}},
        RopeConfig(500.0, "llama3", 8.0, 1.0, 4.0, 64),
    ),
    "factor 1 of rotated dimensions": ("llama", {"partial_rotary_factor": 1.0}, RopeConfig(10000.0)),
}

# Settings that `transformers` refuses too, or reads in a way that is not supported here.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "by layer type": (
        "qwen3",
        {
            "layer_types": LAYERS,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 777.0}},
        },
        "rope_parameters of their own for full_attention are not supported",
    ),
    "by layer type, without layer types": (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 777.0}}},
        "rope_parameters of their own for full_attention are not supported",
    ),
    "null theta": ("llama", {"rope_theta": None}, "rope_theta"),
    "theta of zero": ("llama", {"rope_theta": 0}, "rope_theta=0 of the rotary embedding must be a positive number"),
    "theta that is a text": ("llama", {"rope_theta": "1e4"}, "rope_theta='1e4'"),
    "factor of zero": ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0 of the rotary"),
    "null factor": ("llama", {"rope_scaling": {"type": "linear", "factor": None}}, "factor"),
    "unknown type": ("llama", {"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type='su'"),
    "mrope": ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "rope_type='mrope'"),
    "YaRN without a factor": ("qwen3", {"rope_parameters": {"rope_type": "yarn"}}, "factor"),
    "YaRN of DeepSeek": (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "mscale_all_dim of YaRN is not supported",
    ),
    "some dimensions in parameters": (
        "qwen2",
        {"rope_parameters": {"rope_theta": 777.0, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5",
    ),
    "chunked layers": (
        "qwen3",
        {"layer_types": ["chunked_attention"] * 2, "use_sliding_window": True, "sliding_window": 8},
        "layer_types: 'chunked_attention' is not supported",
    ),
    "dtype with its module": ("llama", {"dtype": "torch.float16"}, r"torch\.float16"),
    "window of zero": ("mistral", {"sliding_window": 0}, "sliding_window=0 must be a positive integer"),
}
TINY = {"llama": "llama2", "mistral": "mistral-window", "qwen2": "qwen2", "qwen3": "qwen3"}


def config_of(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a tiny config.json with these RoPE settings and no others."""
    return {key: value for key, value in tiny_config(TINY[family]).items() if not key.startswith("rope")} | fields


@pytest.mark.parametrize("form", FORMS)
def test_rope_settings_are_read_as_recorded(form: str):
    family, fields, expected = FORMS[form]
    assert ModelConfig.from_hf(config_of(family, fields)).rope == expected


@pytest.mark.torch
@pytest.mark.parametrize("form", FORMS)
def test_rotary_frequencies_are_those_of_the_model_of_transformers(form: str, tmp_path: Path):
    """Logits depend on the settings only through these frequencies. `test_parity.py` compares the logits."""
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    family, fields, expected = FORMS[form]
    model = AutoModelForCausalLM.from_pretrained(write_model(config_of(family, fields), tmp_path / "model"))
    rotary = model.model.rotary_emb
    assert rotary.attention_scaling == 1.0
    ours = expected.inverse_frequencies(model.config.head_dim)
    np.testing.assert_allclose(ours, rotary.inv_freq.numpy(), rtol=2e-6)


@pytest.mark.parametrize("form", REFUSED)
def test_other_settings_are_refused_by_name(form: str):
    family, fields, message = REFUSED[form]
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(config_of(family, fields))


def test_mistral_ignores_layer_types():
    """In `transformers`, only models of other families alternate."""
    config = config_of("mistral", {"layer_types": ["full_attention"] * 2, "sliding_window": 13})
    assert ModelConfig.from_hf(config).sliding_windows == (13, 13)


DTYPES: list[tuple[dict[str, Any], str]] = [
    ({}, "float32"),
    ({"torch_dtype": "bfloat16"}, "bfloat16"),
    ({"dtype": "bfloat16"}, "bfloat16"),
    ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
    ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
    ({"dtype": None}, "float32"),
]


@pytest.mark.parametrize(("fields", "expected"), DTYPES)
def test_dtype_is_read_as_recorded(fields: dict[str, Any], expected: str):
    config = {key: value for key, value in tiny_config("llama2").items() if key != "torch_dtype"} | fields
    assert ModelConfig.from_hf(config).dtype == expected


@pytest.mark.torch
@pytest.mark.parametrize(("fields", "expected"), DTYPES)
def test_dtype_is_that_of_transformers(fields: dict[str, Any], expected: str, tmp_path: Path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    config = {key: value for key, value in tiny_config("llama2").items() if key != "torch_dtype"} | fields
    model = AutoModelForCausalLM.from_pretrained(write_model(config, tmp_path / "model"))
    assert model.dtype == getattr(torch, expected)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["theta in scaling", "two thetas", "parameters and scaling", "llama3, original length beside scaling"]
)
def test_logits_are_those_of_transformers(form: str, tmp_path: Path, compile_cache: str):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    family, fields, _ = FORMS[form]
    directory = write_model(config_of(family, fields), tmp_path / "model")
    tokens = np.random.default_rng(3).integers(0, 211, 40)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(directory)(torch.from_numpy(tokens[None])).logits[0].numpy()
    with LLM(directory, device_memory="32MiB", compile_cache=compile_cache, progress=False) as llm:
        np.testing.assert_allclose(llm.logits(tokens.tolist()), expected, atol=1e-4, rtol=0)
    other = write_model(config_of(family, {"rope_theta": 3.0}), tmp_path / "other")
    assert json.loads((other / "config.json").read_text()) != json.loads((directory / "config.json").read_text())
    with torch.no_grad():
        wrong = AutoModelForCausalLM.from_pretrained(other)(torch.from_numpy(tokens[None])).logits[0].numpy()
    assert np.abs(wrong - expected).max() > 0.01, "these logits tell RoPE settings apart"
