"""Runs the steps of an instance by its placement: the layers where they are, one stage after the other.

Between two stages with different homes, hidden states change their place. Where a step has sequences of one lane, every
rank of the larger home has the same states, or gets a copy of them. Where it has sequences of all lanes, one block of
rows for each, `split` gives every home the block of its lane, and `join` puts the blocks together again:

    4 x TP1 becoming TP4, all lanes:  layers 0-11 at TP1, four programs   join   layers 12-29 and head at TP4
    the same, a prompt of lane 2:     layers 0-11 on device 2   copied to the others   layers 12-29 and head at TP4
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from amoeba_jax.instances.hidden_states import HiddenStates
from amoeba_jax.instances.site import Site
from amoeba_jax.instances.step_switch import StepSwitch
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.batch import BatchShape, StepBatch
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.plan import EnginePlan
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.programs.step_program import HeadOutput, LogitsOf
from sharding.mesh import SubMesh, assemble, disassemble
from sharding.placement import Home, Placement, Stage


class Move(NamedTuple):
    """Hidden states go from the homes of one stage to those of the next.

    Attributes:
        kind: `split` or `join`, by a program over the instance's devices; or `spread`: copied from `source` to those
            devices of `target` that do not have them.
    """

    kind: str
    source: Home
    target: Home


class Part(NamedTuple):
    """Layers of a stage at one of its homes.

    Attributes:
        lane: whose rows they compute; None for those of the whole step.
    """

    home: Home
    segments: tuple[SegmentPlan, ...]
    lane: int | None


class PreparedPart(NamedTuple):
    """A part with a program for each of its segments, and its batch on the devices."""

    part: Part
    programs: list[jax.stages.Compiled]
    packed: jax.Array


class PreparedMove(NamedTuple):
    """A move with its program, if it has one, and the rows of each lane's block, a scalar on all ranks."""

    move: Move
    program: jax.stages.Compiled | None
    rows: jax.Array | None


class StepInputs(NamedTuple):
    """What a step is launched with, but for the buffers that it updates.

    Attributes:
        work: what to launch, in order.
        rows: what the head takes of the batch.
        head: the head's program.
        shape: of a step of all lanes; None for others.
    """

    work: tuple[PreparedPart | PreparedMove, ...]
    rows: jax.Array
    head: jax.stages.Compiled
    shape: BatchShape | None


