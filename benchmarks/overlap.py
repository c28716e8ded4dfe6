"""Kernels that run while a step sends pages. XLA compiles the step for four H100 without a GPU.

    pip install jax-cuda12-plugin jax-cuda12-pjrt     # the compiler for JAX's version, no CUDA
    python benchmarks/overlap.py --config config.json [--rows 32] [--layers 4] [--phase-pages 64] [--hlo step.hlo]

The compiled program is a decode step of a segment of a TP4 instance. The program also exchanges pages of equally many
other layers (`EngineConfig.overlap_exchange`). It is compiled once for each kind of exchange. In the compiled schedule,
each send of pages has a start operation and a done operation. The table counts the kernels between the two: matrix
products, which take the most time, and other kernels. The exit code is 1 if a send has no kernel in between.
"""

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # The compiler needs no CUDA.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.experimental import topologies
from rich.console import Console
from rich.table import Table

from amoeba_jax.json_object import read_json_object
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.step_program import PageExchange, StepKey, step_program
from sharding.mesh import SubMeshPool

TP = 4
# Values of NVIDIA's data sheet and its programming guide for compute capability 9.0.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 3352000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
SEND, DONE = "collective-permute-start", "collective-permute-done"


@dataclass(frozen=True)
class Send:
    """Send of pages, and the kernels between its start operation and its done operation.

    Attributes:
        num_bytes: bytes sent.
        products: number of matrix products.
        others: number of other kernels.
    """

    num_bytes: int
    products: int
    others: int


def sends(hlo: str) -> list[Send]:
    """Return all sends of a compiled module, in the order of its schedule. `hlo`: text of the module."""
    entry = hlo[hlo.index("\nENTRY ") :].splitlines()
    started: dict[str, int] = {}
    found = []
    for place, line in enumerate(entry):
        name = line.split("=")[0].strip().removeprefix("ROOT ").strip()
        if f" {SEND}(" in line:
            started[name] = place
        elif match := re.search(rf" {DONE}\((?:\([^%]*\) )?(%[\w.-]+)\)", line):
            between = entry[started[match.group(1)] + 1 : place]
            products = sum(
                bool(re.search(r"gemm|cublas|\bdot\(", each)) and "get-tuple" not in each for each in between
            )
            others = sum(" fusion(" in each or " while(" in each for each in between) - products
            shapes = re.findall(r"u(8|16|32)\[([\d,]+)\]", line.split(f" {DONE}(")[0])
            found.append(Send(sum(int(bits) // 8 * _count(shape) for bits, shape in shapes), products, max(others, 0)))
    return found


def _count(shape: str) -> int:
    count = 1
    for size in shape.split(","):
        count *= int(size)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="config.json of a model")
    parser.add_argument("--rows", type=int, default=32, help="decoding sequences")
    parser.add_argument("--context", type=int, default=4096, help="longest context in tokens")
    parser.add_argument("--layers", type=int, default=4, help="layers of the segment, and layers that switch")
    parser.add_argument("--pages", type=int, default=512, help="pages of a layer on a device")
    parser.add_argument("--phase-pages", type=int, default=64)
    parser.add_argument("--hlo", type=Path, help="file for the last compiled module")
    options = parser.parse_args()
    try:
        topology = topologies.get_topology_desc("h100", platform="cuda", topology=f"1x1x{TP}", target_config=H100)
    except NotImplementedError as error:
        raise SystemExit("JAX's CUDA plugin is missing: pip install jax-cuda12-plugin jax-cuda12-pjrt") from error
    config = ModelConfig.from_hf(read_json_object(options.config))
    dims = ModelDims(config, TP, 16, "bfloat16")
    group = SubMeshPool(tuple(topology.devices), TP).group(0, TP)
    plan = SegmentPlan(0, config.kinds[: options.layers])
    shape = BatchShape(((options.rows, 1),), options.context // dims.page_size)
    extents = (options.pages, *[options.pages // 4] * 3)
    table = Table("distance", "pages sent (MiB)", "matrix products meanwhile", "other kernels", "temporaries (MiB)",
                  title=f"{config.family}, {options.layers} layers, {options.rows} rows, {TP} x H100")  # fmt: skip
    idle = False
    for distance in (None, *range(1, TP)):
        exchange = PageExchange(options.layers, extents, options.phase_pages, distance)
        key = StepKey(group.device_indices, plan.kinds, shape, extents, TP * options.rows, TP * options.rows, exchange)
        compiled = step_program(dims, plan, key).compile(group)
        text, memory = compiled.as_text() or "", compiled.memory_analysis()
        if options.hlo:
            options.hlo.write_text(text)
        for send in sends(text):
            idle |= not send.products + send.others
            table.add_row(str(distance), f"{send.num_bytes / 2**20:.1f}", str(send.products), str(send.others),
                          f"{memory.temp_size_in_bytes / 2**20:.0f}")  # fmt: skip
    Console(width=110).print(table)
    print(f"JAX {jax.__version__}")
    raise SystemExit(idle)


if __name__ == "__main__":
    main()
