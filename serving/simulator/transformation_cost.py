"""Cost models of merges and splits: how many seconds they take, and how many bytes move.

Layers switch to the new tensor-parallel degree one after the other. The KV pages of a layer move between devices in
pieces. A piece is the part of a page that one device of the higher degree stores. A phase is one exchange of a bounded
number of pieces.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from kvcache.allocator import BuddyAllocator
from kvcache.geometry import PageGeometry
from kvcache.migration import plan_phases
from kvcache.relayout import moves, place_up
from serving.simulator.device_spec import DeviceSpec
from serving.simulator.model_shape import ModelShape

PHASE_PAGES = 16
"""Pages that a device sends in a phase: the engine's default (`EngineConfig.phase_pages`)."""
PHASES_AT_ONCE = 3
"""Phases that one program of the engine runs on a GPU (`kvcache.exchange`)."""
COPY_SHARE = 0.6
"""Share of the memory bandwidth that gathers and scatters of pieces reach. Measured on an H100: 2.0 and 2.2 of 3.35
TB/s (docs/kernels.md)."""
PLANNED_DEGREE = 4
"""Highest degree for which the engine can plan moves."""
_LARGEST_PLAN = 512
"""Maximum number of pages to plan. For more pages, the counts are scaled in proportion."""


class MoveCount(NamedTuple):
    """Amount of page pieces that move in a merge or split, and number of phases, according to the engine's planner."""

    share: float
    """Largest share of a device's pieces that the device sends to other devices."""
    phases_per_page: float
    """Number of phases for one layer, divided by the pages of one instance of the lower degree."""


class Change(NamedTuple):
    """Cost of one merge or split."""

    layer_s: float
    """Seconds to switch one layer. No step runs meanwhile."""
    pause_s: float
    """Seconds without steps before the first layer switches."""
    kv_bytes: float
    """Bytes of keys and values that the devices send, in total."""
    weight_bytes: float
    """Bytes of weights that the devices send or load, in total."""

    def seconds(self, layers: int) -> float:
        """Return the seconds of the merge or split for `layers` layers, without the steps between the switches."""
        return self.pause_s + layers * self.layer_s


class TransformationCost(Protocol):
    """Cost model of merges and splits."""

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        ...

    def change(self, from_degree: int, to_degree: int, tokens: int, kept: bool = False) -> Change:
        """Return the cost of one merge or split, which affects `max(from_degree, to_degree)` devices.

        Args:
            from_degree: tensor-parallel degree before the change.
            to_degree: tensor-parallel degree after the change.
            tokens: total number of tokens in the KV cache of the affected devices.
            kept: whether all devices keep the weights of the lower degree while they are merged. If so, a split copies
                no weights.
        """
        ...


@lru_cache(maxsize=64)
def count_moves(lower: int, higher: int, pages_each: int, phase_pages: int = PHASE_PAGES) -> MoveCount:
    """Count the page pieces that move, and the phases, if instances of degree `lower` merge to degree `higher`.

    A split back to `lower` has the same counts. Each of the `higher / lower` instances has `pages_each` pages. A device
    sends at most `phase_pages` pages in one phase. The counts come from the engine's planner (`kvcache.relayout`,
    `kvcache.migration`).
    """
    geometry = PageGeometry(kv_heads=higher, page_size=16, head_dim=2, max_tp=higher)
    instances = higher // lower
    tables = [np.tile(np.arange(pages_each, dtype=np.int32), (lower, 1)) for _ in range(instances)]
    allocators = []
    for _ in range(higher):
        allocator = BuddyAllocator(higher)
        allocator.add_extent(pages_each * 2)
        allocators.append(allocator)
    references = [np.ones(pages_each, np.int64)] * instances
    source, target = moves(tables, place_up(tables, references, geometry, allocators))
    phases = plan_phases(source, target, higher, phase_pages)
    crossing = source[:, 0] != target[:, 0]
    sent = np.bincount(source[crossing, 0], minlength=higher).max(initial=0)
    pieces_each = pages_each * higher // lower
    return MoveCount(float(sent) / pieces_each, len(phases) / pages_each)


