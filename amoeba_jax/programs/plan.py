"""Sizes of an engine before it has buffers: device groups, memory, segments and step shapes."""

from collections.abc import Iterator
from functools import cached_property

import jax

from amoeba_jax.config import EngineConfig
from amoeba_jax.errors import ConfigError
from amoeba_jax.models.decoder import SegmentPlan, head_plan, plan_segments
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.buckets import Buckets, hidden_tokens
from amoeba_jax.programs.memory import MOST_CPU_SEGMENT_LAYERS, MemoryPlan, plan_memory
from amoeba_jax.programs.program_specs import ProgramSpec, ProgramSpecs
from amoeba_jax.programs.step_program import HeadKey, LogitsOf, PageExchange, StepKey
from amoeba_jax.weights.layout import WeightLayout
from sharding.mesh import SubMesh, SubMeshPool


class EnginePlan:
    """Sizes that the programs of an engine depend on. The engine and `enumerate_programs` use the same plan.

    Args:
        config: settings of the engine.
        dims: sizes of the model.
        devices: devices of the engine.
        weights: sizes of the weights, which need not be loaded.
        memory: division of a device's memory; by default the result of `plan_memory`, which may raise
            `MemoryBudgetError`.
        platform: platform that memory is divided for; by default the platform of `devices`.

    Attributes:
        segments: runs of layers, each compiled as one program.
        head: segment of the final norm and the output head.
        hidden_tokens: tokens that fit in a group's buffer of hidden states.
        num_slots: sequences whose last tokens an instance remembers.
        max_model_len: limit of prompt plus output, in tokens.
        overlaps_exchanges: whether layers switch inside step programs; see `EngineConfig.overlap_exchange`.
        loops_exchanges: whether one program runs all phases of an exchange of pages; see `ExchangeKind`.

    Raises `ConfigError` if `max_model_len` exceeds the context length of the model.
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
        self.memory = memory or plan_memory(
            dims, config, weights.num_bytes, devices[0], platform or devices[0].platform
        )
        self.segments = plan_segments(
            dims, config.segment_layers or segment_layers(devices[0].platform, dims.config.num_layers)
        )
        self.head = head_plan(dims)
        wanted = config.overlap_exchange
        self.overlaps_exchanges = devices[0].platform == "gpu" if wanted is None else wanted
        self.loops_exchanges = devices[0].platform == "cpu"
        self.hidden_tokens = hidden_tokens(config)
        self.num_slots = config.max_num_seqs * dims.max_tp
        capacity = max(self.capacity_tokens(tp, tp) for tp in self.sub_meshes.degrees())
        self.max_model_len = min(config.max_model_len or dims.config.max_position, capacity)

    @cached_property
    def _buckets(self) -> dict[int, Buckets]:
        table_width = self.dims.pages.pages_for(self.max_model_len)
        config = self.config
        return {
            tp: Buckets(
                config.max_num_seqs * tp,
                config.max_num_batched_tokens,
                table_width,
                few_rows=Buckets(config.max_num_seqs, 1, 1).few_rows,
            )
            for tp in self.sub_meshes.degrees()
        }

    def buckets(self, tp: int) -> Buckets:
        """Return the step shapes of instances of degree `tp`, with `max_num_seqs` sequences for each device."""
        return self._buckets[tp]

    def most_rows(self, tp: int) -> int:
        """Return the most sequences that an instance of degree `tp` decodes in a step."""
        return self.buckets(tp).max_num_seqs

    def extent_pages(self, released: int) -> tuple[int, ...]:
        """Return the pages of each extent of a layer if weights are released for degree `released`."""
        return (self.memory.num_pages, *self.weights.extent_pages(released))

    def capacity_tokens(self, tp: int, released: int) -> int:
        """Return the tokens that fit in an empty instance of degree `tp`, with weights released for `released`."""
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
        """Return the spec for the layers of a segment, with an exchange of other layers' pages if one is given."""
        sizes = self.num_slots, self.hidden_tokens
        key = StepKey(group.device_indices, segment.windows, shape, extent_pages, *sizes, exchange)
        return specs.step(key, segment, group)

    def head_spec(
        self, specs: ProgramSpecs, group: SubMesh, shape: BatchShape, logits_of: LogitsOf = "last"
    ) -> ProgramSpec:
        """Return the spec for the head of a step."""
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
        """Yield the specs for all programs of a step on one group, each once."""
        for segment in {segment.windows: segment for segment in self.segments}.values():
            yield self.layers_spec(specs, group, segment, shape, extent_pages)
        yield self.head_spec(specs, group, shape, logits_of)


def segment_layers(platform: str, num_layers: int) -> int:
    """Return the default number of layers in a segment.

    Each launch costs some 0.2 ms on CPU: decode steps of SmolLM2 with one sequence take 2% to 6% longer with 3 layers
    in a segment than with 5. Larger programs need more memory mappings and host memory on CPU. Small models keep at
    least two segments, which switch one after the other.
    """
    if platform != "cpu":
        return 8
    most = MOST_CPU_SEGMENT_LAYERS
    return most if num_layers % most == 0 and num_layers > most else most - 1
