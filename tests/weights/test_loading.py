"""Loading: equal shards for any number of threads, no second copy of the model, and no leftovers of a failure."""

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from shards import build_shards
from tiny_models import tiny_config, tiny_model, write_model

from amoeba_jax.checkpoint.orbax_dir import OrbaxCheckpoint
from amoeba_jax.checkpoint.resolve import ORBAX_MARKER
from amoeba_jax.config import EngineConfig
from amoeba_jax.errors import CheckpointError, ConfigError
from amoeba_jax.model_source import ModelSource
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.weights import loading
from amoeba_jax.weights.loading import WeightReader, put, read_ahead, staging_bytes, staging_shards
from amoeba_jax.weights.saving import save
from amoeba_jax.weights.store import WeightStore
from sharding.ledger import Ledger
from sharding.owners import Owner
from sharding.params import ParamSpec, Source

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def open_model(
    model: Path, *, threads: int = 2, dtype: str = "float32", max_tp: int = 4, page_size: int = 16, devices: int = 2
) -> tuple[ModelSource, WeightStore]:
    source = ModelSource(EngineConfig(model=str(model), load_threads=threads))
    config = ModelConfig.from_hf(source.hf_config)
    return source, WeightStore(ModelDims(config, max_tp, page_size, dtype), tuple(jax.devices()[:devices]))


def load(model: Path, **settings) -> WeightStore:
    source, store = open_model(model, **settings)
    with source.weights(store.dims) as reader:
        store.load(reader, [Ledger(1 << 30) for _ in store.devices], lambda _: None)
    return store


def saved_model(model: Path, directory: Path, **settings) -> Path:
    save(directory, load(model, **settings), json.loads((model / "config.json").read_text()), None)
    return directory


def assert_shards(store: WeightStore, tensors: dict[str, np.ndarray]) -> None:
    """Check that all shards on all devices equal the tensors, bit for bit."""
    for name, spec in store.specs.items():
        for index, expected in enumerate(build_shards(spec, tensors.__getitem__, DTYPES[store.dims.dtype])):
            for device in range(len(store.devices)):
                shard = np.asarray(store.shard(device, name, index))
                assert shard.dtype == expected.dtype
                assert shard.tobytes() == expected.tobytes(), (name, index, device)


