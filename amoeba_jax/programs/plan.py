"""What an engine is going to be, before it has any buffer: its groups of devices, memory, segments and step shapes."""

from collections.abc import Iterator
from functools import cached_property

import jax

from amoeba_jax.config import EngineConfig
from amoeba_jax.errors import ConfigError
from amoeba_jax.models.decoder import SegmentPlan, head_plan, plan_segments
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.buckets import Buckets, hidden_tokens
from amoeba_jax.programs.memory import MemoryPlan, has_spare_hidden, plan_memory
from amoeba_jax.programs.program_specs import ProgramSpec, ProgramSpecs
from amoeba_jax.programs.step_program import HeadKey, LogitsOf, PageExchange, StepKey
from amoeba_jax.weights.layout import WeightLayout
from sharding.mesh import SubMesh, SubMeshPool


class EnginePlan:
    """The sizes that an engine's programs depend on. The engine and the catalogue of its programs take them from here.

    Args:
        config: of the engine.
        dims: of its model.
        devices: that it runs on, or would run on.
        weights: whose sizes count; they need not be loaded.
        memory: division of a device's memory; by default `plan_memory`'s, which raises `MemoryBudgetError`.

    Attributes:
        segments: the model's layers, in the runs that are compiled.
        head: what comes after them.
        hidden_tokens: tokens that a group's buffer of hidden states has room for.
        has_spare_hidden: each device has a second such buffer.
        num_slots: sequences whose last tokens an instance remembers.
        max_model_len: longest prompt plus output.
        overlaps_exchanges: layers switch within steps: see `EngineConfig.overlap_exchange`.
        loops_exchanges: one program runs all phases of an exchange of pages: see `ExchangeKind`.

    Raises `ConfigError` for a `max_model_len` above the context that the model was trained for.
    """

    def __init__(
        self,
        config: EngineConfig,
        dims: ModelDims,
        devices: tuple[jax.Device, ...],
        weights: WeightLayout,
        memory: MemoryPlan | None = None,
    ):
        if config.max_model_len is not None and config.max_model_len > dims.config.longest_context:
            raise ConfigError(
                f"max_model_len={config.max_model_len} is above the model's context of {dims.config.longest_context} "
                f"tokens (max_position_embeddings={dims.config.max_position} of its config.json)"
            )
        self.config, self.dims, self.weights = config, dims, weights
        self.sub_meshes = SubMeshPool(devices, config.max_tp)
        self.memory = memory or plan_memory(dims, config, weights.num_bytes, devices[0])
        self.segments = plan_segments(
            dims, config.segment_layers or segment_layers(devices[0].platform, dims.config.num_layers)
        )
        self.head = head_plan(dims)
        wanted = config.overlap_exchange
        self.overlaps_exchanges = devices[0].platform == "gpu" if wanted is None else wanted
        self.loops_exchanges = devices[0].platform == "cpu"
        self.hidden_tokens = hidden_tokens(config)
        self.has_spare_hidden = has_spare_hidden(config)
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
        """Step shapes of instances of degree `tp`: each of their devices brings `max_num_seqs`."""
        return self._buckets[tp]

    def most_rows(self, tp: int) -> int:
        """Sequences that an instance of degree `tp` decodes in a step, at most."""
        return self.buckets(tp).max_num_seqs

    def extent_pages(self, released: int) -> tuple[int, ...]:
        """Pages of each extent of a layer, with weights released for a degree."""
        return (self.memory.num_pages, *self.weights.extent_pages(released))

    def capacity_tokens(self, tp: int, released: int) -> int:
        """Tokens that an empty instance of degree `tp` holds, with weights released for a degree."""
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
        """The layers of a segment, over extents of that many pages a rank, with an exchange of others' pages if that is
        given."""
        sizes = self.num_slots, self.hidden_tokens
        key = StepKey(group.device_indices, segment.windows, shape, extent_pages, *sizes, exchange)
        return specs.step(key, segment, group)

    def head_spec(
        self, specs: ProgramSpecs, group: SubMesh, shape: BatchShape, logits_of: LogitsOf = "last"
    ) -> ProgramSpec:
        """The head of a step."""
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
        """A whole step on one group, each program once."""
        for segment in {segment.windows: segment for segment in self.segments}.values():
            yield self.layers_spec(specs, group, segment, shape, extent_pages)
        yield self.head_spec(specs, group, shape, logits_of)


def segment_layers(platform: str, num_layers: int) -> int:
    """How many layers one program of a model has at most, unless that is configured.

    Each program that is launched costs some 0.2 ms on CPU. SmolLM2 on two cores, decode steps of one sequence: 2% to 6%
    longer with 3 layers in a segment than with 5. XLA:CPU maps the code of each kernel by itself, and keeps more host
    memory for a program the larger it is, so that no depth gets more there. Small models have two runs at least, which
    change their layout one after the other.
    """
    if platform != "cpu":
        return 8
    return 5 if num_layers % 5 == 0 and num_layers > 5 else 4
