"""Sizes of an engine before it has buffers: device groups, memory, segments and step shapes."""

from collections.abc import Iterator
from functools import cached_property

import jax

from amoeba_jax.config import EngineConfig
from amoeba_jax.errors import ConfigError, MemoryBudgetError
from amoeba_jax.models.decoder import SegmentPlan, head_plan, plan_segments
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.buckets import Buckets, hidden_tokens
from amoeba_jax.programs.memory import (
    MOST_CPU_SEGMENT_LAYERS,
    FixedBytes,
    MemoryPlan,
    device_budget,
    fixed_bytes,
    plan_memory,
)
from amoeba_jax.programs.program_specs import ProgramSpec, ProgramSpecs
from amoeba_jax.programs.segments import SegmentCutter
from amoeba_jax.programs.start_placement import (
    auto_placement,
    home_pages,
    placement_capacity,
    placement_width,
    plan_devices,
    read_placement,
)
from amoeba_jax.programs.step_program import HeadKey, LogitsOf, PageExchange, StepKey
from amoeba_jax.weights.layout import WeightLayout
from sharding.mesh import SubMesh, SubMeshPool
from sharding.placement import Placement

EXTRA_SHARES = (0.25, 1, 4)
"""Possible sizes of an extra KV extent, relative to the first extent of a layer.

If layers migrate away from a device, the layers that stay get an extra extent (`transform/extra_extents.py`). Few
sizes need few programs.
"""


