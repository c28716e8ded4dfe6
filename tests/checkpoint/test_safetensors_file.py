import json
import shutil
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import psutil
import pytest
from safetensors import deserialize
from safetensors.numpy import save_file
from tiny_models import tiny_config

from amoeba_jax.checkpoint import SafetensorsCheckpoint
from amoeba_jax.config import EngineConfig
from amoeba_jax.errors import CheckpointError
from amoeba_jax.model_source import ModelSource
from amoeba_jax.models.config import ModelConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def make_directory(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    save_file(tensors, path / WEIGHTS)
    return path


def tensors_of_each_dtype() -> dict[str, np.ndarray]:
    values = np.random.default_rng(0).standard_normal((6, 4), dtype=np.float32)
    return {
        "f32": values,
        "f16": values.astype(np.float16),
        "bf16": values.astype(ml_dtypes.bfloat16),
        "scalar": np.array(2.5, np.float32),
    }


def shard(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    """Turn `directory` into two shards and an index."""
    (directory / WEIGHTS).unlink(missing_ok=True)
    weight_map = {}
    for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2]), start=1):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file({n: tensors[n] for n in names}, directory / name)
        weight_map |= dict.fromkeys(names, name)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_reads_each_dtype_as_stored(tmp_path):
    tensors = tensors_of_each_dtype()
    checkpoint = SafetensorsCheckpoint(make_directory(tmp_path / "m", tensors))
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.directory == tmp_path / "m"
    assert checkpoint.names() == tensors.keys()
    for name, expected in tensors.items():
        array = checkpoint.read(name)
        assert array.dtype == expected.dtype
        assert checkpoint.shape(name) == array.shape == expected.shape
        np.testing.assert_array_equal(array, expected)


def test_shards_read_like_one_file(tmp_path):
    tensors = tensors_of_each_dtype()
    directory = make_directory(tmp_path / "m", tensors)
    shard(directory, tensors)
    checkpoint = SafetensorsCheckpoint(directory)
    assert checkpoint.names() == tensors.keys()
    for name, expected in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), expected)


