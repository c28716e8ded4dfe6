"""Time and memory of loading weights, with one thread and with several threads, by file format.

    python benchmarks/loading.py [--models smollm2 random] [--devices 1 4] [--cold] [--json loading.json]

Each row is measured in its own process. The first load measures the peak of host memory, including mapped files,
relative to the weights on all devices. Then four measurements take turns: a load with one thread, a load with several
threads, a read of the files, and a copy in host memory. The copy writes as many bytes as the weights have (at most 512
MiB) into new memory, with all cores. On CPU, the time of the copy is a lower bound for the time of a load. With
`--cold`, the files are dropped from the page cache before each load and before the read.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from peers.checkpoints import write_random_llama
from rich.console import Console
from rich.table import Table

from amoeba_jax.checkpoint.default_model import DEFAULT_MODEL, PACKAGE, SOURCE, ensure_default_model
from amoeba_jax.config import EngineConfig
from amoeba_jax.model_source import ModelSource
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.platform import serving_devices
from amoeba_jax.weights.loading import default_threads
from amoeba_jax.weights.saving import save
from amoeba_jax.weights.store import WeightStore
from sharding.ledger import Ledger

RANDOM = {  # 1.04 GB in f32
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 4096,
    "vocab_size": 8000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
TINY = RANDOM | {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 128, "vocab_size": 256}


def load(model: Path, devices: int, threads: int) -> tuple[WeightStore, float]:
    """Load weights in f32 onto CPU devices. Return the store of the weights, and the seconds of the load."""
    start = time.perf_counter()
    config = EngineConfig(model=str(model), num_devices=devices, load_threads=threads)
    source = ModelSource(config)
    dims = ModelDims(ModelConfig.from_hf(source.hf_config), config.max_tp, config.page_size, "float32")
    store = WeightStore(dims, serving_devices(devices))
    with source.weights(dims) as reader:
        store.load(reader, [Ledger(1 << 40) for _ in store.devices], lambda _: None)
    return store, time.perf_counter() - start


def load_once(model: Path, devices: int, threads: int) -> float:
    store, elapsed = load(model, devices, threads)
    store.release_all()
    gc.collect()
    return elapsed


def copy_rate(num_bytes: int) -> float:
    """Return the bytes per second that all cores copy into newly allocated memory."""
    threads = os.cpu_count() or 1
    parts = np.array_split(np.ones(num_bytes, np.uint8), threads)
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        list(pool.map(np.copy, parts))
        return num_bytes / (time.perf_counter() - start)


def files_of(model: Path) -> list[Path]:
    return [path for path in model.rglob("*") if path.is_file()] if model.is_dir() else [model]


def drop_from_page_cache(model: Path) -> None:
    for path in files_of(model):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate(model: Path) -> float:
    """Return the bytes per second of reading the files of a model."""
    buffer, num_bytes, start = bytearray(8 << 20), 0, time.perf_counter()
    for path in files_of(model):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                num_bytes += count
    return num_bytes / (time.perf_counter() - start)


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, "the kernel does not report VmHWM"
    return 1024 * int(found[1])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Measure one row in this process."""
    model, devices, threads = Path(job["path"]), job["devices"], job["threads"]
    load_once(Path(job["tiny"]), devices, threads)  # Warm-up: imports and JAX's threads are not part of a load.
    before = peak_bytes()
    store, _ = load(model, devices, threads)
    kept = store.num_bytes * devices
    result: dict[str, Any] = {"kept_bytes": kept, "peak_ratio": (peak_bytes() - before) / kept}
    store.release_all()
    del store
    samples: dict[str, list[float]] = {"one_s": [], "several_s": [], "copy_rate": [], "read_rate": []}
    for _ in range(job["repeats"]):
        for name, count in (("one_s", 1), ("several_s", threads)):
            if job["cold"]:
                drop_from_page_cache(model)
            samples[name].append(load_once(model, devices, count))
        if job["cold"]:
            drop_from_page_cache(model)
        samples["read_rate"].append(read_rate(model))
        samples["copy_rate"].append(copy_rate(min(kept, 512 << 20)))
    return result | samples


def save_shards(model: Path, devices: int, directory: Path) -> Path:
    """Save a model with `LLM.save`, and return the directory."""
    config = EngineConfig(model=str(model), num_devices=devices)
    source = ModelSource(config)
    dims = ModelDims(ModelConfig.from_hf(source.hf_config), config.max_tp, config.page_size, "float32")
    store = WeightStore(dims, serving_devices(1))
    with source.weights(dims) as reader:
        store.load(reader, [Ledger(1 << 40)], lambda _: None)
    save(directory, store, source.hf_config, source.directory)
    store.release_all()
    return directory


def forms(models: list[str], devices: int, scratch: Path) -> dict[str, Path]:
    """Return the paths of the models to load, by name in the table."""
    found: dict[str, Path] = {}
    if "smollm2" in models:
        found["SmolLM2-135M, safetensors bf16"] = smollm2 = ensure_default_model(progress=False)
        package = find_spec(PACKAGE)
        assert package is not None, f"{PACKAGE} is not installed"
        found["SmolLM2-135M, GGUF Q4_1"] = Path(str(package.origin)).parent / SOURCE
        found["SmolLM2-135M, saved shards f32"] = save_shards(smollm2, devices, scratch / f"smollm2-{devices}")
    if "random" in models:
        directory = scratch / "random"
        if not directory.exists():
            write_random_llama(RANDOM, directory, seed=0)
        found["random 1 GB, safetensors f32"] = directory
        found["random 1 GB, saved shards f32"] = save_shards(directory, devices, scratch / f"random-{devices}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2", "random"], choices=["smollm2", "random"])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--threads", type=int, default=max(2, default_threads()), help="threads of the parallel loads")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each load")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(options.row)))
        return
    table = Table(
        title=f"JAX {jax.__version__}, {'cold' if options.cold else 'warm'} page cache, {DEFAULT_MODEL} and random"
    )
    for column in ("", "devices", "kept", "1 thread", f"{options.threads} threads", "ratio", "MB/s", "of copy", "peak"):
        table.add_column(column, justify="right" if column else "left")
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        write_random_llama(TINY, Path(scratch) / "tiny", seed=0)
        for devices in options.devices:
            for name, path in forms(options.models, devices, Path(scratch)).items():
                job = {"path": str(path), "devices": devices, "tiny": f"{scratch}/tiny"}
                job |= {"threads": options.threads, "repeats": options.repeats, "cold": options.cold}
                command = [sys.executable, __file__, "--row", json.dumps(job)]
                row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
                results.append({"name": name, "devices": devices} | row)
                one, several = median(row["one_s"]), median(row["several_s"])
                ratio = median(b / a for a, b in zip(row["one_s"], row["several_s"], strict=True))
                rate = row["kept_bytes"] / several
                share = median(
                    row["kept_bytes"] / s / c for s, c in zip(row["several_s"], row["copy_rate"], strict=True)
                )
                cells = (f"{row['kept_bytes'] / 1e6:.0f} MB", f"{one:.2f} s", f"{several:.2f} s", f"{ratio:.2f}")
                table.add_row(
                    name, str(devices), *cells, f"{rate / 1e6:.0f}", f"{share:.0%}", f"{row['peak_ratio']:.2f}x"
                )
                read = median(row["read_rate"]) / 1e6
                print(
                    f"{name}, {devices} devices: {one:.2f} s, {several:.2f} s; files read at {read:.0f} MB/s",
                    flush=True,
                )
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
