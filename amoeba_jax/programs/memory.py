"""How a device's memory is divided between weights, KV cache and temporaries."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from amoeba_jax.config import EngineConfig
from amoeba_jax.errors import MemoryBudgetError
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.buckets import hidden_tokens
from sharding.ledger import format_bytes, parse_bytes

DEFAULT_CPU_MEMORY = "2GiB"
# On CPU twice as many save a tenth of the time, as what is sent and received is no longer in a core's cache.
DEFAULT_PHASE_PAGES = 16
# Staging takes no more than this part of what is left for the KV cache, where the number of pages is not given.
STAGING_SHARE = 32
# Programs that run while requests are served. Those that change layouts have staging.
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
# Ids and masks of the pieces in an exchange, for each page of a phase.
STAGING_IDS = 1 << 10


@dataclass(frozen=True)
class MemoryPlan:
    """Budget of one device in bytes, and what it is to hold."""

    budget_bytes: int
    weight_bytes: int
    activation_bytes: int
    sampling_bytes: int
    hidden_bytes: int
    """Hidden states of the largest step, which the programs of a step hand on."""
    staging_bytes: int
    """Pages in flight between devices while instances merge or split."""
    phase_pages: int
    """Pages that two devices exchange at once."""
    page_bytes: int
    """One page of one layer."""
    num_pages: int
    """Pages of each layer's KV extent."""


class DeviceTooSmallError(MemoryBudgetError):
    """A device has no room for a single page beside what must be there: `needed_bytes` would be enough."""

    def __init__(self, message: str, budget_bytes: int, needed_bytes: int):
        super().__init__(message)
        self.budget_bytes, self.needed_bytes = budget_bytes, needed_bytes


def device_budget(config: EngineConfig, device: jax.Device) -> int:
    """Bytes that the engine may use on a device."""
    if config.device_memory is not None:
        return parse_bytes(config.device_memory)
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * config.memory_utilization)
    return parse_bytes(DEFAULT_CPU_MEMORY)


def activation_estimate(dims: ModelDims, config: EngineConfig) -> int:
    """Upper estimate of a step's temporaries: hidden states, the widest layer intermediates, f32 logits.

    A warm-up puts in its place what the programs take in fact, where that is more.
    """
    rows = config.max_num_seqs * config.max_tp
    tokens = config.max_num_batched_tokens + rows
    heads, model = dims.heads, dims.config
    per_token = 6 * model.hidden_size + 3 * 2 * dims.ffn_shard * dims.max_tp
    per_token += 6 * heads.kv_heads * (heads.group + 2) * model.head_dim
    # Scores and weights of one block of keys, f32, with their masks.
    per_token += 4 * heads.kv_heads * heads.group * 128
    logits = 8 * rows * dims.vocab_shard * dims.max_tp
    return 4 * (tokens * per_token + logits)


def sampling_bytes(dims: ModelDims, config: EngineConfig) -> int:
    """What a device keeps for the sampling of its sequences: last tokens (i32), flags (i32) and biases (f32).

    There is room for the sequences of all devices of the largest instance: its first device samples for all.
    """
    return config.max_num_seqs * config.max_tp * (4 + 8 * dims.config.vocab_size)


def has_spare_hidden(config: EngineConfig) -> bool:
    """Whether a device has a second buffer of hidden states: for an instance in the place of paused ones, which keep
    theirs, with a step that they have begun."""
    return config.prepare_pausing and config.max_tp > 1


def hidden_bytes(dims: ModelDims, config: EngineConfig) -> int:
    """A device's buffers of hidden states, and the two flags by which programs are told whether they begin a step."""
    buffer = dims.config.hidden_size * hidden_tokens(config) * jnp.dtype(dims.dtype).itemsize
    return (2 if has_spare_hidden(config) else 1) * buffer + 2


def staging_bytes(page_bytes: int, phase_pages: int) -> int:
    """Temporaries of an exchange of pages: those a rank sends and those it receives, which may be copied once."""
    return phase_pages * (3 * page_bytes + STAGING_IDS)


def plan_memory(dims: ModelDims, config: EngineConfig, weight_bytes: int, device: jax.Device) -> MemoryPlan:
    """Give weights and temporaries what they need and the KV cache the rest.

    Raises `DeviceTooSmallError` if the weights do not fit or nothing is left for a single page, saying how much is
    needed, and `MemoryBudgetError` if there is no room for `kv_cache_tokens`.
    """
    budget = device_budget(config, device)
    activations, sampling = activation_estimate(dims, config), sampling_bytes(dims, config)
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
                f"kv_cache_tokens={config.kv_cache_tokens} is more than the {num_pages * dims.page_size} tokens that "
                f"device_memory of {format_bytes(budget)} has room for"
            )
        num_pages = wanted
    return MemoryPlan(budget, weight_bytes, activations, sampling, hidden, staging, phase_pages, page_bytes, num_pages)