@pytest.mark.parametrize("load_format", ["auto", "random"])
@pytest.mark.parametrize(
    ("stored", "named", "dtype"),
    [
        (["bfloat16", "bfloat16"], {}, "bfloat16"),
        (["float16", "float16"], {"dtype": None}, "float16"),
        (["float32", "float32"], {}, "float32"),
        (["bfloat16", "float32"], {}, "float32"),
        (["bfloat16", "int8"], {}, "float32"),
        (["bfloat16", "bfloat16"], {"torch_dtype": "float32"}, "float32"),
        (["float16", "float16"], {"dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_dtype_that_the_config_does_not_name_is_that_of_all_matrices(tmp_path, stored, named, dtype, load_format):
    config = {key: value for key, value in tiny_config("llama2").items() if key != "torch_dtype"} | named
    tensors = {f"matrix {i}": np.zeros((2, 3), ml_dtypes.bfloat16).astype(name) for i, name in enumerate(stored)}
    directory = make_directory(tmp_path / "m", tensors | {"norm": np.ones(3, np.float32)})
    (directory / "config.json").write_text(json.dumps(config))
    if load_format == "auto":
        shard(directory, tensors)
    source = ModelSource(EngineConfig(model=str(directory), load_format=load_format))
    source.close()
    assert ModelConfig.from_hf(source.hf_config).dtype == dtype


@pytest.mark.parametrize("model", ["stories260K", "stories15M"])
def test_reads_real_models_bit_for_bit(model, shared_path):
    directory = shared_path("models", model)
    checkpoint = SafetensorsCheckpoint(directory)
    expected = dict(deserialize((directory / WEIGHTS).read_bytes()))
    assert checkpoint.names() == expected.keys()
    for name, tensor in expected.items():
        assert checkpoint.read(name).tobytes() == bytes(tensor["data"])
        assert checkpoint.shape(name) == tuple(tensor["shape"])


def test_unaligned_tensors_are_read(tmp_path):
    # The format does not require alignment. A header of odd length shifts the tensors.
    values = np.arange(4, dtype=np.float32)
    header = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    header += b" " * (1 + len(header) % 2)
    directory = make_directory(tmp_path / "m", {"x": values})
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    array = SafetensorsCheckpoint(directory).read("x")
    assert array.flags.aligned
    np.testing.assert_array_equal(array, values)


def test_release_gives_memory_back_while_arrays_are_held(tmp_path):
    size = 64 << 20
    directory = make_directory(tmp_path / "m", {"big": np.ones(size // 4, np.float32)})
    checkpoint = SafetensorsCheckpoint(directory)
    process = psutil.Process()
    before = process.memory_info().rss
    array = checkpoint.read("big")
    assert array.sum() == size // 4
    resident = process.memory_info().rss
    assert resident - before > 0.9 * size
    checkpoint.release()
    assert process.memory_info().rss < resident - 0.9 * size
    assert array[-1] == 1.0
    assert checkpoint.read("big").sum() == size // 4


def test_release_of_one_tensor_leaves_the_others(tmp_path):
    size = 32 << 20
    tensors = {"a": np.ones(size // 4, np.float32), "b": np.full(size // 4, 2, np.float32)}
    checkpoint = SafetensorsCheckpoint(make_directory(tmp_path / "m", tensors))
    process = psutil.Process()
    assert checkpoint.read("a").sum() + checkpoint.read("b").sum() == 3 * (size // 4)
    resident = process.memory_info().rss
    checkpoint.release("a")
    assert 0.9 * size < resident - process.memory_info().rss < 1.1 * size
    assert checkpoint.read("a")[0] == 1.0


def test_file_cut_after_opening_is_told_in_bytes(tmp_path):
    directory = make_directory(tmp_path / "m", tensors_of_each_dtype())
    checkpoint = SafetensorsCheckpoint(directory)
    size = (directory / WEIGHTS).stat().st_size
    truncate(directory)
    with pytest.raises(CheckpointError, match=f"truncated: tensor .* ends at byte {size}, the file at {size - 10}"):
        [checkpoint.read(name) for name in checkpoint.names()]


def test_arrays_outlive_close_but_reading_stops(tmp_path):
    checkpoint = SafetensorsCheckpoint(make_directory(tmp_path / "m", tensors_of_each_dtype()))
    array = checkpoint.read("f32")
    checkpoint.close()
    checkpoint.release()
    np.testing.assert_array_equal(array, tensors_of_each_dtype()["f32"])
    with pytest.raises(CheckpointError, match="was closed"):
        checkpoint.read("f16")


def test_unknown_tensor_is_named_with_its_file(tmp_path):
    checkpoint = SafetensorsCheckpoint(make_directory(tmp_path / "m", tensors_of_each_dtype()))
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head\.weight' in .*model\.safetensors"):
        checkpoint.read("lm_head.weight")


def test_other_dtypes_are_refused_by_name(tmp_path):
    directory = make_directory(tmp_path / "m", {"x": np.zeros(3, np.int64)})
    checkpoint = SafetensorsCheckpoint(directory)
    assert checkpoint.shape("x") == (3,)
    with pytest.raises(CheckpointError, match=r"tensor 'x' .* dtype I64, but only F32, F16, BF16"):
        checkpoint.read("x")


def remove_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def break_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def config_is_a_list(directory: Path) -> None:
    (directory / "config.json").write_text("[]")


def remove_weights(directory: Path) -> None:
    (directory / WEIGHTS).unlink()


def only_pickle(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")


def only_gguf(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "m.gguf")


def truncate(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[:-10])


def truncate_in_header(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[:40])


def empty(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes(b"")


def append(directory: Path) -> None:
    with (directory / WEIGHTS).open("ab") as file:
        file.write(b"1234")


def corrupt_header(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[:8] + b"x" * 20 + content[28:])


def remove_shard(directory: Path) -> None:
    shard(directory, tensors_of_each_dtype())
    (directory / "model-00002-of-00002.safetensors").unlink()


def shard_without_tensor(directory: Path) -> None:
    shard(directory, tensors_of_each_dtype())
    first = directory / "model-00001-of-00002.safetensors"
    shutil.copy(directory / "model-00002-of-00002.safetensors", first)


def index_leaves_directory(directory: Path) -> None:
    remove_weights(directory)
    (directory / INDEX).write_text('{"weight_map": {"x": "../other.safetensors"}}')


def index_without_map(directory: Path) -> None:
    remove_weights(directory)
    (directory / INDEX).write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_config, r"m is not a Hugging Face model directory: it has no config\.json"),
        (break_config, r"config\.json is not valid JSON"),
        (config_is_a_list, r"config\.json holds a JSON list"),
        (remove_weights, r"m holds no weights: expected model\.safetensors"),
        (only_pickle, r"pytorch_model\.bin.* convert them to safetensors"),
        (only_gguf, r"give the path of the file itself, .*m\.gguf"),
        (truncate_in_header, r"model\.safetensors is truncated .* its 40 bytes end inside the header"),
        (empty, r"model\.safetensors is truncated .* its 0 bytes"),
        (corrupt_header, r"model\.safetensors has a corrupt header"),
        (remove_shard, r"lacks model-00002-of-00002\.safetensors \(1 of 2 shards missing\)"),
        (shard_without_tensor, r"model-00001-of-00002\.safetensors has no tensor 'bf16'.*2 of 2 missing"),
        (index_leaves_directory, r"places 'x' in '\.\./other\.safetensors', which is not a file name"),
        (index_without_map, r"has no weight_map"),
    ],
)
def test_damage_is_described(damage, message, tmp_path):
    directory = make_directory(tmp_path / "m", tensors_of_each_dtype())
    damage(directory)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsCheckpoint(directory)


@pytest.mark.parametrize(("damage", "change"), [(truncate, -10), (append, 4)])
def test_wrong_size_is_told_in_bytes(damage, change, tmp_path):
    directory = make_directory(tmp_path / "m", tensors_of_each_dtype())
    size = (directory / WEIGHTS).stat().st_size
    damage(directory)
    with pytest.raises(CheckpointError, match=f"expected {size} bytes, found {size + change}"):
        SafetensorsCheckpoint(directory)