def live_buffers() -> int:
    gc.collect()
    return len(jax.live_arrays())


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("read-weights")]


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("family", ["qwen2", "llama3-scaled-rope"])
def test_shards_are_the_same_whatever_the_number_of_threads(tmp_path: Path, family: str, threads: int):
    config = tiny_config(family) | {"num_hidden_layers": 5}
    model = write_model(config, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    for dtype in DTYPES:
        assert_shards(load(model, threads=threads, dtype=dtype), tensors)


@pytest.mark.parametrize(
    ("family", "threads"), [("smollm2", 1), ("smollm2", 3), ("qwen3-moe-mixed", 3), ("qwen2-moe-mixed", 1)]
)
def test_saved_shards_come_back_in_the_same_and_in_other_layouts(tmp_path: Path, family: str, threads: int):
    model = tiny_model(family, tmp_path)
    saved = saved_model(model, tmp_path / "saved")
    tensors = load_file(model / "model.safetensors")
    for layout in ({}, {"max_tp": 2}, {"page_size": 8}, {"max_tp": 1, "dtype": "bfloat16"}):
        assert_shards(load(saved, threads=threads, **layout), tensors)


def test_markers_of_earlier_versions_lack_new_fields(tmp_path: Path):
    """Other families, YaRN and LongRoPE have added fields to the marker."""
    saved = saved_model(tiny_model("smollm2", tmp_path), tmp_path / "saved")
    marker = json.loads((saved / ORBAX_MARKER).read_text())
    config = marker["layout"]["config"]
    for name in (
        *("experts", "dense_layers", "local_rope", "activation", "norm_offset", "post_norms", "embedding_scale"),
        *("attention_scale", "attention_soft_cap", "logit_soft_cap", "sinks"),
    ):
        del config[name]
    for name in ("beta_fast", "beta_slow", "truncate", "attention_factor", "short_factor", "long_factor", "long"):
        del config["rope"][name]
    (saved / ORBAX_MARKER).write_text(json.dumps(marker))
    assert OrbaxCheckpoint(saved).saved_dims.config == ModelConfig.from_hf(tiny_config("smollm2"))
    changed = json.loads((saved / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (saved / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match="not the config of the saved shards: norm_eps differ"):
        OrbaxCheckpoint(saved)


def parameters(count: int) -> list[ParamSpec]:
    return [ParamSpec(f"p{i}", (Source(f"t{i}", (i + 1, 3)),), (i + 1, 3), owner=Owner.FFN) for i in range(count)]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_look_ahead_is_bounded_and_in_order(threads: int):
    """At most one parameter more than threads is in host memory, and all threads read at once."""
    specs, started, most = parameters(20), [], 0
    together = threading.Barrier(threads, timeout=60)

    def fill(spec: ParamSpec, shards: list[np.ndarray]) -> None:
        started.append(spec.name)
        if int(spec.name[1:]) < threads:
            together.wait()
        shards[0][...] = int(spec.name[1:])

    dtype = np.dtype(np.float32)
    slot_bytes = staging_bytes(specs[9], dtype)  # later parameters have their own memory
    for count, (spec, shards) in enumerate(read_ahead(specs, WeightReader(fill, threads), dtype, slot_bytes)):
        assert spec is specs[count]
        most = max(most, len(started) - count)
        np.testing.assert_array_equal(shards[0], np.full((count + 1, 3), count))
    assert len(started) == len(specs)
    assert most <= (1 if threads == 1 else threads + 1)
    assert not reading_threads()


@pytest.mark.parametrize(("limit", "slots"), [(0, 2), (3, 3), (9, 5)])
def test_staging_memory_is_limited_in_bytes(limit: int, slots: int, monkeypatch: pytest.MonkeyPatch):
    """`limit` is a number of 1 MB slots. Four threads would use five slots."""
    specs = [ParamSpec(f"p{i}", (Source("t", (512, 512)),), (512, 512), owner=Owner.FFN) for i in range(8)]
    dtype = np.dtype(np.float32)
    slot_bytes = staging_bytes(specs[0], dtype)
    monkeypatch.setattr(loading, "_MAX_STAGING_BYTES", limit * slot_bytes)
    tracemalloc.start()
    try:
        reader = WeightReader(lambda spec, shards: shards[0].fill(0), threads=4)
        assert sum(1 for _ in read_ahead(specs, reader, dtype, slot_bytes)) == len(specs)
        assert slots * slot_bytes <= tracemalloc.get_traced_memory()[1] < (slots + 0.5) * slot_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_staging_memory_may_be_used_again(dtype: np.dtype):
    """Devices have their own copies, so shards stay the same when staging memory changes."""
    spec = ParamSpec("p", (Source("t", (96, 64)),), (24, 64), num_shards=4, owner=Owner.FFN)
    memory = np.empty(staging_bytes(spec, dtype), np.uint8)
    shards = staging_shards(spec, dtype, memory)
    for index, shard in enumerate(shards):
        shard[...] = index + 1
    buffers = put(shards, [jax.devices()[:2]] * 4)
    memory[...] = 0
    for index, copies in enumerate(buffers):
        for copy in copies:
            np.testing.assert_array_equal(np.asarray(copy), np.full((24, 64), index + 1, dtype))


@pytest.mark.parametrize("value", [0, -1, 65, 1.5, "2"])
def test_number_of_threads_is_checked(value: object):
    with pytest.raises(ConfigError, match=rf"load_threads={value!r} must be an integer from 1 to 64"):
        EngineConfig(load_threads=value)


# Failures


def cut_file(model: Path) -> None:
    path = model / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def shard_file(model: Path) -> Path:
    return model / "shards" / "layers.1.mlp.down.2"


def cut_shard(model: Path) -> None:
    path = next(path for path in shard_file(model).iterdir() if not path.name.startswith("."))
    os.truncate(path, path.stat().st_size // 2)


def remove_shard_data(model: Path) -> None:
    next(path for path in shard_file(model).iterdir() if not path.name.startswith(".")).unlink()


def remove_shard(model: Path) -> None:
    shutil.rmtree(shard_file(model))


def replace_shard(model: Path) -> None:
    shutil.rmtree(shard_file(model))
    shutil.copytree(model / "shards" / "layers.1.mlp.gate_up.0", shard_file(model))


def unreadable_shard(model: Path) -> None:
    path = next(path for path in shard_file(model).iterdir() if not path.name.startswith("."))
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_file, r"model\.safetensors is truncated: tensor 'model\.\S+' ends at byte \d+, the file at \d+"),
        (cut_shard, r"shards/layers\.1\.mlp\.down\.2, a shard of layers\.1\.mlp\.down, cannot be read: "),
        (remove_shard_data, r"shards/layers\.1\.mlp\.down\.2, a shard of layers\.1\.mlp\.down, cannot be read: "),
        (remove_shard, r"shards/layers\.1\.mlp\.down\.2, a shard of layers\.1\.mlp\.down, cannot be read: "),
        (unreadable_shard, r"shards/layers\.1\.mlp\.down\.2, a shard of layers\.1\.mlp\.down, cannot be read: "),
        (replace_shard, r"layers\.1\.mlp\.down\.2, a shard of layers\.1\.mlp\.down, has shape .* expected \("),
    ],
)
def test_damage_after_opening_is_named_and_leaves_nothing(
    tmp_path: Path, damage: Callable[[Path], None], message: str, threads: int
):
    """Files break when part of the weights is on the devices already."""
    model = tiny_model("llama2", tmp_path)
    if damage is not cut_file:
        model = saved_model(model, tmp_path / "saved")
    before = live_buffers()
    source, store = open_model(model, threads=threads)
    damage(model)
    done: list[str] = []
    with pytest.raises(CheckpointError, match=message), source.weights(store.dims) as reader:
        store.load(reader, [Ledger(1 << 30) for _ in store.devices], done.append)
    assert done or damage is cut_file, "some parameters were there already"
    assert live_buffers() == before
    assert not reading_threads()


@pytest.mark.parametrize("threads", [1, 4])
def test_interrupted_loading_leaves_nothing(tmp_path: Path, threads: int):
    source, store = open_model(tiny_model("llama2", tmp_path), threads=threads)
    before, done = live_buffers(), []

    def interrupt(name: str) -> None:
        done.append(name)
        if len(done) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), source.weights(store.dims) as reader:
        store.load(reader, [Ledger(1 << 30) for _ in store.devices], interrupt)
    assert len(done) == 5
    assert live_buffers() == before
    assert not reading_threads()


