"""Launch of the steps of an instance at its placement. The work list of `programs/work.py` lists the programs."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
import numpy as np

from amoeba_jax.instances.hidden_states import HiddenStates
from amoeba_jax.instances.site import ExchangePart, Site
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.batch import BatchShape, StepBatch
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.plan import EnginePlan
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.programs.step_program import HeadOutput, LogitsOf
from amoeba_jax.programs.work import Blocks, Compute, Transfer, Work, work_list, work_specs
from sharding.mesh import SubMesh, assemble, disassemble
from sharding.placement import Home, Placement

BatchAt = Callable[[Home, Blocks | None, BatchShape], StepBatch]
"""Function `(home, blocks, shape)` that returns the batch for a home.

`blocks` are the microbatches that it computes.
"""


class StepSwitch(Protocol):
    """Interface of a switch of layers that runs inside the next step. The package `transform` implements it.

    In a merge, the layers compute their part of the step before `begin`, at the lower degree. In a split, they compute
    it after `end`.
    """

    def begin(self, shape: BatchShape | None) -> Mapping[SegmentPlan, ExchangePart]:
        """Launch the exchanges of pages that are separate programs.

        Return the exchanges that are part of a step program. The result has an exchange for each segment whose program
        also runs an exchange.

        Args:
            shape: shape of the step, if it computes all lanes; None for a step of one lane. If the switch was planned
                for another shape, all exchanges are launched here, and the result is empty.
        """
        ...

    def end(self) -> None:
        """Mark the layers as switched."""
        ...


class PreparedCompute(NamedTuple):
    """Segments with their programs, and the batch for them on the devices."""

    work: Compute
    programs: list[jax.stages.Compiled]
    packed: jax.Array | None


class PreparedTransfer(NamedTuple):
    """Transfer of hidden states with its programs.

    Attributes:
        programs: one program for a `join` or `split`; two programs, read and write, for each copy of a `copy`.
        columns: number of columns of a block. For a `join` or `split`, a scalar on all ranks of the home.
    """

    work: Transfer
    programs: list[jax.stages.Compiled]
    columns: jax.Array | int


class StepInputs(NamedTuple):
    """Programs and inputs of a step, without the buffers that the step updates.

    Attributes:
        rows: array `StepBatch.rows`, for the head.
        shape: shape of the step if it has all microbatches. None if it has only one.
    """

    work: tuple[PreparedCompute | PreparedTransfer, ...]
    rows: jax.Array
    head: jax.stages.Compiled
    shape: BatchShape | None


class Runner:
    """Launcher of the programs of an instance's steps. Used by the dispatcher thread only.

    Args:
        group: devices of the embedding and the head, where tokens are sampled.
        sites: buffers of every home of the placement.

    Attributes:
        last_tokens: `[num_slots]` on all ranks of `group`: last sampled token of each slot.
        switch: switch of layers that the next step launches; None if there is none.
    """

    def __init__(
        self,
        group: SubMesh,
        sites: Mapping[Home, Site],
        placement: Placement,
        hidden: HiddenStates,
        last_tokens: jax.Array,
        plan: EnginePlan,
        executables: Executables,
    ):
        self.group, self.sites, self.placement = group, dict(sites), placement
        self.hidden, self.last_tokens = hidden, last_tokens
        self.switch: StepSwitch | None = None
        self._plan, self._executables = plan, executables
        self._work: dict[int | None, tuple[Work, ...]] = {}

    @property
    def is_placed(self) -> bool:
        """Whether the engine has a start placement."""
        return self._plan.placement is not None

    def place(self, placement: Placement) -> None:
        """Change the placement. Later steps run at the new placement."""
        self.placement = placement
        self._work.clear()

    # Inputs of a step

    def specs(self, shape: BatchShape, logits_of: LogitsOf, microbatch: int | None) -> list[ProgramSpec]:
        """Return the programs of a step. The step has one microbatch, or all microbatches in blocks of equal width."""
        found: dict[object, ProgramSpec] = {}
        for work in self._work_of(microbatch):
            found.update((spec.key, spec) for spec in self._work_specs(work, shape))
        return [*found.values(), self._head_spec(shape, logits_of)]

    def prepare(self, shape: BatchShape, logits_of: LogitsOf, microbatch: int | None, batch_at: BatchAt) -> StepInputs:
        """Collect the programs and inputs of a step. If this raises, nothing has changed.

        Args:
            microbatch: only microbatch of the step. None: the step has all microbatches.
            batch_at: function that returns the batch for a home.
        """
        batches: dict[tuple[Home, Blocks | None], tuple[jax.Array, jax.Array]] = {}

        def put(home: Home, blocks: Blocks | None, at: BatchShape) -> tuple[jax.Array, jax.Array]:
            if (home, blocks) not in batches:
                batch = batch_at(home, blocks, at)
                batches[home, blocks] = jax.device_put((batch.packed, batch.rows), self.sites[home].group.sharded)
            return batches[home, blocks]

        num_microbatches = self.placement.num_microbatches
        work: list[PreparedCompute | PreparedTransfer] = []
        for item in self._work_of(microbatch):
            if isinstance(item, Transfer):
                work.append(self._prepared_transfer(item, shape))
                continue
            at = item.shape(shape, num_microbatches)
            programs = self.sites[item.home].programs(item.segments, at)
            needs_batch = any(segment.takes_batch for segment in item.segments)
            packed = put(item.home, item.blocks, at)[0] if needs_batch else None
            work.append(PreparedCompute(item, programs, packed))
        head_spec = self._head_spec(shape, logits_of)
        blocks = tuple(range(num_microbatches)) if microbatch is None and num_microbatches > 1 else None
        _, rows = put(self.placement.head, blocks, shape)
        return StepInputs(tuple(work), rows, self._executables.get(head_spec), shape if microbatch is None else None)

    # The step

    def run(self, inputs: StepInputs) -> HeadOutput:
        """Launch all programs of a step. They also record the greedy tokens in their slots.

        Donates the cache and the hidden states. If a program fails, some of these buffers are lost.
        """
        switch, self.switch = self.switch, None
        for prepared in inputs.work:
            if isinstance(prepared, PreparedTransfer):
                with jax.profiler.TraceAnnotation("amoeba.transfer", kind=prepared.work.kind):
                    self._transfer(prepared)
                continue
            work, site = prepared.work, self.sites[prepared.work.home]
            within = switch if site.group is self.group else None
            exchanges = None if within is None else within.begin(inputs.shape)
            tokens = self._tokens_at(site.group) if work.segments[0].embeds else None
            states = self.hidden.take_states(site.group)
            states = site.run(
                work.segments, prepared.programs, states, prepared.packed, tokens, exchanges, begins=work.begins
            )
            self.hidden.put_states(site.group, states)
            if within is not None:
                within.end()
        states = self.hidden.take(self.group)
        self.hidden.put(self.group, states)  # the head only reads them
        weights = self.sites[self.placement.head].weights(self._plan.head)
        return HeadOutput(*inputs.head(weights, states, inputs.rows, self.last_tokens))

    def _transfer(self, prepared: PreparedTransfer) -> None:
        work, hidden = prepared.work, self.hidden
        if work.home is not None:
            group = self.sites[work.home].group
            states = prepared.programs[0](hidden.take(group, replicated=False), prepared.columns)
            hidden.put(group, states, replicated=False)
            return
        pool, columns = self._plan.sub_meshes, prepared.columns
        reads, writes = prepared.programs[::2], prepared.programs[1::2]
        taken: dict[tuple[int, int, int | None], jax.Array] = {}
        for copy, read in zip(work.copies, reads, strict=True):
            key = copy.source, copy.source_block, copy.blocks
            if key not in taken:
                source = pool.group(copy.source, 1)
                states = hidden.take(source)
                taken[key] = read(states, np.int32(copy.source_block * columns))
                hidden.put(source, states)
        for copy, write in zip(work.copies, writes, strict=True):
            target = pool.group(copy.target, 1)
            block = taken[copy.source, copy.source_block, copy.blocks]
            if copy.source != copy.target:
                block = jax.device_put(block, target.devices[0])
            hidden.put(target, write(hidden.take(target), np.int32(copy.target_block * columns), block))

    def _tokens_at(self, group: SubMesh) -> jax.Array:
        if group is self.group:
            return self.last_tokens
        first = group.start - self.group.start
        return assemble(group, disassemble(self.group, self.last_tokens)[first : first + group.tp], replicated=True)

    # The work list

    def _work_of(self, microbatch: int | None) -> tuple[Work, ...]:
        if microbatch not in self._work:
            self._work[microbatch] = work_list(self.placement, microbatch, self._plan.cutter)
        return self._work[microbatch]

    def _head_spec(self, shape: BatchShape, logits_of: LogitsOf) -> ProgramSpec:
        return self._plan.head_spec(self._executables.specs, self.group, shape, logits_of)

    def _work_specs(self, work: Work, shape: BatchShape) -> list[ProgramSpec]:
        extents = {home: site.extent_pages for home, site in self.sites.items()}
        return work_specs(self._plan, self._executables.specs, work, shape, self.placement.num_microbatches, extents)

    def _prepared_transfer(self, work: Transfer, shape: BatchShape) -> PreparedTransfer:
        programs = [self._executables.get(spec) for spec in self._work_specs(work, shape)]
        columns: jax.Array | int = shape.num_rows // self.placement.num_microbatches
        if work.home is not None:
            columns = jax.device_put(np.int32(columns), self.sites[work.home].group.replicated)
        return PreparedTransfer(work, programs, columns)