class Runner:
    """Used by the dispatcher thread only.

    Args:
        group: the instance's devices, where the head is computed, and the tokens are sampled.
        sites: the homes of all layers.
        placement: of the instance's lanes. All homes are within the group.

    Attributes:
        last_tokens: `[num_slots]` on all ranks: the token last sampled for each slot.
        switch: of layers, that the next step launches.
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
        self._work: dict[int | None, tuple[Part | Move, ...]] = {}

    def place(self, placement: Placement) -> None:
        """Have steps run by another placement from now on."""
        self.placement = placement
        self._work.clear()

    # What a step needs

    def specs(self, shape: BatchShape, logits_of: LogitsOf, lane: int | None) -> list[ProgramSpec]:
        """The programs of a step: of all lanes, in blocks of as many rows each, or of one."""
        needed: dict[object, ProgramSpec] = {}
        for work in self._plan_work(lane):
            if isinstance(work, Part):
                found = self.sites[work.home].specs(work.segments, self._shape_at(work, shape))
            else:
                found = [spec] if (spec := self._move_spec(work)) is not None else []
            needed.update((spec.key, spec) for spec in found)
        specs = self._executables.specs
        return [*needed.values(), self._plan.head_spec(specs, self.group, shape, logits_of)]

    def prepare(
        self,
        shape: BatchShape,
        logits_of: LogitsOf,
        lane: int | None,
        batch_at: Callable[[Home, int | None, BatchShape], StepBatch],
    ) -> StepInputs:
        """Programs and inputs of a step. Raises whatever fetching them does, with nothing changed.

        Args:
            lane: whose step it is; None: that of all lanes.
            batch_at: makes the batch of a home: of the whole step, or of a lane's block of it.
        """
        work: list[PreparedPart | PreparedMove] = []
        batches: dict[tuple[Home, int | None], tuple[jax.Array, jax.Array]] = {}

        def put(home: Home, block: int | None, at: BatchShape) -> tuple[jax.Array, jax.Array]:
            if (home, block) not in batches:
                batch = batch_at(home, block, at)
                batches[home, block] = jax.device_put((batch.packed, batch.rows), self.sites[home].group.sharded)
            return batches[home, block]

        for what in self._plan_work(lane):
            if isinstance(what, Part):
                site, at = self.sites[what.home], self._shape_at(what, shape)
                programs = site.programs(what.segments, at)
                work.append(PreparedPart(what, programs, put(what.home, what.lane, at)[0]))
            else:
                work.append(self._prepared_move(what, shape))
        specs = self._executables.specs
        head = self._executables.get(self._plan.head_spec(specs, self.group, shape, logits_of))
        _, rows = put(self.placement.ends, None, shape)
        return StepInputs(tuple(work), rows, head, shape if lane is None else None)

    def run(self, inputs: StepInputs) -> HeadOutput:
        """Dispatch a step without waiting. The tokens it samples as the argmax are recorded in their slots.

        Donates the cache and the hidden states from the first program on: what fails after that has lost some of them.
        """
        hidden = self.hidden
        switch, self.switch = self.switch, None
        for work in inputs.work:
            if isinstance(work, PreparedPart):
                site = self.sites[work.part.home]
                within = None if switch is None or site.group is not self.group else switch
                exchanges = None if within is None else within.begin(inputs.shape)
                states, tokens = hidden.take(site.group), self._tokens_at(site.group)
                states = site.run(work.part.segments, work.programs, states, work.packed, tokens, exchanges)
                hidden.put(site.group, states)
                if within is not None:
                    within.end()
            elif work.program is None:
                hidden.spread(self.sites[work.move.source].group, self.sites[work.move.target].group)
            else:
                states = work.program(hidden.take(self.group, replicated=False), work.rows)
                hidden.put(self.group, states, replicated=False)
        ends = self.sites[self.placement.ends]
        states = hidden.take(self.group)
        hidden.put(self.group, states)  # the head only reads them
        return HeadOutput(*inputs.head(ends.weights(self._plan.head), states, inputs.rows, self.last_tokens))

    def _tokens_at(self, group: SubMesh) -> jax.Array:
        if group.tp == self.group.tp:
            return self.last_tokens
        first = group.start - self.group.start
        return assemble(group, disassemble(self.group, self.last_tokens)[first : first + group.tp], replicated=True)

    # How the placement is worked through

    def _plan_work(self, lane: int | None) -> tuple[Part | Move, ...]:
        """Parts and moves of a step of all lanes, or of one."""
        if lane not in self._work:
            self._work[lane] = tuple(self._work_through(lane))
        return self._work[lane]

    def _work_through(self, lane: int | None) -> list[Part | Move]:
        work: list[Part | Move] = []
        before: tuple[Home, ...] = ()
        for stage in self.placement.stages:
            homes: tuple[Home, ...] = stage.distinct_homes if lane is None else (stage.homes[lane],)
            work += _moves(before, homes)
            segments = tuple(s for s in self._plan.segments if s.layers.start in stage.layers)
            work += [Part(home, segments, _block(stage, home, lane)) for home in homes]
            before = homes
        return [*work, *_moves(before, (self.placement.ends,))]

    def _shape_at(self, part: Part, shape: BatchShape) -> BatchShape:
        """Return the shape of a lane's block of a step of all lanes, or of the whole step."""
        if part.lane is None:
            return shape
        return BatchShape(((shape.num_rows // self.placement.num_lanes, 1),), shape.table_width)

    def _move_spec(self, move: Move) -> ProgramSpec | None:
        specs = self._executables.specs
        if move.kind == "spread":
            return None
        make = specs.split if move.kind == "split" else specs.join
        lower = min(move.source.degree, move.target.degree)
        return make(self.group, lower, self._plan.most_rows(lower), self._plan.hidden_tokens)

    def _prepared_move(self, move: Move, shape: BatchShape) -> PreparedMove:
        if (spec := self._move_spec(move)) is None:
            return PreparedMove(move, None, None)
        rows = np.int32(shape.num_rows // self.placement.num_lanes)
        return PreparedMove(move, self._executables.get(spec), jax.device_put(rows, self.group.replicated))


def _block(stage: Stage, home: Home, lane: int | None) -> int | None:
    """Find the lane whose block of a step of all lanes a home computes; None if it computes all."""
    lanes = stage.lanes(home)
    return lanes[0] if lane is None and len(lanes) < len(stage.homes) else None


def _moves(before: tuple[Home, ...], after: tuple[Home, ...]) -> list[Move]:
    """What brings hidden states from the homes of one stage to those of the next."""
    if len(before) == 0 or before == after:
        return []
    source, target = before[0], after[0]
    if len(before) > 1:
        return [Move("join", source, target)]
    if len(after) > 1:
        return [Move("split", source, target)]
    # Of one lane. What a home has, a smaller one within it has as well.
    return [] if set(target.devices) <= set(source.devices) else [Move("spread", source, target)]