# Memory

_SCRIPT = """
import json, re, sys
from pathlib import Path
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 8)
from test_loading import load
from amoeba_jax.weights import store as module
tiny, large, devices, keep = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "keep"
def peak(): return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
load(tiny, devices=devices)  # imports, JAX and its threads are not the load
before, put, kept = peak(), module.put, []
if keep:
    module.put = lambda shards, devices: (kept.extend(map(np.copy, shards)), put(shards, devices))[1]
store = load(large, devices=devices)
print(json.dumps({"peak": peak() - before, "weights": store.num_bytes * devices}))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a tiny model and a model of 223 MB. As in real models, the largest parameters are a small part."""
    root = tmp_path_factory.mktemp("models")
    shape = {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 28, "vocab_size": 8000}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64}
    large = write_model(tiny_config("llama2") | shape | heads, root / "large")
    return {"tiny": tiny_model("llama2", root), "safetensors": large}


def fused_model(directory: Path, form: str) -> Path:
    """Write a model of about 220 MB in f32 with all experts of a layer in one tensor: Qwen3-MoE, or gpt-oss in MXFP4.

    `form` is the name of a tiny model.
    """
    shape = {"hidden_size": 384, "num_hidden_layers": 28, "vocab_size": 8000, "head_dim": 64}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    if form == "gpt-oss-mxfp4":
        return write_model(tiny_config(form) | shape | heads | {"intermediate_size": 288}, directory)
    path = write_model(tiny_config(form) | shape | heads | {"moe_intermediate_size": 144}, directory)
    tensors = load_file(path / "model.safetensors")
    for layer in range(28):
        prefix = f"model.layers.{layer}.mlp.experts"
        stacks = {
            part: np.stack([tensors.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(8)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([stacks["gate"], stacks["up"]], axis=1)
        tensors[f"{prefix}.down_proj"] = stacks["down"]
    save_file(tensors, path / "model.safetensors")
    return path


def measure(models: dict[str, Path], form: str, devices: int, *, keep: bool = False) -> float:
    """Return the peak resident memory of a process, with mapped files, divided by the weights kept on all devices."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), *filter(None, sys.path)]
    environment = os.environ | {"NPROC": "16", "PYTHONPATH": os.pathsep.join(paths)}
    arguments = [str(models["tiny"]), str(models[form]), str(devices), "keep" if keep else ""]
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *arguments], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["weights"] > 200e6 * devices
    return figures["peak"] / figures["weights"]


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read as Linux reports it")


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_peak_host_memory_while_loading(models: dict[str, Path], devices: int):
    assert 0.9 < measure(models, "safetensors", devices) <= 1.15


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize(("form", "most"), [("qwen3-moe", 1.15), ("gpt-oss-mxfp4", 1.25)])
def test_peak_host_memory_while_loading_fused_experts(models: dict[str, Path], form: str, most: float, tmp_path: Path):
    """Of a fused tensor, host memory has only the current expert and the buffers of the reading threads.

    MXFP4 takes 1.20 times the weights here, and 1.10 times with matrices four times as large.
    """
    assert 0.9 < measure(models | {form: fused_model(tmp_path / "large", form)}, form, 1) <= most


@on_linux
@pytest.mark.slow
def test_peak_host_memory_while_loading_saved_shards(models: dict[str, Path], tmp_path: Path):
    saved = saved_model(models["safetensors"], tmp_path / "saved")
    assert 0.9 < measure(models | {"saved": saved}, "saved", 1) <= 1.15


@on_linux
@pytest.mark.slow
def test_a_second_copy_of_the_model_is_seen(models: dict[str, Path]):
    """A second copy exceeds the limit above."""
    assert measure(models, "safetensors", 1, keep=True) > 1.8
