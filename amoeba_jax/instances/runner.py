"""Runner: launcher of the steps of an instance.

The placement of an instance tells which home (device group) computes which modules (attention or FFN of a layer). The
placement determines the work list of a step. A work list has the computations at the homes and the transfers of hidden
states between the homes, in order (`programs/work.py`).
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax
import numpy as np

from amoeba_jax.instances.hidden_states import HiddenStates
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.site import ExchangePart, Site
from amoeba_jax.instances.step import PendingStep, ResultReader, StepNotLaunchedError, StepPlan, drop_sample
from amoeba_jax.instances.step_sampler import SampleCall, StepSampler, sampler_kind
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.plan import EnginePlan
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.programs.step_program import HeadOutput, LogitsOf
from amoeba_jax.programs.work import Blocks, Compute, Transfer, Work, work_list, work_specs
from amoeba_jax.sampling.rows import SamplerKind
from sharding.mesh import SubMesh, assemble, disassemble
from sharding.placement import Home, Placement


class StepSwitch(Protocol):
    """Interface of a switch: the change of some layers to another tensor-parallel degree, inside the next step.

    The step computes the changing layers, and possibly other layers, at the lower degree. All remaining layers run at
    the higher degree. In a merge, the layers at the lower degree run first. In a split, the layers at the higher degree
    run first. The runner calls `begin` before it launches the layers at the higher degree, and `end` after this launch.
    The package `transform` implements the interface.
    """

    def begin(self, shape: BatchShape | None) -> Mapping[SegmentPlan, ExchangePart]:
        """Launch the page exchanges that are separate programs. Return the exchanges that run inside step programs.

        A page exchange moves KV pages between ranks. In the result, each key is a segment (part of the model). The
        value is the exchange that runs inside the step program of this segment.

        Args:
            shape: shape of the step. None if the step has only one of several lanes. If `shape` is not the shape for
                which the switch was planned, all exchanges are launched as separate programs, and the result is empty.
        """
        ...

    def end(self) -> None:
        """Record that the changing layers have their new degree."""
        ...


class _Prepared(NamedTuple):
    """Item of a work list (`programs/work.py`), with the programs and inputs of the item.

    The item is a `Compute` or a `Transfer`. A `Compute` runs segments of the model at one home (device group). A
    `Transfer` moves hidden states between homes. The kind of a transfer is `join`, `split` or `copy`.

    Attributes:
        work: the item.
        programs: compiled programs of the item. A `Compute` has one program for each segment. A `join` or `split` has
            one program. A `copy` has two programs for each entry of `work.copies`: the first program reads columns, and
            the second program writes the columns.
        packed: inputs of a `Compute` (`StepBatch.packed`). None for a `Transfer`, or if no segment takes these inputs.
        columns: number of columns (tokens) of one microbatch, for a `Transfer`. For a `join` or `split`, the number is
            a scalar array on all ranks. For a `copy`, the number is an int.
    """

    work: Work
    programs: list[jax.stages.Compiled]
    packed: jax.Array | None = None
    columns: jax.Array | int = 0


class StepInputs(NamedTuple):
    """Programs and inputs of a step, without the buffers that the step updates.

    Attributes:
        work: items of the work list, in order, with their programs and inputs.
        rows: array with the inputs of the head (`StepBatch.rows`).
        head: compiled program of the head.
        shape: shape of the step. None if the step computes only one of several microbatches.
    """

    work: list[_Prepared]
    rows: jax.Array
    head: jax.stages.Compiled
    shape: BatchShape | None


class Runner:
    """Launcher of the steps of an instance. Used by the dispatcher thread only.

    Args:
        group: devices that compute the embedding and the head. The first of these devices also samples.
        sites: site (buffers) of each home (device group) of the placement.

    Attributes:
        last_tokens: last sampled token of each slot, `[num_slots]`, equal on all ranks of `group`.
        switch: change of some layers to another degree, to run inside the next step. None: the next step has no switch.
    """

    def __init__(
        self,
        group: SubMesh,
        sites: Mapping[Home, Site],
        placement: Placement,
        hidden: HiddenStates,
        last_tokens: jax.Array,
        sampler: StepSampler,
        reader: ResultReader,
        plan: EnginePlan,
        executables: Executables,
    ):
        self.group, self.sites, self.placement = group, dict(sites), placement
        self.hidden, self.last_tokens = hidden, last_tokens
        self.sampler, self.reader = sampler, reader
        self.plan, self.executables = plan, executables
        self.switch: StepSwitch | None = None
        self._work: dict[object, list[tuple[Work, list[ProgramSpec]]]] = {}
        self._known_at: object = None
        self._known: dict[tuple[BatchShape, LogitsOf, int | None, SamplerKind], bool] = {}

    def place(self, placement: Placement) -> None:
        """Set the placement, which tells which home computes which modules. Launched steps keep the old placement."""
        self.placement = placement
        self._work.clear()

    # Programs

    def specs(self, plan: StepPlan, kind: SamplerKind | None = None) -> list[ProgramSpec]:
        """Return the specs of all programs of a step. A spec is a description from which a program can be compiled.

        `kind` is the kind of sampler. None: the kind that the rows of the step need.
        """
        return self._layer_specs(plan) + self.sampler.specs(plan, kind or sampler_kind(plan))

    def can_launch(self, plan: StepPlan) -> bool:
        """Return whether a step can be launched without waiting for a compilation.

        Programs that have failed to compile need no wait, because the launch raises their error (`fails`). If the
        engine does not compile in the background, the result is always True.
        """
        extents = tuple(site.extent_pages for site in self.sites.values())
        now = self.executables.version, self.placement, extents
        if self._known_at != now:
            self._known_at, self._known = now, {}
        key = plan.shape, plan.logits_of, plan.lane, sampler_kind(plan)
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self.executables.available(self.specs(plan))
        return known

    def fails(self, plan: StepPlan) -> bool:
        """Return whether any program of a step, except its sampling programs, has failed to compile.

        Steps of other shapes may still work, because they have other programs.
        """
        return self.executables.has_failures and self.executables.has_failed(self._layer_specs(plan))

    def state_specs(self) -> list[ProgramSpec]:
        """Return the specs (descriptions) of the programs that write a sequence's row of the sampling state.

        The result has one program for each home (device group) of the instance. The homes of an instance that splits,
        for example, are its whole group and the groups of the new instances. The new instances may write rows of the
        sequences that they get. With a start placement, only the home of the head has a program.
        """
        groups = [self.group] if self.plan.placement is not None else [site.group for site in self.sites.values()]
        return [self.sampler.state_spec(group) for group in groups]

    def _layer_specs(self, plan: StepPlan) -> list[ProgramSpec]:
        found = {spec.key: spec for _, specs in self._work_of(plan) for spec in specs}
        return [*found.values(), self._head_spec(plan)]

    def _head_spec(self, plan: StepPlan) -> ProgramSpec:
        return self.plan.head_spec(self.executables.specs, self.group, plan.shape, plan.logits_of)

    def _work_of(self, plan: StepPlan) -> list[tuple[Work, list[ProgramSpec]]]:
        """Return the items of a step's work list. Each item comes with the specs of its programs."""
        extents = {home: site.extent_pages for home, site in self.sites.items()}
        key = plan.lane, plan.shape, *extents.items()
        if (found := self._work.get(key)) is None:
            work, count = work_list(self.placement, plan.lane, self.plan.cutter), self.placement.num_microbatches
            specs = self.executables.specs
            found = [(item, work_specs(self.plan, specs, item, plan.shape, count, extents)) for item in work]
            self._work[key] = found
        return found

    # Launch

    def launch(self, plan: StepPlan, lanes: list[Lane]) -> PendingStep:
        """Launch a step and the sampling of the next tokens. The thread of `reader` reads the results.

        With structured output, the host must know all earlier tokens of a sequence before the sampling is launched. If
        the host has not read all of these tokens yet, only the layers and the head are launched. In that case, the
        caller must take the results of the previous step and then call `sample_late`.

        Raises `StepNotLaunchedError`, and changes nothing, if the step cannot be prepared. For example, a program may
        have failed to compile. If any other error is raised, programs were already launched, and the KV cache may be
        lost.
        """
        shape, every = plan.shape, plan.logits_of == "all"
        with jax.profiler.TraceAnnotation(
            "amoeba.step", instance=self.group.start, rows=shape.num_rows, tokens=shape.num_tokens
        ):
            sampled = [row for row in plan.rows if row.samples]
            if every:
                sampled = [row._replace(place=0) for row in sampled]  # the logits get only one column
            try:
                sample = self.sampler.prepare(sampler_kind(plan), 1 if every else shape.num_rows, sampled)
                columns = self.sampler.column_programs(shape.num_tokens) if every else None
                inputs = self.prepare(plan, lanes)
            except Exception as error:
                raise StepNotLaunchedError("the step could not be prepared") from error
            head = self.run(inputs)
            # Taking one rank's part of an array takes time. Do so only if the sampler needs the logits.
            logits = self._first_rank(head.logits) if sample is not None or columns is not None else None
            prompt_row = prompt_result = None
            if columns is not None:
                take_column, token_logprobs = columns
                (prompt_row,) = plan.rows
                targets = np.zeros(shape.num_tokens, np.int32)
                known = prompt_row.sequence.prompt[prompt_row.start + 1 : prompt_row.start + prompt_row.length + 1]
                targets[prompt_row.place : prompt_row.place + len(known)] = known  # earlier rows are padding
                prompt_result = self.reader.read(token_logprobs(logits, targets))
                if sample is not None:
                    logits = take_column(logits, np.int32(prompt_row.place + prompt_row.length - 1))
            step = PendingStep(plan.rows, sampled, plan.decodes, prompt_row=prompt_row, prompt_result=prompt_result)
            if sample is None:
                if sampled:
                    self.last_tokens = head.last_tokens
                # Read the result even if no row samples: it tells when the step is done.
                self.reader.read(self._first_rank(head.argmax_ids), step.result)
            elif any(row.sequence.awaits_token for row in sampled):
                step.logits = logits
            else:
                self._sample(step, sample, logits)
        for row in plan.rows:
            row.sequence.num_computed = row.stop
        for row in sampled:
            row.sequence.num_in_flight += 1
        return step

    def sample_late(self, step: PendingStep) -> None:
        """Launch the sampling of a step whose sampling had to wait for the tokens of the previous step.

        Rows whose sequences have ended or were preempted are not sampled. Other sequences may now have the slots of
        these rows.
        """
        for row in step.sampled:
            if row.sequence.slot < 0:
                drop_sample(row)
        step.sampled = [row for row in step.sampled if row.sequence.slot >= 0]
        assert step.logits is not None, "its sampling waits"
        sample = self.sampler.prepare("full", step.logits.shape[1], step.sampled)
        assert sample is not None, "constrained rows need the full sampler"
        self._sample(step, sample, step.logits)
        step.logits = None

    def _sample(self, step: PendingStep, sample: SampleCall, logits: jax.Array | None) -> None:
        assert logits is not None, "taken for the sampler"
        tokens, result = self.sampler.sample(sample, logits, self._first_rank(self.last_tokens))
        if self.group.tp == 1:
            self.last_tokens = assemble(self.group, [tokens], replicated=True)
        else:
            self.last_tokens = jax.device_put(tokens, self.group.replicated)
        self.reader.read(result, step.result)

    def prepare(self, plan: StepPlan, lanes: list[Lane]) -> StepInputs:
        """Return the programs and inputs of a step, without the sampling. After an error, nothing has changed."""
        shape, count = plan.shape, self.placement.num_microbatches
        batches: dict[tuple[Home, Blocks | None], tuple[jax.Array, jax.Array]] = {}

        def put(home: Home, blocks: Blocks | None, at: BatchShape) -> tuple[jax.Array, jax.Array]:
            if (home, blocks) not in batches:
                batch = plan.batch(lanes, home, blocks, at)
                batches[home, blocks] = jax.device_put((batch.packed, batch.rows), self.sites[home].group.sharded)
            return batches[home, blocks]

        prepared: list[_Prepared] = []
        for work, specs in self._work_of(plan):
            # Segments of equal shape share one spec object. Look up each object only once, because hashing is slow.
            found = {id(spec): spec for spec in specs}
            compiled = {number: self.executables.get(spec) for number, spec in found.items()}
            programs = [compiled[id(spec)] for spec in specs]
            if isinstance(work, Compute):
                needs_batch = any(segment.takes_batch for segment in work.segments)
                packed = put(work.home, work.blocks, work.shape(shape, count))[0] if needs_batch else None
                prepared.append(_Prepared(work, programs, packed))
                continue
            columns: jax.Array | int = shape.num_rows // count
            if work.home is not None:
                columns = jax.device_put(np.int32(columns), self.sites[work.home].group.replicated)
            prepared.append(_Prepared(work, programs, columns=columns))
        head = self.executables.get(self._head_spec(plan))
        blocks = tuple(range(count)) if plan.lane is None and count > 1 else None
        _, rows = put(self.placement.head, blocks, shape)
        return StepInputs(prepared, rows, head, shape if plan.lane is None else None)

    def run(self, inputs: StepInputs) -> HeadOutput:
        """Launch the layers and the head of a step. Return the result of the head.

        In the result, `last_tokens` has the greedy token of each row that samples, in the slot of the row's sequence.
        Donates the KV cache and the hidden states. If a program fails, some of these buffers are lost.
        """
        switch, self.switch = self.switch, None
        for work, programs, packed, columns in inputs.work:
            if isinstance(work, Transfer):
                with jax.profiler.TraceAnnotation("amoeba.transfer", kind=work.kind):
                    self._transfer(work, programs, columns)
                continue
            site = self.sites[work.home]
            within = switch if site.group is self.group else None
            exchanges = None if within is None else within.begin(inputs.shape)
            tokens = self._tokens_at(site.group) if work.segments[0].embeds else None
            states = self.hidden.take_states(site.group)
            states = site.run(work.segments, programs, states, packed, tokens, exchanges, begins=work.begins)
            self.hidden.put_states(site.group, states)
            if within is not None:
                within.end()
        states = self.hidden.take(self.group)
        self.hidden.put(self.group, states)  # the head only reads them
        weights = self.sites[self.placement.head].weights(self.plan.head)
        return HeadOutput(*inputs.head(weights, states, inputs.rows, self.last_tokens))

    def _transfer(self, work: Transfer, programs: list[jax.stages.Compiled], columns: jax.Array | int) -> None:
        hidden, pool = self.hidden, self.plan.sub_meshes
        if work.home is not None:
            group = self.sites[work.home].group
            states = programs[0](hidden.take(group, replicated=False), columns)
            hidden.put(group, states, replicated=False)
            return
        taken: dict[tuple[int, int, int | None], jax.Array] = {}
        for copy, read in zip(work.copies, programs[::2], strict=True):
            key = copy.source, copy.source_block, copy.blocks
            if key not in taken:
                source = pool.group(copy.source, 1)
                states = hidden.take(source)
                taken[key] = read(states, np.int32(copy.source_block * columns))
                hidden.put(source, states)
        for copy, write in zip(work.copies, programs[1::2], strict=True):
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

    def _first_rank(self, array: jax.Array) -> jax.Array:
        return disassemble(self.group, array)[0]
