"""Start placement of an engine, and division of the memory of its devices."""

import json
from collections.abc import Mapping
from pathlib import Path

from amoeba_jax.config import EngineConfig
from amoeba_jax.errors import ConfigError, MemoryBudgetError
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.memory import DeviceTooSmallError, FixedBytes, MemoryPlan, divide_memory
from amoeba_jax.weights.layout import WeightLayout
from sharding.ledger import format_bytes
from sharding.placement import Home, Placement

_MAX_FILE_CHARS = 1 << 20


def read_placement(config: EngineConfig, dims: ModelDims) -> Placement | None:
    """Return the placement in `config.placement`, which is JSON or the name of a JSON file.

    If `config.placement` is `auto` or None, return None. Raises `ConfigError` if the file cannot be read or the text is
    not JSON, and `LayoutError` if the placement is not possible.
    """
    text = config.placement
    if text is None or text == "auto":
        return None
    what = "placement"
    if not text.lstrip().startswith("{"):
        what, text = f"placement={text!r}", _read_file(text)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is not valid JSON: {error}") from None
    return Placement.from_data(data, dims.config.num_layers, config.num_devices, config.max_tp)


def _read_file(name: str) -> str:
    if not name.strip():
        raise ConfigError("placement is empty: give auto, JSON, or the name of a JSON file")
    try:
        with Path(name).open(encoding="utf-8") as file:
            text = file.read(_MAX_FILE_CHARS + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"placement={name!r} is neither auto nor JSON, and the file cannot be read: {error}"
        ) from None
    if len(text) > _MAX_FILE_CHARS:
        raise ConfigError(f"placement={name!r}: the file has more than {_MAX_FILE_CHARS} characters")
    return text


def plan_devices(
    weights: WeightLayout, placement: Placement, budget_bytes: int, fixed: FixedBytes, kv_cache_tokens: int | None
) -> dict[int, MemoryPlan]:
    """Divide the memory of each device of a placement. Return a `MemoryPlan` for each device index.

    All layers on a device get the same number of pages. Raises `DeviceTooSmallError` if a device is too small for its
    weights, its temporaries and one page of each layer.
    """
    dims = weights.dims
    plans = {}
    for device, shards in weights.shards_at(placement).items():
        weight_bytes = sum(
            weights.specs[name].num_elements // weights.specs[name].num_shards * len(indices) * weights.itemsize
            for name, indices in shards.items()
        )
        # A layer counts once, also if several microbatches use the device.
        layers = sum(any(device in home.devices for home in homes) for homes in placement.attention)
        here = fixed if device == placement.head.start else fixed._replace(sampling=0)
        try:
            plans[device] = divide_memory(dims, budget_bytes, weight_bytes, here, layers, kv_cache_tokens)
        except DeviceTooSmallError as error:
            message = f"device {device} of the placement: {error}"
            raise DeviceTooSmallError(message, error.budget_bytes, error.needed_bytes) from None
    return plans


def home_pages(placement: Placement, plans: Mapping[int, MemoryPlan]) -> dict[Home, int]:
    """Return the number of KV pages for one layer on each device of a home, by home.

    Only homes (groups of devices) that compute attention are included. If the devices of a home have different numbers
    of pages, the smallest number is returned. `plans` has the memory plan of each device, by device index.
    """
    homes = {home for homes in placement.attention for home in homes}
    return {home: min(plans[device].num_pages for device in home.devices) for home in homes}


def placement_capacity(placement: Placement, pages: Mapping[Home, int], page_size: int) -> int:
    """Return the length, in tokens, of the longest sequence that fits in an empty instance.

    A sequence belongs to one microbatch. Each home (group of devices) that computes attention for this microbatch needs
    memory for the KV cache of the sequence. If the microbatches have different capacities, the largest capacity is
    returned. `pages` is the result of `home_pages`.
    """
    return max(
        min(pages[home] * home.degree for home in placement.layers_by_home(number)) * page_size
        for number in range(placement.num_microbatches)
    )


def placement_width(placement: Placement) -> int:
    """Return the maximum number of running sequences at a placement, divided by `max_num_seqs`.

    This is the number of microbatches, multiplied by the smallest degree of a home that computes attention.
    """
    degree = min(home.degree for homes in placement.attention for home in homes)
    return placement.num_microbatches * degree


def auto_placement(config: EngineConfig, weights: WeightLayout, budget_bytes: int, fixed: FixedBytes) -> Placement:
    """Return the placement for the setting `auto`: the layers in order, on as few devices as possible.

    The first devices of the pool are used. Each of them has consecutive layers. The first device also has the embedding
    and the head.

    The devices must hold the model and the KV cache of one sequence. This sequence has `max_num_batched_tokens` tokens,
    or as many tokens as the model's context if that is less. The layers are distributed so that the device with the
    fewest pages has as many pages as possible.

    Raises `MemoryBudgetError` if all devices together are too small.
    """
    dims = weights.dims
    num_layers, wanted = dims.config.num_layers, min(config.max_num_batched_tokens, dims.config.max_position)
    for num_devices in range(1, min(config.num_devices, num_layers) + 1):
        placement = _spread(weights, num_devices, budget_bytes, fixed)
        try:
            plans = plan_devices(weights, placement, budget_bytes, fixed, None)
        except DeviceTooSmallError:
            continue
        if placement_capacity(placement, home_pages(placement, plans), dims.page_size) >= wanted:
            return placement
    raise MemoryBudgetError(
        f"{config.num_devices} devices with {format_bytes(budget_bytes)} each do not hold the model "
        f"({format_bytes(weights.num_bytes)} of weights) and the KV cache of {wanted} tokens: "
        "use more devices or a larger device_memory"
    )


def _spread(weights: WeightLayout, num_devices: int, budget_bytes: int, fixed: FixedBytes) -> Placement:
    """Return a placement on the first `num_devices` devices. Devices with more free memory get more layers."""
    num_layers, size = weights.dims.config.num_layers, weights.itemsize
    of_layer = [0] * num_layers
    ends = 0
    for spec in weights.specs.values():
        if spec.layer is None:
            ends += spec.num_elements * size
        else:
            of_layer[spec.layer] += spec.num_elements * size
    # All layers have the same size. A layer goes to the device that then has most room for the pages of each layer.
    layer_bytes = max(of_layer)
    free = [budget_bytes - fixed.total - (ends if device == 0 else -fixed.sampling) for device in range(num_devices)]
    counts = [0] * num_devices
    for _ in range(num_layers):
        room = [(free[d] - (counts[d] + 1) * layer_bytes) / (counts[d] + 1) for d in range(num_devices)]
        # Every device gets a layer before any has room to spare.
        best = max(range(num_devices), key=lambda d: (counts[d] == 0, room[d], -d))
        counts[best] += 1
    homes = tuple((Home(device, 1),) for device, count in enumerate(counts) for _ in range(count))
    return Placement(Home(0, 1), homes, homes)
