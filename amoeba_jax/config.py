"""What a user chooses when starting an engine."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from amoeba_jax.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. Every field can be given to `LLM(...)` by name.

    Raises `ConfigError` on construction for a value that cannot work, naming it and the limit.
    """

    model: str = "smollm2-135m"
    """Built-in name, directory in Hugging Face form, GGUF file, checkpoint saved by `LLM.save`, or hub name."""
    revision: str | None = None
    """Branch, tag or commit of a model from the hub. Default: its main branch."""
    load_format: str = "auto"
    """Where weights come from. `auto`: the model's files. `random`: drawn from `seed`; the directory needs only
    config.json."""
    load_threads: int | None = None
    """Threads that read weights, 1 to 64, each with one parameter in host memory. Default: one a core, at most 8."""
    num_devices: int = 1
    """Devices to serve on: 1, 2, 4 or 8. On CPU these are virtual devices of one process."""
    tensor_parallel_size: int = 1
    """Degree of the instances at the start, 1, 2 or 4: as many instances as the devices make."""
    max_tensor_parallel_size: int | None = None
    """Largest degree that instances may be given (1, 2 or 4). Default: 4, or the number of devices if that is
    less."""
    dtype: str = "auto"
    """Type of weights, cache and activations: float32, bfloat16 or float16. `auto`: the model's own on GPU, float32 on
    CPU."""
    device_memory: str | int | None = None
    """Budget per device, such as "2GiB". Default: on CPU 2 GiB, on GPU `memory_utilization` of the device."""
    memory_utilization: float = 0.9
    """Share of a GPU's memory to use where `device_memory` is not given."""
    kv_cache_tokens: int | None = None
    """Tokens that one device's KV cache holds. Default: as many as the budget has room for. Fewer tokens leave memory
    for what is not known at the start: programs that are compiled later, and transformations that copy."""
    page_size: int = 16
    """Tokens per KV page, a power of two."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens, at most the model's context. Default: that, or what the largest layout
    holds."""
    max_num_seqs: int = 32
    """Sequences that an instance decodes at once for each of its devices: 4 times as many at TP4."""
    max_num_batched_tokens: int = 512
    """Prompt tokens that one step of an instance computes besides its decodes; longer prompts take several steps."""
    prefix_caching: bool = True
    """Keep the KV pages of earlier requests while there is room, for requests that begin with the same tokens."""
    segment_layers: int | None = None
    """Most layers compiled into one executable. Deeper models run as several launches of one such executable. Default:
    8; on CPU, where a process cannot hold many large programs (docs/startup.md), 4, or 5 if that divides the depth."""
    transform_attention: bool = False
    """Let transformations release attention projections too, and not only FFN weights."""
    phase_pages: int | None = None
    """Pages that devices exchange at once while instances merge or split, which sizes the staging buffer. Default: 16,
    or fewer where that is a large part of the memory."""
    overlap_exchange: bool | None = None
    """Have devices exchange the pages of layers that switch in the programs of steps, beside what these compute, as far
    as steps have programs for that. Takes a program more for each way in which devices trade. Default: on GPU."""
    compile_cache: str | None = None
    """Directory of the persistent compilation cache, which holds for the whole process. An empty text leaves JAX's
    setting alone. Default: JAX's own setting if there is one, else the user's cache directory."""
    compile_cache_size: str | int = "8GiB"
    """Most bytes that the compilation cache's directory may hold: the least recently used programs go first."""
    compile_jobs: int | None = None
    """Programs that a warm-up compiles at once. Default: one a processor, at most 8."""
    compile_beside: bool = True
    """Compile missing programs beside the steps of running requests: a request waits for its own programs alone, and
    steps take larger batches than they need while theirs are compiled. Otherwise programs are compiled between steps:
    all requests wait, and runs with the same requests take the same steps."""
    strict_compile: bool = False
    """After a warm-up of all degrees, refuse a request or transformation that would need another program, instead of
    compiling it while requests wait."""
    prepare_pausing: bool = False
    """Have warm-ups compile besides what instances of higher degrees need that keep all weights, as they do while
    requests are paused, and launch long steps in parts, of which few have to run before requests pause: see
    `LLM.transform`. Takes a second buffer of hidden states on each device."""
    seed: int = 0
    """Seed of requests that set none, and of random weights."""

    def __post_init__(self) -> None:
        if self.num_devices not in (1, 2, 4, 8):
            raise ConfigError(f"num_devices={self.num_devices!r} is not supported: it must be 1, 2, 4 or 8")
        degrees = [d for d in (1, 2, 4) if d <= self.num_devices]
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
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a power of two: batches come in such sizes")
        for name in ("segment_layers", "max_model_len", "phase_pages", "kv_cache_tokens", "compile_jobs"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} must be a positive integer")
        if self.phase_pages == 1:
            raise ConfigError("phase_pages=1 is too few: two pages must be able to change places")

    @property
    def max_tp(self) -> int:
        """Largest tensor-parallel degree of this engine."""
        return self.max_tensor_parallel_size or min(self.num_devices, 4)

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> "EngineConfig":
        """Build from keyword arguments; an unknown name gets a `ConfigError` that lists the known ones."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise ConfigError(f"{name!r} is not an EngineConfig field: known are {', '.join(sorted(known))}")
        if isinstance(values.get("model"), Path):
            values = values | {"model": str(values["model"])}
        return cls(**values)


def _is_power_of_two(value: Any) -> bool:
    return isinstance(value, int) and value > 0 and value & (value - 1) == 0
