"""Sizes of a launch of the GPU kernel. They come from a measured table, or from a rule if there is no table.

There is a table for each kind of device, `tables/<device kind>.json`. `python -m pallas_kernels.paged_attention.tune`
measures the local device, and writes the table for this kind of device.
"""

import json
import math
import re
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax

TABLES = Path(__file__).parent / "tables"
SHARED_BYTES = 227 * 1024 - 4096
"""Bytes of shared memory of a thread block on Hopper, minus memory for barriers and reductions."""
DEFAULT_PROCESSORS = 132  # streaming multiprocessors of an H100 SXM or H200, used without a device
_ROWS = 64


@dataclass(frozen=True)
class KernelConfig:
    """Sizes of a launch of the GPU kernel. `mosaic_gpu.kernel` defines stages and items.

    Attributes:
        block_tokens: number of keys in a stage, a multiple of 64.
        stages: number of stages in shared memory; with `split_keys` a multiple of `warpgroups`.
        warpgroups: number of computing warpgroups, 1 or 2.
        split_keys: whether the warpgroups share 64 query rows and take stages in turn. False: each warpgroup has its
            own 64 rows.
        splits: number of parts into which the keys of a sequence are divided.
        thread_blocks: number of thread blocks, which take items in turn.

    Raises `ValueError` if a size is not supported.
    """

    block_tokens: int
    stages: int
    warpgroups: int
    split_keys: bool
    splits: int
    thread_blocks: int

    def __post_init__(self):
        if self.block_tokens < 64 or self.block_tokens % 64:
            raise ValueError(f"block_tokens={self.block_tokens} must be a multiple of 64")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups={self.warpgroups} must be 1 or 2")
        if self.stages < 1 or (self.split_keys and self.stages % self.warpgroups):
            raise ValueError(f"stages={self.stages} must be positive, and with split_keys a multiple of warpgroups")
        if self.splits < 1 or self.thread_blocks < 1:
            raise ValueError(f"splits={self.splits} and thread_blocks={self.thread_blocks} must be positive")


@dataclass(frozen=True)
class KernelShape:
    """Sizes of a call of attention that determine the sizes of the kernel.

    Attributes:
        batch: number of sequences.
        kv_heads: number of KV heads.
        head_dim: elements of a head.
        page_size: tokens in a page.
        rows: query rows of a KV head in a sequence: `T * H / K`.
        kv_itemsize: bytes of an element of the cache.
        max_tokens: maximum number of keys of a sequence, from the widths of the page tables.
    """

    batch: int
    kv_heads: int
    head_dim: int
    page_size: int
    rows: int
    kv_itemsize: int
    max_tokens: int

    @property
    def phase(self) -> str:
        return "decode" if self.rows <= _ROWS else "prefill"

    def tiles(self, config: KernelConfig) -> int:
        """Return the number of tiles of query rows over all sequences and KV heads."""
        rows = _ROWS if config.split_keys else _ROWS * config.warpgroups
        return self.batch * self.kv_heads * -(-self.rows // rows)


def shared_bytes(shape: KernelShape, config: KernelConfig) -> int:
    """Return the bytes of shared memory that a thread block needs, including sinks but not barriers."""
    h, groups, converts = shape.head_dim, config.warpgroups, shape.kv_itemsize == 1
    parts = 1 if config.split_keys else groups
    queries = parts * _ROWS * (2 * h + 8)
    stages = 2 * config.stages * config.block_tokens * h * shape.kv_itemsize
    operands = 2 if converts else int(groups > 1 and not config.split_keys)
    own = operands * groups * config.block_tokens * h * 2
    out = groups * _ROWS * ((64 if h % 64 == 0 else h) + 2) * 4
    return queries + stages + own + out


def kernel_config(shape: KernelShape, device: Any = None) -> KernelConfig:
    """Return the measured sizes for the most similar shape in the table of the device.

    The default sizes are returned in three cases:

    * There is no GPU or no table.
    * No entry has the same phase (prefill or decode), head size and element size of the cache.
    * The measured sizes need too much shared memory for this shape.

    The most similar shape may differ from `shape` in page size and in the amount of work. If the product of both
    ratios is 2 or more, the number of splits is computed for `shape`, not taken from the table.
    """
    processors = getattr(device, "core_count", None) or DEFAULT_PROCESSORS
    chosen = default_config(shape, processors)
    entries = _table(table_path(device.device_kind)) if device is not None else ()
    same = [entry for entry in entries if entry["shape"]["phase"] == shape.phase and _same_kind(entry, shape)]
    if not same:
        return chosen

    def distance(entry: dict[str, Any]) -> float:
        given = entry["shape"]
        work = (given["batch"] * given["kv_heads"] * given["rows"]) / (shape.batch * shape.kv_heads * shape.rows)
        return abs(math.log2(given["page_size"] / shape.page_size)) + abs(math.log2(work))

    nearest = min(same, key=distance)
    measured = KernelConfig(**nearest["config"], thread_blocks=processors)
    if distance(nearest) >= 1:  # splits depend on the amount of work
        measured = replace(measured, splits=_splits(shape, measured, processors))
    return measured if shared_bytes(shape, measured) <= SHARED_BYTES else chosen


def default_config(shape: KernelShape, processors: int = DEFAULT_PROCESSORS) -> KernelConfig:
    """Return default sizes, computed from the limits of shared memory and registers. They are not measured.

    `processors` is the number of streaming multiprocessors of the device.
    """
    decode = shape.phase == "decode"
    # At head size 256 the output of one warpgroup fills its registers, and two warpgroups would fill shared memory.
    warpgroups = 1 if shape.head_dim > 128 else 2
    block = 128 if not decode and shape.head_dim < 128 else 64
    config = KernelConfig(block, 4, warpgroups, decode and warpgroups > 1, 1, processors)
    while shared_bytes(shape, config) > SHARED_BYTES:
        config = replace(config, stages=config.stages - (2 if config.split_keys else 1))
    return replace(config, splits=_splits(shape, config, processors))


def _splits(shape: KernelShape, config: KernelConfig, processors: int) -> int:
    """Return the number of parts (splits) of the keys that keeps all processors busy.

    Each split has at least four blocks of keys.
    """
    longest = shape.max_tokens // (4 * config.block_tokens)
    return max(1, min(processors // shape.tiles(config), longest))


def gpu_device() -> Any:
    """Return JAX's default device if it is a GPU, otherwise None."""
    default = jax.config.values["jax_default_device"]  # a device, the name of a platform, or None
    device = jax.devices(default)[0] if default is None or isinstance(default, str) else default
    return device if getattr(device, "platform", "") == "gpu" else None


def table_path(device_kind: str) -> Path:
    """Return the path of the tuning table of a device kind, whether it exists or not."""
    return TABLES / (re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json")


def write_table(path: Path, entries: list[tuple[KernelShape, KernelConfig, float]], about: dict[str, str]) -> None:
    """Write measured entries `(shape, config, microseconds)`. Replaces the file."""
    rows = []
    for shape, config, time_us in entries:
        sizes = {name: value for name, value in asdict(config).items() if name != "thread_blocks"}
        rows.append({"shape": asdict(shape) | {"phase": shape.phase}, "config": sizes, "time_us": round(time_us, 2)})
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"about": about, "entries": rows}, indent=1) + "\n")
    _table.cache_clear()


@cache
def _table(path: Path) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(path.read_text())["entries"]) if path.exists() else ()


def _same_kind(entry: dict[str, Any], shape: KernelShape) -> bool:
    given = entry["shape"]
    return (given["head_dim"], given["kv_itemsize"]) == (shape.head_dim, shape.kv_itemsize)
