"""Division of the memory of a device between weights, KV cache and temporaries."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from amoeba_jax.config import EngineConfig
from amoeba_jax.errors import MemoryBudgetError
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.buckets import hidden_tokens
from sharding.ledger import format_bytes, parse_bytes

DEFAULT_CPU_MEMORY = "2GiB"
# Layers in the largest program on CPU, unless that is configured.
MOST_CPU_SEGMENT_LAYERS = 5
# On CPU, 32 pages would save only a tenth of the time, because the pages then exceed a core's cache.
DEFAULT_PHASE_PAGES = 16
# If `phase_pages` is not set, staging takes at most 1/32 of the memory that is left for the KV cache.
STAGING_SHARE = 32
# Programs whose temporaries count as activations. The temporaries of exchanges count as staging.
ACTIVATION_KINDS = (
    "step",
    "head",
    "split",
    "join",
    "take_columns",
    "put_columns",
    "sample",
    "sample_full",
    "set_state",
    "token_logprobs",
    "take_column",
    "page_copy",
)
# Bytes of ids and masks in an exchange, for each page of a phase.
STAGING_IDS = 1 << 10


@dataclass(frozen=True)
class MemoryPlan:
    """Division of the memory of one device. Sizes are in bytes. `phase_pages` and `num_pages` are numbers of pages."""

    budget_bytes: int
    weight_bytes: int
    activation_bytes: int
    sampling_bytes: int
    hidden_bytes: int
    """Size of the buffer of hidden states, which is as wide as the largest step."""
    staging_bytes: int
    """Size of temporaries for pages that move between devices while instances merge or split."""
    phase_pages: int
    """Number of pages that a device sends in one phase of an exchange (`kvcache.migration`); 0 without exchanges."""
    page_bytes: int
    """Size of one page of one layer."""
    num_pages: int
    """Number of pages in the first KV extent of each layer."""


class DeviceTooSmallError(MemoryBudgetError):
    """Error: the budget of a device is too small for the weights, the temporaries and one KV page of each layer.

    A budget of `needed_bytes` would suffice.
    """

    def __init__(self, message: str, budget_bytes: int, needed_bytes: int):
        super().__init__(message)
        self.budget_bytes, self.needed_bytes = budget_bytes, needed_bytes


def device_budget(config: EngineConfig, device: jax.Device) -> int:
    """Return the number of bytes that the engine may use on a device.

    This is `device_memory` if it is set. Otherwise, it is `memory_utilization` (a fraction) times the memory that the
    device reports. For a device that reports no memory, it is 2 GiB.
    """
    if config.device_memory is not None:
        return parse_bytes(config.device_memory)
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * config.memory_utilization)
    return parse_bytes(DEFAULT_CPU_MEMORY)


def activation_estimate(dims: ModelDims, config: EngineConfig, width: int) -> int:
    """Return an estimate of the bytes of temporaries that the largest step needs on a device.

    The temporaries are hidden states, intermediate results and f32 logits. The estimate should be too high rather than
    too low. If compiled programs need more, a warm-up reserves the difference. `width` is the maximum number of
    sequences of the largest instance, divided by `max_num_seqs`.
    """
    rows = config.max_num_seqs * width
    tokens = config.max_num_batched_tokens + rows
    heads, model = dims.heads, dims.config
    per_token = 6 * model.hidden_size + dims.ffn_intermediates
    per_token += 6 * heads.kv_heads * (heads.group + 2) * model.head_dim
    # Attention scores and weights of one block of keys, in f32, with masks.
    per_token += 4 * heads.kv_heads * heads.group * 128
    logits = 8 * rows * dims.vocab_shard * dims.max_tp
    return 4 * (tokens * per_token + dims.ffn_copy + logits)


def widened_weight_bytes(dims: ModelDims, config: EngineConfig, weight_bytes: int, platform: str) -> int:
    """Return the bytes that XLA on CPU needs to copy the 16-bit weights of the largest program to f32.

    The largest program is the head, or a segment of `segment_layers` layers. The result is 0 for f32 weights, and on
    other platforms.
    """
    itemsize = jnp.dtype(dims.dtype).itemsize
    if platform != "cpu" or itemsize == 4:
        return 0
    head = dims.vocab_shard * dims.max_tp * dims.config.hidden_size
    layers = min(config.segment_layers or MOST_CPU_SEGMENT_LAYERS, dims.config.num_layers)
    return 4 * max(head, weight_bytes // itemsize * layers // dims.config.num_layers)


def sampling_bytes(dims: ModelDims, config: EngineConfig, width: int) -> int:
    """Return the bytes of the sampling state on a device: last tokens (i32), flags (i32) and biases (f32).

    The first device of an instance samples for the whole instance. The state therefore has room for all sequences of
    the largest instance. `width` is the maximum number of these sequences, divided by `max_num_seqs`.
    """
    return config.max_num_seqs * width * (4 + 8 * dims.config.vocab_size)


def hidden_bytes(dims: ModelDims, config: EngineConfig, width: int) -> int:
    """Return the bytes of the buffer of hidden states on a device, and of small inputs of the step programs.

    The small inputs are the arguments `first`, `loads` and `layer` of `StepProgram`. `width` is the maximum number of
    sequences of the largest instance, divided by `max_num_seqs`.
    """
    hidden = dims.config.hidden_size * hidden_tokens(config, width) * jnp.dtype(dims.dtype).itemsize
    return hidden + 2 + 4 * (math.prod(dims.load_shape) + dims.load_shape[0])


def staging_bytes(page_bytes: int, phase_pages: int) -> int:
    """Return the bytes of temporaries for one phase of an exchange of pages.

    A phase of `phase_pages` pages needs memory for three times this number of pages (`page_bytes` each): to send, to
    receive and to copy. It also needs memory for page ids.
    """
    return phase_pages * (3 * page_bytes + STAGING_IDS)


class FixedBytes(NamedTuple):
    """Bytes that a device needs for temporaries of steps, for sampling state and for hidden states.

    Weights and KV cache are not included. These sizes do not depend on the layers of the device.
    """

    activations: int
    sampling: int
    hidden: int

    @property
    def total(self) -> int:
        return self.activations + self.sampling + self.hidden


def fixed_bytes(dims: ModelDims, config: EngineConfig, width: int, weight_bytes: int, platform: str) -> FixedBytes:
    """Return the bytes that a device needs in addition to weights and KV cache.

    Args:
        dims: sizes of the model.
        config: settings of the engine.
        width: maximum number of running sequences of the largest instance, divided by `max_num_seqs`
            (`EnginePlan.width`).
        weight_bytes: bytes of the whole model.
        platform: platform of the devices. In a dry run, it may differ from the platform of this process.
    """
    return FixedBytes(
        activation_estimate(dims, config, width) + widened_weight_bytes(dims, config, weight_bytes, platform),
        sampling_bytes(dims, config, width),
        hidden_bytes(dims, config, width),
    )


def divide_memory(
    dims: ModelDims,
    budget_bytes: int,
    weight_bytes: int,
    fixed: FixedBytes,
    num_layers: int,
    kv_cache_tokens: int | None,
    *,
    exchanges: bool = False,
    phase_pages: int | None = None,
) -> MemoryPlan:
    """Divide the memory of one device. The KV cache gets all memory that nothing else needs.

    Args:
        dims: sizes of the model.
        budget_bytes: memory of the device.
        weight_bytes: bytes of the weights on the device.
        fixed: bytes of temporaries of steps, of the sampling state and of hidden states.
        num_layers: number of layers whose KV cache the device holds.
        kv_cache_tokens: size of the KV cache, in tokens. None: as large as possible.
        exchanges: whether the device exchanges pages with other devices while instances merge or split.
        phase_pages: number of pages that the device sends in one phase of an exchange (`kvcache.migration`). None: from
            2 to 16 pages, more if the device has more memory for KV cache. Ignored if `exchanges` is False.

    Raises `DeviceTooSmallError` if the budget is too small for weights, temporaries and one page of each layer. Raises
    `MemoryBudgetError` if the KV cache would hold fewer than `kv_cache_tokens` tokens.
    """
    fixed_and_weights = weight_bytes + fixed.total
    page_bytes = dims.pages.page_elems * jnp.dtype(dims.dtype).itemsize
    all_layers = page_bytes * num_layers
    phases = staging = 0
    if exchanges:
        left = budget_bytes - fixed_and_weights
        few = left // STAGING_SHARE // (3 * page_bytes)
        phases = phase_pages or max(2, min(DEFAULT_PHASE_PAGES, few))
        staging = staging_bytes(page_bytes, phases)
    free = budget_bytes - fixed_and_weights - staging
    if free < all_layers:
        need = fixed_and_weights + staging + all_layers
        raise DeviceTooSmallError(
            f"device_memory of {format_bytes(budget_bytes)} is too small: {dims.dtype} weights need "
            f"{format_bytes(weight_bytes)}, temporaries {format_bytes(fixed.activations)}, sampling "
            f"{format_bytes(fixed.sampling)}, hidden states {format_bytes(fixed.hidden)}, "
            f"staging {format_bytes(staging)} and one KV page of all layers "
            f"{format_bytes(all_layers)}: at least "
            f"{format_bytes(need)} ({need} bytes) per device",
            budget_bytes,
            need,
        )
    num_pages = free // all_layers if num_layers else 0
    if kv_cache_tokens is not None and num_layers:
        wanted = dims.pages.pages_for(kv_cache_tokens)
        if wanted > num_pages:
            raise MemoryBudgetError(
                f"kv_cache_tokens={kv_cache_tokens} exceeds the {num_pages * dims.page_size} tokens that fit in "
                f"device_memory of {format_bytes(budget_bytes)}"
            )
        num_pages = wanted
    return MemoryPlan(
        budget_bytes,
        weight_bytes,
        fixed.activations,
        fixed.sampling,
        fixed.hidden,
        staging,
        phases,
        page_bytes,
        num_pages,
    )


def plan_memory(
    dims: ModelDims, config: EngineConfig, weight_bytes: int, device: jax.Device, platform: str
) -> MemoryPlan:
    """Divide the memory of a device that holds all layers. Raises the errors of `divide_memory`.

    Args:
        dims: sizes of the model.
        config: settings of the engine.
        weight_bytes: bytes of the whole model.
        device: device whose memory is divided.
        platform: platform for which programs are compiled. In a dry run, it may differ from the platform of `device`.
    """
    return divide_memory(
        dims,
        device_budget(config, device),
        weight_bytes,
        fixed_bytes(dims, config, config.max_tp, weight_bytes, platform),
        dims.config.num_layers,
        config.kv_cache_tokens,
        exchanges=config.max_tp > 1,
        phase_pages=config.phase_pages,
    )
