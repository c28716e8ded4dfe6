"""Settings of an engine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from amoeba_jax.errors import ConfigError
from sharding.degrees import MAX_DEVICES, degrees_up_to, is_degree

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. Every field is also a keyword argument of `LLM`.

    Raises `ConfigError` with the value and the limit if a value is not supported.
    """

    model: str = "smollm2-135m"
    """Built-in name, directory with Hugging Face files, GGUF file, checkpoint of `LLM.save`, or name on the hub."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub. Default: the main branch."""
    load_format: str = "auto"
    """Source of the weights.

    `auto`: files of the model. `random`: random values from `seed`, for which the model's directory needs only
    config.json.
    """
    load_threads: int | None = None
    """Number of threads that read weights, from 1 to 64. Default: one per core, at most 8.

    Each thread holds one parameter in host memory. If all threads would hold more than 4 GiB, fewer threads read.
    """
    num_devices: int = 1
    """Number of devices to serve on, a power of two. On CPU these are virtual devices of one process."""
    tensor_parallel_size: int = 1
    """Tensor-parallel degree of the instances at the start, a power of two.

    The number of instances at the start is `num_devices` / `tensor_parallel_size`.
    """
    placement: str | None = None
    """Devices for each layer of a single instance: JSON, a JSON file, or `auto` (docs/placement.md).

    `auto` uses the fewest devices that hold the model. Unused devices stay empty. A placement replaces
    `tensor_parallel_size`. Default: no placement.
    """
    max_tensor_parallel_size: int | None = None
    """Largest tensor-parallel degree of an instance, a power of two. Default: 4, or `num_devices` if that is less.

    Heads and FFN features are padded to multiples of this degree.
    """
    dtype: str = "auto"
    """Data type of weights, KV cache and activations: float32, bfloat16 or float16.

    `auto`: float32 on CPU, and the type of the model on GPU.
    """
    device_memory: str | int | None = None
    """Memory budget of each device, such as "2GiB".

    Default: 2 GiB on CPU. On GPU, the share `memory_utilization` of the GPU's memory.
    """
    memory_utilization: float = 0.9
    """Share of a GPU's memory to use if `device_memory` is not set."""
    kv_cache_tokens: int | None = None
    """Tokens in the KV cache of one device. Default: as many as fit in the budget.

    A smaller cache leaves memory for programs that are compiled later.
    """
    page_size: int = 16
    """Tokens per KV page, a power of two."""
    max_model_len: int | None = None
    """Limit for prompt plus output of a request, in tokens.

    Default: the context length of the model, or the capacity of an instance of the highest degree if that is less.
    """
    max_num_seqs: int = 32
    """Limit for the sequences that run at once, for each device of an instance.

    A TP4 instance runs up to 4 times as many sequences as a TP1 instance.
    """
    max_num_batched_tokens: int = 512
    """Limit for the prompt tokens in a step. Longer prompts take several steps. Decoded tokens do not count."""
    prefix_caching: bool = True
    """Whether a request reuses the KV pages of earlier requests that began with the same tokens."""
    segment_layers: int | None = None
    """Limit for the layers in one executable. A model with more layers launches several executables in each step.

    Default: 8 on GPU; 4 on CPU, or 5 if that divides the number of layers. docs/startup.md has the costs of larger
    executables on CPU.
    """
    transform_attention: bool = False
    """Whether a merge turns unneeded weights of attention projections into KV cache, in addition to FFN weights."""
    phase_pages: int | None = None
    """Number of KV pages that two devices exchange at once while instances merge or split.

    The staging buffer of each device has room for up to three times this number of pages. Default: 16, or fewer on a
    device with little memory.
    """
    overlap_exchange: bool | None = None
    """Whether step programs exchange KV pages during a transformation. Default: yes on GPU, no on CPU.

    Transfers then overlap with computation. This option needs more compiled programs.
    """
    expert_loads: str | None = None
    """JSON file with measured loads of experts (`ExpertLoadReport.save`). All ranks then get about equal loads.

    Default: experts are distributed in the order of their index.
    """
    offload_memory: str | int = "4GiB"
    """Host memory for the KV cache of offloaded requests (policy `cocoserve`). 0: no request is offloaded."""
    compile_cache: str | None = None
    """Directory of the persistent compilation cache, for the whole process.

    An empty text leaves JAX's setting unchanged. Default: the directory set in JAX, or else the user's cache directory.
    """
    compile_cache_size: str | int = "8GiB"
    """Size limit of the compilation cache, enforced at start-up. Programs unused for longest are removed first."""
    compile_jobs: int | None = None
    """Number of programs that a warm-up compiles at the same time. Default: one per processor, at most 8."""
    compile_beside: bool = True
    """Whether missing programs are compiled in the background.

    True: a request waits only for programs that it needs. Until the program for the size of a step is compiled, the
    step uses the program of a larger batch. False: all requests wait for each compilation, but the same requests
    always lead to the same steps.
    """
    strict_compile: bool = False
    """Whether requests and transformations are refused if they need a program that is not compiled.

    The setting takes effect after a warm-up of all degrees.
    """
    prepare_pausing: bool = False
    """Whether warm-ups also compile programs for merged instances that keep all weights.

    A merge that pauses requests needs these programs (`LLM.transform`).
    """
    prepare_placements: bool = False
    """Whether warm-ups also compile the programs of replicated and migrated layers (`LLM.replicate`, `LLM.migrate`).

    If False, a program is compiled when a placement first needs it.
    """
    seed: int = 0
    """Seed of random weights, and of requests without a seed."""

    def __post_init__(self) -> None:
        if not is_degree(self.num_devices) or self.num_devices > MAX_DEVICES:
            raise ConfigError(
                f"num_devices={self.num_devices!r} is not supported: it must be a power of two, at most {MAX_DEVICES}"
            )
        degrees = list(degrees_up_to(self.num_devices))
        if self.max_tensor_parallel_size is not None and self.max_tensor_parallel_size not in degrees:
            raise ConfigError(
                f"max_tensor_parallel_size={self.max_tensor_parallel_size!r} is not supported with "
                f"num_devices={self.num_devices}: it must be one of {degrees}"
            )
        allowed = [d for d in degrees if d <= self.max_tp]
        if self.tensor_parallel_size not in allowed:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size!r} is not supported with num_devices="
                f"{self.num_devices} and max_tensor_parallel_size={self.max_tp}: it must be one of {allowed}"
            )
        if self.placement is not None and not isinstance(self.placement, str):
            raise ConfigError(f"placement={self.placement!r} must be a dict, JSON, the path of a JSON file, or auto")
        if self.placement is not None and self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size} and placement exclude each other: "
                "a placement names the devices of each home"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is not supported: it must be one of {', '.join(DTYPES)}")
        if self.load_format not in ("auto", "random"):
            raise ConfigError(f"load_format={self.load_format!r} is not supported: it must be auto or random")
        if self.load_threads is not None and (
            not isinstance(self.load_threads, int) or not 1 <= self.load_threads <= 64
        ):
            raise ConfigError(f"load_threads={self.load_threads!r} must be an integer from 1 to 64")
        if not _is_power_of_two(self.page_size) or self.page_size > 256:
            raise ConfigError(f"page_size={self.page_size!r} must be a power of two from 1 to 256")
        share = self.memory_utilization
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
            raise ConfigError(f"memory_utilization={share!r} must be in (0, 1]")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed={self.seed!r} must be an integer in [0, 2**64)")
        if self.revision is not None and (not isinstance(self.revision, str) or not self.revision):
            raise ConfigError(f"revision={self.revision!r} must be the name of a branch, a tag or a commit")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if not _is_power_of_two(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a power of two, as all batch sizes")
        for name in ("segment_layers", "max_model_len", "phase_pages", "kv_cache_tokens", "compile_jobs"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} must be a positive integer")
        if self.phase_pages == 1:
            raise ConfigError("phase_pages=1 is too small: it must be at least 2, because two pages change places")

    @property
    def max_tp(self) -> int:
        """Largest tensor-parallel degree of this engine."""
        return self.max_tensor_parallel_size or min(self.num_devices, 4)

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> "EngineConfig":
        """Build a config from keyword arguments. `model` and `expert_loads` may be paths. `placement` may be a mapping.

        Raises `ConfigError` if a name is not a setting. The message lists all settings.
        """
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise ConfigError(f"{name!r} is not an EngineConfig field: known are {', '.join(sorted(known))}")
        for name in ("model", "expert_loads"):
            if isinstance(values.get(name), Path):
                values = values | {name: str(values[name])}
        if isinstance(values.get("placement"), Mapping):
            values = values | {"placement": json.dumps(values["placement"])}
        return cls(**values)


def _is_power_of_two(value: Any) -> bool:
    return isinstance(value, int) and value > 0 and value & (value - 1) == 0
