"""Tuner of the GPU kernel: measures launch sizes on the local device, and writes the fastest into a tuning table.

    python -m pallas_kernels.paged_attention.tune [--quick]

Run it on an otherwise idle Hopper GPU. Later launches use the table (`tables/<device kind>.json`).
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.base import Options
from pallas_kernels.paged_attention.measure import Workload, compare
from pallas_kernels.paged_attention.mosaic_gpu import mosaic_gpu_paged_attention
from pallas_kernels.paged_attention.tuning import (
    SHARED_BYTES,
    KernelConfig,
    KernelShape,
    default_config,
    gpu_device,
    shared_bytes,
    table_path,
    write_table,
)

# (sequences, tokens of each, query tokens of each): decode, and a chunk of prefill at the end.
WORKLOADS = ((8, 32768, 1), (64, 4096, 1), (256, 1024, 1), (16, 2048, 1), (1, 2048, 2048), (1, 32768, 2048))
HEAD_SIZES = (64, 128, 256)


def candidates(shape: KernelShape, processors: int) -> Iterator[KernelConfig]:
    """Yield the launch sizes to measure, beginning with the default sizes. All sizes fit into shared memory.

    `processors` is the number of streaming multiprocessors of the device.
    """
    default = default_config(shape, processors)
    seen = set()
    for block_tokens in (default.block_tokens, 64, 128):
        for warpgroups in (default.warpgroups, 1, 2):
            for stages in (default.stages, 2, 3, 4, 6, 8):
                for splits in sorted({default.splits, 1, 2, 4, 8, 16}):
                    split_keys = shape.phase == "decode" and warpgroups == 2
                    if split_keys and stages % warpgroups:
                        continue
                    config = KernelConfig(block_tokens, stages, warpgroups, split_keys, splits, processors)
                    enough = splits == 1 or shape.max_tokens // splits >= 2 * block_tokens
                    if config not in seen and enough and shared_bytes(shape, config) <= SHARED_BYTES:
                        seen.add(config)
                        yield config


def best(shape: KernelShape, processors: int, time_s: Callable[[KernelConfig], float]) -> tuple[KernelConfig, float]:
    """Return the fastest launch sizes and their time in seconds. `time_s` measures a candidate.

    First, all candidates with the default number of splits of the keys are measured. Then, other numbers of splits are
    measured for the fastest of these candidates.
    """
    default = default_config(shape, processors)
    all_of_them = list(candidates(shape, processors))
    times = {config: time_s(config) for config in all_of_them if config.splits == default.splits}
    fastest = min(times, key=times.__getitem__)
    for config in all_of_them:
        if config not in times and config == replace(fastest, splits=config.splits):
            times[config] = time_s(config)
    fastest = min(times, key=times.__getitem__)
    return fastest, times[fastest]


def tune(
    path: Path,
    processors: int,
    workloads: list[Workload],
    time_s: Callable[[Workload, KernelConfig], float],
    about: dict[str, str],
) -> None:
    """Find the fastest launch sizes for each workload, and write them to `path`.

    Args:
        path: file of the tuning table.
        processors: number of streaming multiprocessors of the device.
        workloads: workloads to measure.
        time_s: function that measures a workload with the given sizes, in seconds.
        about: name of the device and version of JAX, stored in the file.
    """
    entries = []
    for workload in workloads:
        shape = workload.kernel_shape()
        config, seconds = best(shape, processors, partial(time_s, workload))
        print(f"{workload.name}: {seconds * 1e6:.1f} us with {config}", flush=True)
        entries.append((shape, config, seconds * 1e6))
    write_table(path, entries, about)
    print(f"wrote {path}")


_arguments = lru_cache(maxsize=1)(lambda workload: workload.make(jnp.bfloat16))  # gigabytes, so only one is kept


def _time_on_device(workload: Workload, config: KernelConfig) -> float:
    options = Options(workload.head_dim**-0.5)
    attend = jax.jit(partial(mosaic_gpu_paged_attention, options=options, config=config))
    return compare({"kernel": lambda: attend(*_arguments(workload))}, budget_s=0.5)["kernel"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="head size 128 and pages of 16 tokens only")
    arguments = parser.parse_args()
    device = gpu_device()
    if device is None or not device.compute_capability.startswith("9."):
        raise SystemExit(f"no Hopper GPU found (JAX uses {jax.devices()[0]}): the kernel runs only on Hopper")
    sizes = [(128, 16)] if arguments.quick else [(h, s) for h in HEAD_SIZES for s in (16, 64)]
    workloads = [
        Workload(batch, tokens, queries, kv_heads=8, group=4, head_dim=h, page_size=s)
        for h, s in sizes
        for batch, tokens, queries in WORKLOADS
    ]
    about = {"device": device.device_kind, "jax": jax.__version__}
    tune(table_path(device.device_kind), device.core_count, workloads, _time_on_device, about)


if __name__ == "__main__":
    main()