class EnginePlan:
    """Sizes on which the programs of an engine depend. The engine and `enumerate_programs` use the same plan.

    Args:
        config: settings of the engine.
        dims: sizes of the model.
        devices: devices of the engine.
        weights: sizes of the weights. The weights need not be loaded.
        memory: division of the memory of a device. None: computed by `plan_memory`, or from the start placement.
        platform: platform for which memory is divided. None: the platform of `devices`.

    Attributes:
        placement: start placement (`EngineConfig.placement`) of the only instance. None: instances merge and split.
        start_tp: degree of the instances at the start.
        start_attention: degree of attention at the start. It is `start_tp`, or less with data-parallel attention.
        start_devices: devices that hold modules at the start. The other devices are empty.
        segments: runs of consecutive layers that cover the model. Each segment is compiled as one program.
        cutter: object that cuts runs of layers of a placement into segments.
        head: segment of the final norm and the output head.
        hidden_tokens: number of tokens in a buffer of hidden states.
        num_slots: number of slots of an instance. A slot keeps the last token of one running sequence on the devices.
        max_model_len: limit of prompt plus output, in tokens.
        overlaps_exchanges: whether step programs may also exchange pages (`EngineConfig.overlap_exchange`).
        loops_exchanges: whether one program with a loop runs the phases of an exchange (`ExchangeKind`).

    Raises `ConfigError` if `max_model_len` exceeds the context length of the model, and `MemoryBudgetError` if the
    model does not fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        dims: ModelDims,
        devices: tuple[jax.Device, ...],
        weights: WeightLayout,
        memory: MemoryPlan | None = None,
        platform: str | None = None,
    ):
        if config.max_model_len is not None and config.max_model_len > dims.config.longest_context:
            raise ConfigError(
                f"max_model_len={config.max_model_len} is above the model's context of {dims.config.longest_context} "
                f"tokens (max_position_embeddings={dims.config.max_position} of its config.json)"
            )
        self.config, self.dims, self.weights = config, dims, weights
        self.sub_meshes = SubMeshPool(devices, config.max_tp)
        self._platform = platform or devices[0].platform
        self.placement = self._start_placement(devices[0])
        self.start_devices = tuple(range(len(devices))) if self.placement is None else self.placement.devices
        self.start_tp = self.start_attention = config.tensor_parallel_size
        if (start := self.placement) is not None and start.home is not None and start.home.degree == 1:
            self.placement = None  # an instance as any other; the other devices are empty
        elif start is not None and start.attention_degree is not None and self._can_change(devices[0]):
            self.start_tp, self.start_attention = start.head.degree, start.attention_degree
            self.placement = None
        self.memory = memory or self._plan_memory(devices[0])
        self.segments = plan_segments(
            dims, config.segment_layers or segment_layers(devices[0].platform, dims.config.num_layers)
        )
        self.cutter = SegmentCutter(dims, self.segments)
        self.head = head_plan(dims)
        wanted = config.overlap_exchange
        self.overlaps_exchanges = devices[0].platform == "gpu" if wanted is None else wanted
        self.loops_exchanges = devices[0].platform == "cpu"
        self.hidden_tokens = hidden_tokens(config, self.width)
        self._buckets: dict[int, Buckets] = {}
        self.num_slots = config.max_num_seqs * self.width
        self.max_model_len = min(config.max_model_len or dims.config.max_position, self._longest_context())

    def _start_placement(self, device: jax.Device) -> Placement | None:
        if self.config.placement == "auto":
            budget, fixed = device_budget(self.config, device), self._fixed_bytes(self.config.max_tp)
            return auto_placement(self.config, self.weights, budget, fixed)
        return read_placement(self.config, self.dims)

    def _can_change(self, device: jax.Device) -> bool:
        """Return whether an engine that starts with data-parallel attention can later merge and split its instances.

        For this, each device must have the memory to hold all weights.
        """
        if self.dims.transform_attention:
            return False
        try:
            plan_memory(self.dims, self.config, self.weights.num_bytes, device, self._platform)
        except MemoryBudgetError:
            return False
        return True

    def _plan_memory(self, device: jax.Device) -> MemoryPlan:
        if self.placement is None:
            return plan_memory(self.dims, self.config, self.weights.num_bytes, device, self._platform)
        return self.device_plans[self.placement.head.start]

    @cached_property
    def device_plans(self) -> dict[int, MemoryPlan]:
        """Division of memory, by device index.

        With a start placement (`EngineConfig.placement`), only the devices of the placement are included. Without it,
        all devices are included.
        """
        devices = self.sub_meshes.devices
        if self.placement is None:
            return dict.fromkeys(range(len(devices)), self.memory)
        budget, fixed = device_budget(self.config, devices[0]), self._fixed_bytes(self.width)
        return plan_devices(self.weights, self.placement, budget, fixed, self.config.kv_cache_tokens)

    def start_shards(self) -> dict[int, dict[str, tuple[int, ...]]]:
        """Return the indices of the shards that each device holds at the start, as `{device: {parameter: indices}}`."""
        if self.placement is not None:
            return self.weights.shards_at(self.placement)
        whole = {name: tuple(range(spec.num_shards)) for name, spec in self.weights.specs.items()}
        return dict.fromkeys(self.start_devices, whole)

    def _fixed_bytes(self, width: int) -> FixedBytes:
        return fixed_bytes(self.dims, self.config, width, self.weights.num_bytes, self._platform)

    def _longest_context(self) -> int:
        if self.placement is None:
            return max(self.capacity_tokens(tp, tp) for tp in self.sub_meshes.degrees())
        pages = home_pages(self.placement, self.device_plans)
        return placement_capacity(self.placement, pages, self.dims.page_size)

    @property
    def width(self) -> int:
        """Maximum number of running sequences of the largest instance, divided by `max_num_seqs`.

        Without a start placement, this is `max_tp`. With a start placement, it is the greater of `max_tp` and
        `placement_width`.
        """
        width = 1 if self.placement is None else placement_width(self.placement)
        return max(self.config.max_tp, width)

    @property
    def transfer_pages(self) -> int:
        """Maximum number of pages that one program moves to another device when a placement changes."""
        return self.memory.phase_pages or 8

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees that instances can have. With a start placement, the degree of its head is the only one."""
        return self.sub_meshes.degrees() if self.placement is None else (self.placement.head.degree,)

    def buckets(self, width: int) -> Buckets:
        """Return the step shapes of an instance that runs up to `max_num_seqs * width` sequences."""
        if width not in self._buckets:
            config = self.config
            self._buckets[width] = Buckets(
                config.max_num_seqs * width,
                config.max_num_batched_tokens,
                self.dims.pages.pages_for(self.max_model_len),
                few_rows=Buckets(config.max_num_seqs, 1, 1).few_rows,
            )
        return self._buckets[width]

    def most_rows(self, tp: int) -> int:
        """Return the maximum number of sequences that an instance of degree `tp` decodes in a step."""
        return self.buckets(tp).max_num_seqs

    def extent_pages(self, released: int) -> tuple[int, ...]:
        """Return the number of pages of each KV extent (page buffer) of a layer.

        The first extent is always KV cache. Each further extent is the buffer of a weight shard that an instance of
        degree `released` does not need.
        """
        return (self.memory.num_pages, *self.weights.extent_pages(released))

    def capacity_tokens(self, tp: int, released: int) -> int:
        """Return the number of tokens that fit in an empty instance of degree `tp` with `extent_pages(released)`.

        With a start placement, return the maximum length of one sequence instead.
        """
        if self.placement is not None:
            return self._longest_context()
        return sum(self.extent_pages(released)) * tp * self.dims.page_size

    # Programs

    def layers_spec(
        self,
        specs: ProgramSpecs,
        group: SubMesh,
        segment: SegmentPlan,
        shape: BatchShape,
        extent_pages: tuple[int, ...],
        exchange: PageExchange | None = None,
    ) -> ProgramSpec:
        """Return the spec of the program that computes a segment in a step.

        Args:
            specs: factory of specs.
            group: devices that run the program.
            segment: segment to compute. It must not be the head.
            shape: shape of the step.
            extent_pages: number of pages of each extent of a layer.
            exchange: page exchange that the program also runs, for layers outside the segment. None: no exchange.
        """
        sizes = self.num_slots, self.hidden_tokens
        key = StepKey(
            group.device_indices, segment.kinds, shape, extent_pages, *sizes, exchange, segment.module, segment.embeds
        )
        return specs.step(key, segment, group)

    def head_spec(
        self, specs: ProgramSpecs, group: SubMesh, shape: BatchShape, logits_of: LogitsOf = "last"
    ) -> ProgramSpec:
        """Return the spec of the program that computes the head in a step.

        `logits_of` is "last" for the logits of the last token of each row, or "all" for the logits of all tokens.
        """
        tokens = shape.num_tokens if logits_of == "all" else 0
        key = HeadKey(group.device_indices, shape.num_rows, tokens, self.num_slots, self.hidden_tokens)
        return specs.head(key, group)

    def step_specs(
        self,
        specs: ProgramSpecs,
        group: SubMesh,
        shape: BatchShape,
        extent_pages: tuple[int, ...],
        logits_of: LogitsOf = "last",
    ) -> Iterator[ProgramSpec]:
        """Yield the specs of all programs of a step on one group: programs of segments, then the program of the head.

        A program that several segments share is yielded only once.
        """
        for segment in {segment.kinds: segment for segment in self.segments}.values():
            yield self.layers_spec(specs, group, segment, shape, extent_pages)
        yield self.head_spec(specs, group, shape, logits_of)


def segment_layers(platform: str, num_layers: int) -> int:
    """Return the default number of layers in a segment: 4 or 5 on CPU, and 8 on other platforms.

    Longer segments need fewer launches. A launch on CPU costs about 0.2 ms: decode steps of SmolLM2 with one sequence
    take 2% to 6% longer with segments of 3 layers than with segments of 5. Shorter segments need less host memory and
    fewer memory mappings.

    On CPU, a model of 5 layers gets 4, and thus two segments. With one segment, all layers would change their degree at
    once.
    """
    if platform != "cpu":
        return 8
    most = MOST_CPU_SEGMENT_LAYERS
    return most if num_layers % most == 0 and num_layers > most else most - 1
