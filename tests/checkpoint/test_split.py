"""Model tensors from checkpoints that store them in other forms."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import tiny_config, tiny_model

from amoeba_jax.checkpoint import SafetensorsCheckpoint, mxfp4
from amoeba_jax.checkpoint.mxfp4 import Mxfp4Checkpoint, expand
from amoeba_jax.checkpoint.split import SplitCheckpoint
from amoeba_jax.errors import CheckpointError
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.models.families import FAMILIES
from amoeba_jax.weights.readers import check_checkpoint


def opened(directory: Path) -> tuple[SplitCheckpoint | SafetensorsCheckpoint, ModelDims]:
    """Return the checkpoint as an engine reads it, after all checks."""
    stored = SafetensorsCheckpoint(directory)
    config = ModelConfig.from_hf(stored.config)
    split = FAMILIES[config.family].split
    found = stored if split is None else SplitCheckpoint(stored, split(config))
    dims = ModelDims(config, 1, 16, "float32")
    check_checkpoint(found, dims)
    return found, dims


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_fused_and_separate_experts_are_the_same(name: str, tmp_path: Path):
    """`transformers` can store one tensor for all experts of a layer."""
    separate, _ = opened(tiny_model(name, tmp_path))
    names = separate.names()
    tensors = {it: separate.read(it) for it in names if ".experts." not in it}
    for layer in range(2):
        prefix, count = f"model.layers.{layer}.mlp.experts", tiny_config(name).get("num_experts", 4)
        matrices = {
            part: np.stack([separate.read(f"{prefix}.{e}.{part}_proj.weight") for e in range(count)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([matrices["gate"], matrices["up"]], axis=1)
        tensors[f"{prefix}.down_proj"] = matrices["down"]
    path = tmp_path / name
    save_file({it: np.ascontiguousarray(tensor) for it, tensor in tensors.items()}, path / "model.safetensors")
    fused, _ = opened(path)
    assert fused.names() == names
    for it in names:
        np.testing.assert_array_equal(fused.read(it), separate.read(it))


@pytest.mark.parametrize("name", ["phi3", "qwen3-moe", "mixtral", "qwen2-moe-mixed", "gpt-oss", "gemma3"])
def test_sharded_checkpoints_have_the_same_tensors(name: str, tmp_path: Path):
    """Tensors of a layer, and experts of a layer, are in different files."""
    path = tiny_model(name, tmp_path)
    whole, _ = opened(path)
    tensors = load_file(path / "model.safetensors")
    parts = {it: f"model-{index % 3}.safetensors" for index, it in enumerate(sorted(tensors))}
    before = {it: whole.read(it).copy() for it in whole.names()}
    whole.close()
    for shard in set(parts.values()):
        save_file({it: tensors[it] for it, at in parts.items() if at == shard}, path / shard)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    sharded, _ = opened(path)
    assert sharded.names() == before.keys()
    for it, tensor in before.items():
        np.testing.assert_array_equal(sharded.read(it), tensor)


# --- MXFP4 --------------------------------------------------------------------------------------------------


def number(code: int) -> float:
    """Return the value of 4 bits: sign, 2 bits of exponent, 1 bit of mantissa."""
    sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1))


def test_blocks_are_expanded_bit_by_bit():
    random = np.random.default_rng(0)
    blocks, scales = random.integers(0, 256, (7, 3, 16), np.uint8), random.integers(100, 150, (7, 3), np.uint8)
    found = expand(blocks, scales)
    assert (found.shape, found.dtype) == ((7, 3, 32), ml_dtypes.bfloat16)
    for place in np.ndindex(7, 3, 16):
        for half, code in enumerate((blocks[place] & 15, blocks[place] >> 4)):
            expected = number(int(code)) * 2.0 ** (int(scales[place[:2]]) - 127)
            assert float(found[(*place[:2], 2 * place[2] + half)]) == expected


def test_experts_in_mxfp4_are_those_of_the_expanded_matrices(tmp_path: Path):
    path = tiny_model("gpt-oss-mxfp4", tmp_path)
    stored = SafetensorsCheckpoint(path)
    config = ModelConfig.from_hf(stored.config)
    split = FAMILIES["gpt_oss"].split
    assert split is not None
    found = SplitCheckpoint(Mxfp4Checkpoint(stored), split(config))
    check_checkpoint(found, ModelDims(config, 1, 16, "float32"))
    raw = load_file(path / "model.safetensors")
    prefix = "model.layers.1.mlp.experts"
    whole = {
        kind: expand(raw[f"{prefix}.{kind}_proj_blocks"], raw[f"{prefix}.{kind}_proj_scales"])
        for kind in ("gate_up", "down")
    }
    gate_up, down = whole["gate_up"].reshape(4, 64, 64), whole["down"].reshape(4, 64, 32)
    for expert in range(4):
        for part, expected in (("gate", gate_up[expert, 0::2]), ("up", gate_up[expert, 1::2]), ("down", down[expert])):
            np.testing.assert_array_equal(found.read(f"{prefix}.{expert}.{part}_proj.weight"), expected)


def test_scales_of_another_shape_are_refused(tmp_path: Path):
    path = tiny_model("gpt-oss-mxfp4", tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = next(it for it in tensors if it.endswith("_scales"))
    tensors[name] = tensors[name][..., :1].repeat(3, axis=-1)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="are not MXFP4"):
        Mxfp4Checkpoint(SafetensorsCheckpoint(path))


def test_reading_an_expert_expands_it_once_and_releases_blocks_and_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stored, released, expanded = SafetensorsCheckpoint(tiny_model("gpt-oss-mxfp4", tmp_path)), [], []
    monkeypatch.setattr(stored, "release", released.append)
    monkeypatch.setattr(mxfp4, "expand", lambda *parts: expanded.append(1) or expand(*parts))
    split = FAMILIES["gpt_oss"].split
    assert split is not None
    found = SplitCheckpoint(Mxfp4Checkpoint(stored), split(ModelConfig.from_hf(stored.config)))
    names = [f"model.layers.0.mlp.experts.2.{part}_proj.weight" for part in ("gate", "up")]
    first = [found.read(name).copy() for name in names]
    assert len(expanded) == 1
    found.release(names[0])
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    assert released == [f"{fused}_blocks", f"{fused}_scales"]
    for name, tensor in zip(names, first, strict=True):
        np.testing.assert_array_equal(found.read(name), tensor)
    assert len(expanded) == 2, "released tensors are not kept"
