"""Shards of experts: each shard is a stack, every feature of every expert is in one place, and padding is zero."""

import json

import numpy as np
import pytest
from shards import build_shards
from tiny_models import tiny_config

from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.decoder import model_specs
from amoeba_jax.models.dims import ModelDims
from sharding.params import ParamSpec

LAYER = "layers.1."


def specs_of(name: str, max_tp: int) -> tuple[dict[str, ParamSpec], ModelDims]:
    dims = ModelDims(ModelConfig.from_hf(tiny_config(name)), max_tp, 4, "float32")
    return {it: spec for it, spec in model_specs(dims).items() if it.startswith(f"{LAYER}experts.")}, dims


def tensors_of(specs: dict[str, ParamSpec]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    sources = [source for spec in specs.values() for source in spec.sources]
    return {source.name: random.uniform(0.5, 1.5, source.shape).astype(np.float32) for source in sources}


@pytest.mark.parametrize("max_tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-moe-mixed", "gpt-oss"])
def test_tensors_come_back_from_their_shards(name: str, max_tp: int):
    specs, _ = specs_of(name, max_tp)
    tensors = tensors_of(specs)
    for spec in specs.values():
        shards = build_shards(spec, tensors.__getitem__, np.dtype(np.float32))
        for source in spec.sources:
            np.testing.assert_array_equal(spec.restore_tensor(source, shards), tensors[source.name])
        # All other places are zero.
        stored = sum(int(np.count_nonzero(shard)) for shard in shards)
        copies = spec.num_shards if spec.placement == "replicated" else 1
        assert stored == copies * spec.model_elements


@pytest.mark.parametrize("max_tp", [1, 2, 4])
def test_a_shard_has_whole_experts_if_their_number_divides(max_tp: int):
    specs, dims = specs_of("qwen3-moe", max_tp)
    tensors = tensors_of(specs)
    count, size = 8 // max_tp, dims.experts.size
    shards = build_shards(specs[f"{LAYER}experts.gate_up"], tensors.__getitem__, np.dtype(np.float32))
    for shard, stored in enumerate(shards):
        stack = stored.reshape(-1)[: count * 2 * size * 48].reshape(count, 2 * size, 48)
        for place in range(count):
            prefix = f"model.layers.1.mlp.experts.{shard * count + place}"
            np.testing.assert_array_equal(stack[place, :20], tensors[f"{prefix}.gate_proj.weight"])
            np.testing.assert_array_equal(stack[place, size : size + 20], tensors[f"{prefix}.up_proj.weight"])


def test_six_experts_are_divided_within_at_tp4():
    specs, dims = specs_of("qwen3-moe-mixed", 4)
    assert dims.experts == (False, 6, dims.experts.size)
    tensors = tensors_of(specs)
    shards = build_shards(specs[f"{LAYER}experts.down"], tensors.__getitem__, np.dtype(np.float32))
    used = 6 * 48 * dims.experts.size
    stacks = [shard.reshape(-1)[:used].reshape(6, 48, -1) for shard in shards]
    share = -(-21 // 4)
    for expert in range(6):
        columns = np.concatenate([stack[expert, :, :share] for stack in stacks], axis=1)[:, :21]
        np.testing.assert_array_equal(columns, tensors[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"])


@pytest.mark.parametrize("name", ["qwen3-moe-mixed", "qwen3-moe", "mixtral"])
def test_extents_of_all_layers_have_the_same_size(name: str):
    dims = ModelDims(ModelConfig.from_hf(tiny_config(name)), 4, 4, "float32")
    pages: dict[str, set[int]] = {}
    for spec in model_specs(dims).values():
        if spec.page_elems is not None:
            pages.setdefault(spec.kind.split(".")[1], set()).add(spec.stored_shape[0])
    assert {kind: len(sizes) for kind, sizes in pages.items()} == {"gate_up": 1, "down": 1}


def test_qwen3_30b_needs_no_padding(shared_data):
    raw = json.loads((shared_data / "configs" / "Qwen3-30B-A3B" / "config.json").read_text())
    dims = ModelDims(ModelConfig.from_hf(raw | {"num_hidden_layers": 1}), 4, 16, "bfloat16")
    kinds = {spec.kind: spec for spec in model_specs(dims).values() if spec.kind.startswith("experts.")}
    assert {kind: spec.num_elements / spec.model_elements for kind, spec in kinds.items()} == dict.fromkeys(kinds, 1.0)
    assert kinds["experts.gate_up"].stored_shape == (6144, 16384)
