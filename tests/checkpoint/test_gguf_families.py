"""GGUF files of other families than Llama: names from the gguf package, experts in one tensor, norms of Gemma."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_models import tiny_config, tiny_model, write_model

from amoeba_jax.checkpoint import GGUFCheckpoint, SafetensorsCheckpoint, gguf_file
from amoeba_jax.checkpoint.split import SplitCheckpoint
from amoeba_jax.errors import CheckpointError
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.models.families import FAMILIES
from amoeba_jax.weights.readers import check_checkpoint


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
    stored = SafetensorsCheckpoint(directory)
    config, writer = stored.config, gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    tensors = {name: stored.read(name) for name in stored.names()}
    for layer in range(config["num_hidden_layers"]) if "num_experts" in config else ():
        for part in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"model.layers.{layer}.mlp.experts"
            each = [tensors.pop(f"{prefix}.{e}.{part}.weight") for e in range(config["num_experts"])]
            tensors[f"{prefix}.{part}.weight"] = np.stack(each)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in tensors.items():
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert place is not None, name
        if kind is not None and ".experts." in name:
            writer.add_tensor(place, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
            continue
        writer.add_tensor(place, tensor + 1 if arch is gguf.MODEL_ARCH.GEMMA3 and "norm" in name else tensor)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "arch"), [("qwen3-moe", gguf.MODEL_ARCH.QWEN3MOE), ("gemma3", gguf.MODEL_ARCH.GEMMA3)]
)
def test_models_come_back(name: str, arch: gguf.MODEL_ARCH, tmp_path: Path):
    directory = tiny_model(name, tmp_path)
    stored = GGUFCheckpoint(converted(directory, arch, tmp_path / "m.gguf"))
    config = ModelConfig.from_hf(stored.config)
    split = FAMILIES[config.family].split
    found = stored if split is None else SplitCheckpoint(stored, split(config))
    check_checkpoint(found, ModelDims(config, 1, 16, "float32"))
    original = SafetensorsCheckpoint(directory)
    assert found.names() == original.names()
    for tensor in original.names():
        np.testing.assert_allclose(found.read(tensor), original.read(tensor), atol=3e-7)
    expected = ModelConfig.from_hf(tiny_config(name))
    assert config.experts == expected.experts
    if name == "gemma3":
        assert (config.post_norms, config.norm_offset, config.attention_scale) == (True, 1.0, 16**-0.5)
        assert config.sliding_windows == (13, 13)  # layers 0 to 4 of 6 have a window


def test_quantized_experts_are_dequantized_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tiny_config("qwen3-moe") | {"hidden_size": 64, "moe_intermediate_size": 32}
    directory, kind = write_model(config, tmp_path / "model"), gguf.GGMLQuantizationType.Q8_0
    stored = GGUFCheckpoint(converted(directory, gguf.MODEL_ARCH.QWEN3MOE, tmp_path / "m.gguf", kind))
    model = ModelConfig.from_hf(stored.config)
    split = FAMILIES[model.family].split
    assert split is not None
    found, original = SplitCheckpoint(stored, split(model)), SafetensorsCheckpoint(directory)
    check_checkpoint(found, ModelDims(model, 1, 16, "float32"))
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
    """Head size 16, hidden size 32, 4 heads. llama.cpp tells the 27B model by its 62 layers."""
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
