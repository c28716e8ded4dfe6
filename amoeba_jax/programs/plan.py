"""What an engine is going to be, before it has any buffer: its groups of devices, memory, segments and step shapes."""

from functools import cached_property

import jax

from amoeba_jax.config import EngineConfig
from amoeba_jax.models.decoder import plan_segments
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.buckets import Buckets
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.memory import MemoryPlan, plan_memory
from amoeba_jax.programs.transition_programs import TransitionPrograms
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
        plans: the model's segments, outside of transitions.
        num_slots: sequences whose last tokens an instance remembers.
        max_model_len: longest prompt plus output.
    """

    def __init__(
        self,
        config: EngineConfig,
        dims: ModelDims,
        devices: tuple[jax.Device, ...],
        weights: WeightLayout,
        memory: MemoryPlan | None = None,
    ):
        self.config, self.dims, self.weights = config, dims, weights
        self.sub_meshes = SubMeshPool(devices, config.max_tp)
        self.memory = memory or plan_memory(dims, config, weights.num_bytes, devices[0])
        self.plans = plan_segments(dims, config.segment_layers or segment_layers(devices[0].platform))
        self.num_slots = config.max_num_seqs * dims.max_tp
        capacity = max(self.capacity_tokens(tp, tp) for tp in self.sub_meshes.degrees())
        self.max_model_len = min(config.max_model_len or dims.config.max_position, capacity)

    @cached_property
    def _buckets(self) -> dict[int, Buckets]:
        table_width = self.dims.pages.pages_for(self.max_model_len)
        config = self.config
        return {
            tp: Buckets(config.max_num_seqs * tp, config.max_num_batched_tokens, table_width)
            for tp in self.sub_meshes.degrees()
        }

    def buckets(self, tp: int) -> Buckets:
        """Step shapes of instances of degree `tp`: each of their devices brings `max_num_seqs`."""
        return self._buckets[tp]

    def extent_pages(self, released: int) -> tuple[int, ...]:
        """Pages of each extent of a layer, with weights released for a degree."""
        return (self.memory.num_pages, *self.weights.extent_pages(released))

    def capacity_tokens(self, tp: int, released: int) -> int:
        """Tokens that an empty instance of degree `tp` holds, with weights released for a degree."""
        return sum(self.extent_pages(released)) * tp * self.dims.page_size

    def transition(
        self, executables: Executables, group: SubMesh, lower: int, *, up: bool, released: tuple[int, int], rows: int
    ) -> TransitionPrograms:
        """The programs of a group that goes from instances of degree `lower` to its own, or back.

        Each of the lower instances decodes up to `rows` sequences, one of `decode_sizes`. `released` are the degrees
        for which weights are released before and after.
        """
        members = [self.sub_meshes.group(first, lower) for first in range(group.start, group.start + group.tp, lower)]
        return TransitionPrograms(
            self.weights,
            executables,
            group,
            members,
            up=up,
            released=released,
            rows=rows,
            base_pages=self.memory.num_pages,
            longest_run=max(plan.shape.num_layers for plan in self.plans),
            table_width=self.buckets(lower).table_width,
            num_slots=self.num_slots,
            phase_pieces=self.memory.phase_pages,
        )


def segment_layers(platform: str) -> int:
    """How many layers one program has at most, unless that is configured.

    XLA:CPU maps the code of each kernel by itself, and keeps more host memory for a program the larger it is. Measured
    with SmolLM2 on two cores: decode steps take as long with 3 layers in a segment as with 6.
    """
    return 4 if platform == "cpu" else 8