@dataclass(frozen=True)
class InPlaceCost:
    """Cost of merges and splits in this project's engine, with the variant `in_place_overlapped`.

    KV pages move between devices in phases. In each phase, a device gathers pieces, exchanges them with another device,
    and scatters the received pieces. A merge turns the memory of weights on each device into KV cache without a copy. A
    split copies these weights back from other devices. See docs/transformation.md and AMOEBA, sections 3.1 and 3.2.
    """

    model: ModelShape
    device: DeviceSpec
    launches_per_layer: int = 4
    """Launches of programs to switch one layer, besides the programs of the exchange."""
    page_size: int = 16
    phase_pages: int = PHASE_PAGES
    """Pages that a device sends in a phase."""

    @property
    def layers(self) -> int:
        return self.model.num_layers

    def change(self, from_degree: int, to_degree: int, tokens: int, kept: bool = False) -> Change:
        """Return the cost of a merge or split. Arguments are as in `TransformationCost.change`."""
        lower, higher = sorted((from_degree, to_degree))
        instances = higher // lower
        pages_each = -(-tokens // self.page_size // instances)
        share, phases = 0.0, 0.0
        if pages_each:
            several = max(higher // PLANNED_DEGREE, 1)  # So many devices count as one.
            counted = max(lower // several, 1), higher // several
            planned = min(_two_digits(pages_each), max(_LARGEST_PLAN, 4 * self.phase_pages))
            count = count_moves(*counted, planned, self.phase_pages)
            share, phases = count.share, count.phases_per_page * pages_each
        kv_device = self.model.kv_token_bytes(lower) * pages_each * self.page_size * share
        weights_device = 0.0
        if to_degree < from_degree and not kept:
            weights_device = self.model.ffn_bytes * (1 / to_degree - 1 / from_degree)
        device = self.device
        rate = device.link_bandwidth * device.link_efficiency
        launches = self.launches_per_layer + phases / PHASES_AT_ONCE
        transfer_s = (kv_device + weights_device) / rate / self.layers
        # A gather and a scatter, each with its operator: both read and write the pieces.
        copies_s = 4 * kv_device / (device.memory_bandwidth * COPY_SHARE) / self.layers
        phase_s = 2 * device.kernel_s + device.all_reduce_s(0.0, 2)
        layer_s = transfer_s + copies_s + phases * phase_s + launches * device.launch_s
        return Change(layer_s, 0.0, kv_device * higher, weights_device * higher)


@dataclass(frozen=True)
class FixedTransformation:
    """Cost of merges and splits that always take the same time, and send no bytes."""

    total_s: float = 1.0
    layers: int = 10

    def change(self, from_degree: int, to_degree: int, tokens: int, kept: bool = False) -> Change:
        return Change(self.total_s / self.layers, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class MeasuredTransformation:
    """Cost of merges and splits, from times measured on an engine.

    Attributes:
        layers: number of layers.
        up_layer_s: seconds to switch one layer in a merge.
        down_layer_s: seconds to switch one layer in a split.
        page_layer_s: additional seconds for each page in use, in each layer.
        page_size: tokens of a page.
    """

    layers: int
    up_layer_s: float
    down_layer_s: float
    page_layer_s: float = 0.0
    page_size: int = 16

    def change(self, from_degree: int, to_degree: int, tokens: int, kept: bool = False) -> Change:
        """Return the cost of a merge or split. Arguments are as in `TransformationCost.change`."""
        base = self.up_layer_s if to_degree > from_degree else self.down_layer_s
        return Change(base + self.page_layer_s * -(-tokens // self.page_size), 0.0, 0.0, 0.0)


def _two_digits(number: int) -> int:
    """Round up to two significant digits, so that a result of `count_moves` is more often in its cache."""
    scale = 10 ** max(len(str(number)) - 2, 0)
    return -(-number // scale) * scale
