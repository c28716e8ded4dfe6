"""Division of a device's memory between weights, KV cache and temporaries."""

from dataclasses import dataclass

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
    """Budget of one device and its parts, in bytes."""

    budget_bytes: int
    weight_bytes: int
    activation_bytes: int
    sampling_bytes: int
    hidden_bytes: int
    """Buffer of hidden states, as wide as the largest step."""
    staging_bytes: int
    """Buffers for pages in flight between devices while instances merge or split."""
    phase_pages: int
    """Number of pages that two devices exchange at once."""
    page_bytes: int
    """Size of one page of one layer."""
    num_pages: int
    """Number of pages in each layer's KV extent."""


class DeviceTooSmallError(MemoryBudgetError):
    """A device whose budget leaves no room for a single KV page. `needed_bytes` would suffice."""

    def __init__(self, message: str, budget_bytes: int, needed_bytes: int):
        super().__init__(message)
        self.budget_bytes, self.needed_bytes = budget_bytes, needed_bytes


def device_budget(config: EngineConfig, device: jax.Device) -> int:
    """Return the bytes that the engine may use on a device."""
    if config.device_memory is not None:
        return parse_bytes(config.device_memory)
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * config.memory_utilization)
    return parse_bytes(DEFAULT_CPU_MEMORY)


def activation_estimate(dims: ModelDims, config: EngineConfig) -> int:
    """Return an upper estimate of a step's temporaries: hidden states, the widest intermediates and f32 logits.

    If the compiled programs need more, a warm-up reserves the difference.
    """
    rows = config.max_num_seqs * config.max_tp
    tokens = config.max_num_batched_tokens + rows
    heads, model = dims.heads, dims.config
    per_token = 6 * model.hidden_size + 3 * 2 * dims.ffn_shard * dims.max_tp
    per_token += 6 * heads.kv_heads * (heads.group + 2) * model.head_dim
    # Attention scores and weights of one block of keys, in f32, with masks.
    per_token += 4 * heads.kv_heads * heads.group * 128
    logits = 8 * rows * dims.vocab_shard * dims.max_tp
    return 4 * (tokens * per_token + logits)


def widened_weight_bytes(dims: ModelDims, config: EngineConfig, weight_bytes: int, platform: str) -> int:
    """Return the temporaries of a program that computes with weights of 16 bits on CPU: XLA makes f32 copies of them.

    The largest program has either the head or `segment_layers` layers.
    """
    itemsize = jnp.dtype(dims.dtype).itemsize
    if platform != "cpu" or itemsize == 4:
        return 0
    head = dims.vocab_shard * dims.max_tp * dims.config.hidden_size
    layers = min(config.segment_layers or MOST_CPU_SEGMENT_LAYERS, dims.config.num_layers)
    return 4 * max(head, weight_bytes // itemsize * layers // dims.config.num_layers)


def sampling_bytes(dims: ModelDims, config: EngineConfig) -> int:
    """Return the bytes of the sampling state on a device: last tokens (i32), flags (i32) and biases (f32).

    Each device has room for all sequences of the largest instance, because the first device samples for all.
    """
    return config.max_num_seqs * config.max_tp * (4 + 8 * dims.config.vocab_size)


def hidden_bytes(dims: ModelDims, config: EngineConfig) -> int:
    """Return the bytes of a device's hidden states, and of two flags that mark the first segment of a step."""
    return dims.config.hidden_size * hidden_tokens(config) * jnp.dtype(dims.dtype).itemsize + 2


def staging_bytes(page_bytes: int, phase_pages: int) -> int:
    """Return the bytes of the temporaries of an exchange: pages to send, received pages and one copy."""
    return phase_pages * (3 * page_bytes + STAGING_IDS)


def plan_memory(
    dims: ModelDims, config: EngineConfig, weight_bytes: int, device: jax.Device, platform: str
) -> MemoryPlan:
    """Divide the budget of a device: the KV cache gets everything that weights and temporaries leave.

    In a dry run `platform` may differ from the platform of `device`.

    Raises `DeviceTooSmallError` with the needed bytes if no page fits, and `MemoryBudgetError` if `kv_cache_tokens` do
    not fit.
    """
    budget = device_budget(config, device)
    activations = activation_estimate(dims, config) + widened_weight_bytes(dims, config, weight_bytes, platform)
    sampling = sampling_bytes(dims, config)
    hidden = hidden_bytes(dims, config)
    fixed = weight_bytes + activations + sampling + hidden
    page_bytes = dims.pages.page_elems * jnp.dtype(dims.dtype).itemsize
    all_layers = page_bytes * dims.config.num_layers
    phase_pages = staging = 0
    if config.max_tp > 1:
        left = budget - fixed
        few = left // STAGING_SHARE // (3 * page_bytes)
        phase_pages = config.phase_pages or max(2, min(DEFAULT_PHASE_PAGES, few))
        staging = staging_bytes(page_bytes, phase_pages)
    num_pages = (budget - fixed - staging) // all_layers
    if num_pages < 1:
        need = fixed + staging + all_layers
        raise DeviceTooSmallError(
            f"device_memory of {format_bytes(budget)} is too small: {dims.dtype} weights need "
            f"{format_bytes(weight_bytes)}, temporaries {format_bytes(activations)}, sampling "
            f"{format_bytes(sampling)}, hidden states {format_bytes(hidden)}, "
            f"staging {format_bytes(staging)} and one KV page of all layers "
            f"{format_bytes(all_layers)}: at least "
            f"{format_bytes(need)} ({need} bytes) per device",
            budget,
            need,
        )
    if config.kv_cache_tokens is not None:
        wanted = dims.pages.pages_for(config.kv_cache_tokens)
        if wanted > num_pages:
            raise MemoryBudgetError(
                f"kv_cache_tokens={config.kv_cache_tokens} exceeds the {num_pages * dims.page_size} tokens that fit in "
                f"device_memory of {format_bytes(budget)}"
            )
        num_pages = wanted
    return MemoryPlan(budget, weight_bytes, activations, sampling, hidden, staging, phase_pages, page_bytes, num_pages)
