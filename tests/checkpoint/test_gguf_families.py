"""GGUF files of other families than Llama: names from the gguf package, experts in one tensor, norms of Gemma."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_models import tiny_config, write_model

from amoeba_jax.checkpoint import Checkpoint, GGUFCheckpoint, SafetensorsCheckpoint, gguf_file
from amoeba_jax.checkpoint.split import SplitCheckpoint
from amoeba_jax.errors import CheckpointError
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.models.families import FAMILIES
from amoeba_jax.weights.readers import check_checkpoint


def opened(stored: Checkpoint) -> Checkpoint:
    """Return a checkpoint as an engine reads it, after all checks."""
    config = ModelConfig.from_hf(stored.config)
    split = FAMILIES[config.family].split
    found = stored if split is None else SplitCheckpoint(stored, split(config))
    check_checkpoint(found, ModelDims(config, 1, 16, "float32"))
    return found


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the metadata that llama.cpp's converter writes for a config."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if experts := config.get("num_experts", config.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if shared := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if "attn_logit_softcapping" in config:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    rope = config.get("rope_scaling", {})
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def permuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection as llama.cpp's converter does for Llama."""
    halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def converted(
    directory: Path,
    arch: gguf.MODEL_ARCH,
    path: Path,
    kind: gguf.GGMLQuantizationType | None = None,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a tiny model as llama.cpp's converter does: experts stacked, and Gemma's norms with 1 added.

    `kind` is the quantization of the experts. `change` adds metadata.
    """
    stored = opened(SafetensorsCheckpoint(directory))
    config, writer = stored.config, gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    add_config(writer, config)
    tensors = {name: stored.read(name) for name in sorted(stored.names())}
    experts = re.compile(r"(.*\.experts)\.0\.(\w+\.\w+)")
    for name in [it for it in tensors if experts.fullmatch(it)]:
        prefix, part = experts.fullmatch(name).groups()
        count = config.get("num_experts", config.get("num_local_experts"))
        tensors[f"{prefix}.{part}"] = np.stack([tensors.pop(f"{prefix}.{e}.{part}") for e in range(count)])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in tensors.items():
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert place is not None, name
        if name.endswith(".sinks"):
            place = f"{place}.weight"
        if kind is not None and ".experts." in name:
            writer.add_tensor(place, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
            continue
        if arch is gguf.MODEL_ARCH.LLAMA and (found := re.search(r"\.([qk])_proj\.", name)):
            tensor = permuted(tensor, config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"])
        writer.add_tensor(
            place, tensor + 1 if "GEMMA" in arch.name and "norm" in name else np.ascontiguousarray(tensor)
        )
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("qwen3-moe", gguf.MODEL_ARCH.QWEN3MOE),
        ("qwen2-moe", gguf.MODEL_ARCH.QWEN2MOE),
        ("mixtral", gguf.MODEL_ARCH.LLAMA),
        ("gpt-oss", gguf.MODEL_ARCH.GPT_OSS),
        ("qwen3-yarn", gguf.MODEL_ARCH.QWEN3),
        ("gemma2", gguf.MODEL_ARCH.GEMMA2),
        ("gemma3", gguf.MODEL_ARCH.GEMMA3),
    ],
)
def test_models_come_back(name: str, arch: gguf.MODEL_ARCH, tmp_path: Path):
    """llama.cpp's converter stores no window in the architecture `llama`, so Mixtral has none here."""
    changes = {"sliding_window": None} if name == "mixtral" else {}
    raw = {key: value for key, value in (tiny_config(name) | changes).items() if value is not None}
    directory = write_model(raw, tmp_path / name)
    found, original = (
        opened(GGUFCheckpoint(converted(directory, arch, tmp_path / "m.gguf"))),
        opened(SafetensorsCheckpoint(directory)),
    )
    assert found.names() == original.names()
    for tensor in original.names():
        np.testing.assert_allclose(found.read(tensor), original.read(tensor), atol=3e-7)
    config, expected = ModelConfig.from_hf(found.config), ModelConfig.from_hf(raw)
    if name.startswith("gemma"):
        # GGUF has no field for the scale, and layers 0 to 4 of 6 of Gemma 3 have a window.
        assert (config.attention_scale, expected.attention_scale) == (16**-0.5, 20**-0.5)
        own = {"attention_scale": expected.attention_scale}
        if name == "gemma3":
            assert config.sliding_windows == (13, 13)
            own |= {it: getattr(expected, it) for it in ("sliding_windows", "rope", "local_rope")}
        config = dataclasses.replace(config, **own)
    assert dataclasses.replace(config, dtype="float32") == expected


def test_quantized_experts_are_dequantized_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tiny_config("qwen3-moe") | {"hidden_size": 64, "moe_intermediate_size": 32}
    directory, kind = write_model(config, tmp_path / "model"), gguf.GGMLQuantizationType.Q8_0
    found = opened(GGUFCheckpoint(converted(directory, gguf.MODEL_ARCH.QWEN3MOE, tmp_path / "m.gguf", kind)))
    original = SafetensorsCheckpoint(directory)
    counted = []

    def dequantize(rows: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        result = gguf.quants.dequantize(rows, kind)
        counted.append(result.size)
        return result

    monkeypatch.setattr(gguf_file, "dequantize", dequantize)
    experts = sorted(name for name in original.names() if ".experts." in name)
    for name in experts:
        np.testing.assert_allclose(found.read(name), original.read(name), atol=5e-3)
        found.release(name)
    assert sum(counted) == sum(original.read(name).size for name in experts) == 2 * 8 * 3 * 64 * 32


def gemma3_config(directory: Path, change: Callable[[gguf.GGUFWriter], None], **changes: int) -> ModelConfig:
    """Return the config of a tiny Gemma 3 after conversion to GGUF."""
    model = write_model(tiny_config("gemma3") | changes, directory / "model")
    path = converted(model, gguf.MODEL_ARCH.GEMMA3, directory / "m.gguf", change=change)
    return ModelConfig.from_hf(GGUFCheckpoint(path).config)


@pytest.mark.parametrize(("layers", "scalar"), [(2, 16), (62, 32 // 4)])
def test_gemma3_27b_scales_scores_by_hidden_size_over_heads(layers: int, scalar: int, tmp_path: Path):
    """Head size 16, hidden size 32, 4 heads. llama.cpp recognizes the 27B model by its 62 layers."""
    config = gemma3_config(tmp_path, lambda writer: None, num_hidden_layers=layers, hidden_size=32)
    assert config.attention_scale == pytest.approx(scalar**-0.5)


def test_gemma3_rotary_base_of_layers_with_a_window_is_read(tmp_path: Path):
    config = gemma3_config(tmp_path, lambda writer: writer.add_rope_freq_base_swa(500.0))
    assert config.local_rope is not None
    assert (config.local_rope.theta, config.rope.theta) == (500.0, 10000.0)


@pytest.mark.parametrize("pattern", [6, [True] * 5 + [False] + [True]])
def test_gemma3_window_pattern_with_every_sixth_layer_full_is_accepted(pattern: int | list[bool], tmp_path: Path):
    config = gemma3_config(tmp_path, lambda writer: writer.add_sliding_window_pattern(pattern), num_hidden_layers=7)
    assert config.sliding_windows == (13, 13, 13, 13, 13, None, 13)


@pytest.mark.parametrize("pattern", [2, [True, False], [False, True]])
def test_other_gemma3_window_patterns_are_refused(pattern: int | list[bool], tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"gemma3\.attention\.sliding_window_pattern as .*: only 6 is supported"):
        gemma3_config(tmp_path, lambda writer: writer.add_sliding_window_pattern(pattern))
