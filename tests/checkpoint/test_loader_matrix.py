"""Every combination of files in a model directory loads the tensors that `transformers` loads, or is refused by name.

Without torch, only the recorded outcomes are checked.
"""

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import tensor_shapes, tiny_config

from amoeba_jax.config import EngineConfig
from amoeba_jax.errors import CheckpointError
from amoeba_jax.model_source import ModelSource
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.decoder import model_specs
from amoeba_jax.models.dims import ModelDims

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

# Seeds of the weights in a single file and in shards. They tell which weights were loaded.
IN_SINGLE, IN_SHARDS = 1, 2


@dataclass(frozen=True)
class Case:
    """Files in a model directory.

    Attributes:
        single: state of `model.safetensors`: "", "complete", or "partial" (a layer norm is missing).
        shards: state of the shards: "", "complete", "missing file", "missing tensor" or "no index".
        pickled: whether a `pytorch_model.bin` exists.
        tied: value of `tie_word_embeddings`.
        head: stored head: "none", "equal" to the embedding or "own".
        extra: whether the files have a tensor that the model does not have.
    """

    single: str
    shards: str
    pickled: bool
    tied: bool
    head: str
    extra: bool

    def __str__(self) -> str:
        parts = [f"{name}={value}".replace(" ", "_") for name, value in vars(self).items() if value]
        return ",".join(parts)


CASES = [
    Case(single, shards, pickled, tied, head, extra)
    for single, shards, pickled, tied, head, extra in product(
        ("", "complete", "partial"),
        ("", "complete", "missing file", "missing tensor", "no index"),
        (False, True),
        (False, True),
        ("none", "equal", "own"),
        (False, True),
    )
    if not pickled or (head == "none" and not extra)
]


def expected_outcome(case: Case) -> int | str:
    """Return the seed of the loaded weights, or a part of the error."""
    if case.single:
        outcome = IN_SINGLE
    elif case.shards == "missing file":
        return "download the missing shards"
    elif case.shards == "missing tensor":
        return "has no tensor 'model.norm.weight', which model.safetensors.index.json places there"
    elif case.shards == "complete":
        outcome = IN_SHARDS
    else:
        return "holds only pickled weights" if case.pickled else "holds no weights"
    if not case.tied and case.head == "none":
        return "tensor lm_head.weight [64, 48] is missing"
    if case.single == "partial":
        return "tensor model.norm.weight [48] is missing"
    return outcome


