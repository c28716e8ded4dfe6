"""Prepares and launches the steps of an instance, and copies of its pages."""

from typing import NamedTuple

import jax
import numpy as np

from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.result_reader import ResultReader
from amoeba_jax.instances.runner import BatchAt, Runner, StepInputs
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step_batch import step_batch
from amoeba_jax.instances.step_plan import PendingStep, Row, StepNotLaunchedError, StepPlan
from amoeba_jax.instances.step_sampler import SampleCall, StepSampler, sampler_kind
from amoeba_jax.programs.batch import BatchShape, StepBatch
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.programs.step_program import HeadOutput, LogitsOf
from amoeba_jax.programs.work import Blocks
from amoeba_jax.sampling.rows import SamplerKind
from sharding.mesh import assemble, disassemble
from sharding.placement import Home, Homes


class _PreparedStep(NamedTuple):
    """All that a step needs before its first program is launched.

    Attributes:
        sampled: rows whose next token it chooses.
    """

    inputs: StepInputs
    sampled: list[Row]
    sample: SampleCall | None
    take_column: jax.stages.Compiled | None
    token_logprobs: jax.stages.Compiled | None


class StepLauncher:
    """Used by the dispatcher thread only.

    Args:
        runner: of the layers, at their placement.
        sampler: on the instance's first device.
        reader: of what steps return.
    """

    def __init__(self, runner: Runner, sampler: StepSampler, reader: ResultReader, executables: Executables):
        self._runner, self._sampler, self._reader, self._executables = runner, sampler, reader, executables
        self._group = runner.group
        self._known_at: object = None
        self._known: dict[tuple[BatchShape, LogitsOf, int | None, SamplerKind], bool] = {}

    def specs(self, plan: StepPlan, kind: SamplerKind | None = None) -> list[ProgramSpec]:
        """The programs that `launch` runs for a step, with another kind of sampler if that is given."""
        kind = kind or sampler_kind(plan)
        found = self._runner.specs(plan.shape, plan.logits_of, plan.lane)
        return found + self._sampler.specs(plan.shape, kind, every=plan.logits_of == "all")

    def can_launch(self, plan: StepPlan) -> bool:
        """Whether all of `specs` are there."""
        now = self._executables.version, self._runner.placement
        if self._known_at != now:
            self._known_at, self._known = now, {}
        what = plan.shape, plan.logits_of, plan.lane, sampler_kind(plan)
        if (known := self._known.get(what)) is None:
            known = self._known[what] = self._executables.available(self.specs(plan))
        return known

    def fails(self, plan: StepPlan) -> bool:
        """Whether a program of a step of this shape, whatever samples its tokens, has failed: another shape may do."""
        executables = self._executables
        return executables.has_failures and executables.has_failed(
            self._runner.specs(plan.shape, plan.logits_of, plan.lane)
        )

    def launch(self, plan: StepPlan, lanes: list[Lane]) -> PendingStep:
        """Dispatch a step of an instance's lanes and what samples its tokens, and have the results read in the
        background.

        Raises `StepNotLaunchedError`, with nothing changed, where it cannot be prepared, such as for lack of a program.
        Any other error has come after the first program: the cache may have lost extents with it.
        """
        try:
            prepared = self._prepare(plan, lanes)
        except Exception as error:
            raise StepNotLaunchedError("the step could not be prepared") from error
        every, sampled, sample = plan.logits_of == "all", prepared.sampled, prepared.sample
        head = self._runner.run(prepared.inputs)
        prompt_row = prompt_result = None
        # Taking a rank's part of an array takes time: only where it is wanted.
        logits = self._first_rank(head.logits) if sample is not None or every else None
        if prepared.take_column is not None and prepared.token_logprobs is not None:
            (row,) = plan.rows
            targets = np.zeros(plan.shape.num_tokens, np.int32)
            known = row.sequence.prompt[row.start + 1 : row.start + row.length + 1]
            targets[row.place : row.place + len(known)] = known  # rows before it are padding, of one token each
            prompt_row, prompt_result = row, self._reader.read(prepared.token_logprobs(logits, targets))
            if sample is not None:
                logits = prepared.take_column(logits, np.int32(row.place + row.length - 1))
        if sample is not None:
            assert logits is not None, "taken for the sampler"
            tokens, result = self._sampler.sample(sample, logits, self._first_rank(self._runner.last_tokens))
            self._set_last_tokens(tokens)
        else:
            # Without tokens to take, the result still tells when the step is done.
            if sampled:
                self._runner.last_tokens = head.last_tokens
            result = self._first_rank(head.argmax_ids)
        for row in plan.rows:
            row.sequence.num_computed = row.start + row.length
        step = PendingStep(plan.rows, sampled, self._reader.read(result), plan.decodes, prompt_row, prompt_result)
        for row in sampled:
            row.sequence.num_in_flight += 1
        return step

    def _prepare(self, plan: StepPlan, lanes: list[Lane]) -> _PreparedStep:
        """Everything that may fail without harm: the batch, the sampling settings, and all programs."""
        every = plan.logits_of == "all"
        sampled = [row for row in plan.rows if row.samples]
        if every:
            sampled = [row._replace(place=0) for row in sampled]  # of its one column of logits
        sample = self._sampler.prepare(plan, sampled)
        columns = self._sampler.column_programs(plan.shape.num_tokens) if every else (None, None)

        def batch_at(home: Home, group: Homes | None, blocks: Blocks | None, shape: BatchShape) -> StepBatch:
            rows = plan.rows if blocks is None else _rows_of(plan.rows, blocks, plan.shape.num_rows // len(lanes))
            geometry = lanes[0].pages.geometry
            tables = None if group is None else lambda s: _table(lanes, s, group)
            return step_batch(shape, home.degree, rows, tables, geometry)

        inputs = self._runner.prepare(plan.shape, plan.logits_of, plan.lane, batch_at)
        return _PreparedStep(inputs, sampled, sample, *columns)

    def launch_batch(
        self, shape: BatchShape, microbatch: int | None, batch_at: BatchAt, logits_of: LogitsOf = "last"
    ) -> HeadOutput:
        """Dispatch a step of given batches without waiting. No sampler runs: only the greedy tokens are recorded."""
        return self._runner.run(self._runner.prepare(shape, logits_of, microbatch, batch_at))

    def page_copy_specs(self) -> list[ProgramSpec]:
        """What `copy_page` launches."""
        specs, sites = self._executables.specs, self._runner.sites.values()
        return [specs.page_copy(site.group, site.extent_pages) for site in sites if any(site.kv)]

    def state_specs(self) -> list[ProgramSpec]:
        """What a sequence that starts has its sampling state written with, here and, where layers switch, on the
        instances that take it over."""
        return [self._sampler.state_spec(site.group) for site in self._runner.sites.values()]

    def copy_page(self, lanes: list[Lane], lane: Lane, source: np.ndarray, target: np.ndarray) -> None:
        """Copy a page of a lane, `[rows]` ids each as in its tables, in all layers: launched, not waited for.

        Donates the cache, layer by layer: what fails part-way has lost some of it.
        """
        number = lanes.index(lane)
        for group, layers in self._runner.placement.page_groups.items():
            site, ranks = self._runner.sites[group[number]], lane.ranks[group]
            ids = np.stack([source[ranks], target[ranks]], axis=1).astype(np.int32)  # [tp, 2]
            program = self._executables.get(self._executables.specs.page_copy(site.group, site.extent_pages))
            columns = jax.device_put(ids, site.group.sharded)
            for layer in layers:
                site.kv[layer] = program(site.kv[layer], columns)

    def _set_last_tokens(self, tokens: jax.Array) -> None:
        """Have all ranks know what the first has drawn."""
        if self._group.tp == 1:
            self._runner.last_tokens = assemble(self._group, [tokens], replicated=True)
        else:
            self._runner.last_tokens = jax.device_put(tokens, self._group.replicated)

    def _first_rank(self, array: jax.Array) -> jax.Array:
        return disassemble(self._group, array)[0]


def _rows_of(rows: tuple[Row, ...], blocks: Blocks, width: int) -> list[Row]:
    """Return the rows of some blocks of a step, with their places if these blocks lie side by side."""
    first = {block: index * width for index, block in enumerate(blocks)}
    return [
        row._replace(place=first[row.place // width] + row.place % width) for row in rows if row.place // width in first
    ]


def _table(lanes: list[Lane], sequence: Sequence, group: Homes) -> np.ndarray:
    assert sequence.pages is not None
    lane = next(lane for lane in lanes if sequence in lane.running) if len(lanes) > 1 else lanes[0]
    return lane.table(sequence.pages, group)