def make_tensors(config: dict[str, Any], case: Case, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = tensor_shapes(config | {"tie_word_embeddings": True})
    tensors = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    if case.head == "equal":
        tensors[HEAD] = tensors[EMBEDDING].copy()
    elif case.head == "own":
        tensors[HEAD] = random.standard_normal(tensors[EMBEDDING].shape, np.float32)
    if case.extra:
        tensors["model.layers.7.mlp.down_proj.weight"] = np.ones((48, 116), np.float32)
    return tensors


def write_case(directory: Path, case: Case) -> dict[str, Any]:
    config = tiny_config("llama2") | {"num_hidden_layers": 1, "vocab_size": 64, "tie_word_embeddings": case.tied}
    (directory / "config.json").write_text(json.dumps(config))
    if case.single:
        tensors = make_tensors(config, case, IN_SINGLE)
        if case.single == "partial":
            del tensors["model.norm.weight"]
        save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    if case.shards:
        tensors = make_tensors(config, case, IN_SHARDS)
        places = {name: SHARDS[index % 2] for index, name in enumerate(sorted(tensors))}
        if case.shards != "no index":
            (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
        if case.shards == "missing tensor":
            del tensors["model.norm.weight"]
        for shard in SHARDS:
            held = {name: tensor for name, tensor in tensors.items() if places[name] == shard}
            save_file(held, directory / shard, metadata={"format": "pt"})
        if case.shards == "missing file":
            (directory / SHARDS[1]).unlink()
    if case.pickled:
        (directory / "pytorch_model.bin").write_bytes(b"not read")
    return config


def load(directory: Path) -> dict[str, np.ndarray]:
    """Return the tensors of the loaded model by their names in checkpoints."""
    source = ModelSource(EngineConfig(model=str(directory), load_threads=1))
    try:
        dims = ModelDims(ModelConfig.from_hf(source.hf_config), 1, 16, "float32")
        tensors = {}
        with source.weights(dims) as reader:
            for spec in model_specs(dims).values():
                shards = [np.empty(spec.stored_shape, np.float32) for _ in range(spec.num_shards)]
                reader.fill(spec, shards)
                tensors |= {part.name: spec.restore_tensor(part, shards) for part in spec.sources}
    finally:
        source.close()
    # A tied model takes its head from the embedding.
    return {HEAD: tensors[EMBEDDING]} | tensors


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loads_the_recorded_weights_or_refuses_by_name(case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config = write_case(tmp_path, case)
    outcome = expected_outcome(case)
    if isinstance(outcome, str):
        with pytest.raises(CheckpointError) as error:
            load(tmp_path)
        assert outcome in str(error.value)
        return
    loaded = load(tmp_path)
    stored = make_tensors(config, case, outcome)
    expected = {HEAD: stored[EMBEDDING]} | {name: stored[name] for name in stored if "layers.7" not in name}
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(loaded[name], tensor, err_msg=name)
    assert any("1 of 1" in line and "layers.7" in line for line in caplog.messages) == case.extra
    assert any("the stored head is used" in line for line in caplog.messages) == (case.tied and case.head == "own")


def state_of_transformers(directory: Path) -> dict[str, Any]:
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


@pytest.mark.torch
@pytest.mark.parametrize("case", [case for case in CASES if isinstance(expected_outcome(case), int)], ids=str)
def test_recorded_weights_are_those_of_transformers(case: Case, tmp_path: Path):
    config = write_case(tmp_path, case)
    state = state_of_transformers(tmp_path)
    outcome = expected_outcome(case)
    assert isinstance(outcome, int)
    stored = make_tensors(config, case, outcome)
    for name in (EMBEDDING, HEAD, "model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        np.testing.assert_array_equal(state[name].numpy(), stored.get(name, stored[EMBEDDING]), err_msg=name)


NORM = "model.norm.weight"
TIED = Case("", "complete", False, True, "none", False)


def write_norm_twice(directory: Path, placed_in: str) -> None:
    """Write a norm of zeros into the first shard and a norm of ones into the second. The index names `placed_in`."""
    write_case(directory, TIED)
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"][NORM] = placed_in
    (directory / INDEX).write_text(json.dumps(index))
    tensors = make_tensors(json.loads((directory / "config.json").read_text()), TIED, IN_SHARDS)
    for number, shard in enumerate(SHARDS):
        held = {name: tensor for name, tensor in tensors.items() if index["weight_map"][name] == shard}
        save_file(held | {NORM: np.full(48, number, np.float32)}, directory / shard, metadata={"format": "pt"})


@pytest.mark.parametrize("placed_in", SHARDS)
def test_tensor_in_two_shards_comes_from_the_last_one(tmp_path: Path, placed_in: str):
    write_norm_twice(tmp_path, placed_in)
    np.testing.assert_array_equal(load(tmp_path)[NORM], np.ones(48))


@pytest.mark.torch
@pytest.mark.parametrize("placed_in", SHARDS)
def test_transformers_takes_a_tensor_in_two_shards_from_the_last_one(tmp_path: Path, placed_in: str):
    write_norm_twice(tmp_path, placed_in)
    np.testing.assert_array_equal(state_of_transformers(tmp_path)[NORM].numpy(), np.ones(48))


@pytest.mark.parametrize("named", ["other.safetensors", "other.safetensors.index.json"])
def test_file_that_the_config_names_comes_first(tmp_path: Path, named: str):
    config = write_case(tmp_path, Case("complete", "complete", False, True, "none", False))
    (tmp_path / (INDEX if named.endswith("json") else SINGLE)).rename(tmp_path / named)
    other = IN_SHARDS if named.endswith("json") else IN_SINGLE
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": named}))
    np.testing.assert_array_equal(load(tmp_path)[NORM], make_tensors(config, TIED, other)[NORM])


@pytest.mark.parametrize("named", ["../model.safetensors", "model.bin", "absent.safetensors", 3])
def test_file_that_the_config_names_must_be_there(tmp_path: Path, named: object):
    config = write_case(tmp_path, Case("complete", "", False, True, "none", False))
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": named}))
    with pytest.raises(CheckpointError, match=r"transformers_weights=.* is not the name of a \.safetensors"):
        load(tmp_path)


def test_big_endian_header_is_refused(tmp_path: Path):
    write_case(tmp_path, Case("complete", "", False, True, "none", False))
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[:8][::-1] + content[8:])
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize("shape", [(64, 24), (32, 48)])
def test_tied_head_of_another_shape_is_refused(tmp_path: Path, shape: tuple[int, int]):
    config = write_case(tmp_path, Case("complete", "", False, True, "none", False))
    tensors = make_tensors(config, TIED, IN_SINGLE) | {HEAD: np.zeros(shape, np.float32)}
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape .* but config\.json implies \(64, 48\)"):
        load(tmp_path)
