"""Launches of an instance's steps, and of copies of its pages."""

from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.result_reader import ResultReader
from amoeba_jax.instances.runner import BatchAt, Runner, StepInputs
from amoeba_jax.instances.step import PendingStep, Row, StepNotLaunchedError, StepPlan, drop_sample, step_batch
from amoeba_jax.instances.step_sampler import SampleCall, StepSampler, sampler_kind
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.programs.step_program import HeadOutput, LogitsOf
from amoeba_jax.sampling.rows import SamplerKind
from sharding.mesh import assemble, disassemble


class _PreparedStep(NamedTuple):
    """Programs and inputs of a step and of its sampling.

    Attributes:
        sampled: rows whose next token the step samples.
        sample: sampling call; None if the greedy tokens of the head are enough.
        columns: two programs for logits of all tokens (`StepSampler.column_programs`). Empty for other steps.
    """

    inputs: StepInputs
    sampled: list[Row]
    sample: SampleCall | None
    columns: list[jax.stages.Compiled]


class StepLauncher:
    """Launcher of an instance's steps. Used by the dispatcher thread only.

    Args:
        runner: runs the layers and the head.
        sampler: samples on the instance's first device.
        reader: reads the results.
    """

    def __init__(self, runner: Runner, sampler: StepSampler, reader: ResultReader, executables: Executables):
        self._runner, self._sampler, self._reader, self._executables = runner, sampler, reader, executables
        self.group = runner.group
        self._known_at: object = None
        self._known: dict[tuple[BatchShape, LogitsOf, int | None, SamplerKind], bool] = {}

    def specs(self, plan: StepPlan, kind: SamplerKind | None = None) -> list[ProgramSpec]:
        """Return the programs of a step. `kind` is the kind of sampler. Default: the kind that the rows need."""
        kind = kind or sampler_kind(plan)
        found = self._runner.specs(plan.shape, plan.logits_of, plan.lane)
        return found + self._sampler.specs(plan.shape, kind, every=plan.logits_of == "all")

    def can_launch(self, plan: StepPlan) -> bool:
        """Return whether all programs of a step are compiled."""
        extents = tuple(site.extent_pages for site in self._runner.sites.values())
        now = self._executables.version, self._runner.placement, extents
        if self._known_at != now:
            self._known_at, self._known = now, {}
        key = plan.shape, plan.logits_of, plan.lane, sampler_kind(plan)
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._executables.available(self.specs(plan))
        return known

    def fails(self, plan: StepPlan) -> bool:
        """Return whether a program of the layers or the head for this step shape has failed. Another shape may work."""
        executables = self._executables
        return executables.has_failures and executables.has_failed(
            self._runner.specs(plan.shape, plan.logits_of, plan.lane)
        )

    def launch(self, plan: StepPlan, lanes: list[Lane]) -> PendingStep:
        """Launch a step and its sampling. The reader's thread reads the results.

        If a matcher needs a token in flight first, only the layers and the head are launched. `sample_late` must launch
        the sampling when the results of the step before are taken.

        Raises `StepNotLaunchedError` if the step cannot be prepared, for example because a program is missing. Nothing
        has changed then. Any other error comes after the first program was launched, and the cache may be lost.
        """
        shape = plan.shape
        with jax.profiler.TraceAnnotation(
            "amoeba.step", instance=self.group.start, rows=shape.num_rows, tokens=shape.num_tokens
        ):
            try:
                prepared = self._prepare(plan, lanes)
            except Exception as error:
                raise StepNotLaunchedError("the step could not be prepared") from error
            return self._launch(plan, prepared)

    def _prepare(self, plan: StepPlan, lanes: list[Lane]) -> _PreparedStep:
        every = plan.logits_of == "all"
        sampled = [row for row in plan.rows if row.samples]
        if every:
            sampled = [row._replace(place=0) for row in sampled]  # row of its only column of logits
        num_rows = 1 if every else plan.shape.num_rows
        sample = self._sampler.prepare(sampler_kind(plan), num_rows, sampled)
        columns = self._sampler.column_programs(plan.shape.num_tokens) if every else []
        batch_at = partial(step_batch, plan, lanes)
        inputs = self._runner.prepare(plan.shape, plan.logits_of, plan.lane, batch_at)
        return _PreparedStep(inputs, sampled, sample, columns)

    def _launch(self, plan: StepPlan, prepared: _PreparedStep) -> PendingStep:
        inputs, sampled, sample, columns = prepared
        head = self._runner.run(inputs)
        prompt_row = prompt_result = None
        # Taking one rank's part of an array takes time.
        logits = self._first_rank(head.logits) if sample is not None or columns else None
        if columns:
            take_column, token_logprobs = columns
            (row,) = plan.rows
            targets = np.zeros(plan.shape.num_tokens, np.int32)
            known = row.sequence.prompt[row.start + 1 : row.start + row.length + 1]
            targets[row.place : row.place + len(known)] = known  # the rows before it are padding of one token each
            prompt_row, prompt_result = row, self._reader.read(token_logprobs(logits, targets))
            if sample is not None:
                logits = take_column(logits, np.int32(row.place + row.length - 1))
        step = PendingStep(plan.rows, sampled, plan.decodes, prompt_row=prompt_row, prompt_result=prompt_result)
        if sample is None:
            if sampled:
                self._runner.last_tokens = head.last_tokens
            # Read also without samples: it tells when the step is done.
            self._reader.read(self._first_rank(head.argmax_ids), step.result)
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
        """Launch the sampling of a step that has waited for the tokens of the step before.

        Rows of sequences that have ended or were preempted are dropped: other sequences may use their slots.
        """
        for row in step.sampled:
            if row.sequence.slot < 0:
                drop_sample(row)
        step.sampled = [row for row in step.sampled if row.sequence.slot >= 0]
        assert step.logits is not None, "its sampling waits"
        sample = self._sampler.prepare("full", step.logits.shape[1], step.sampled)
        assert sample is not None, "constrained rows need the full sampler"
        self._sample(step, sample, step.logits)
        step.logits = None

    def _sample(self, step: PendingStep, sample: SampleCall, logits: jax.Array | None) -> None:
        assert logits is not None, "taken for the sampler"
        tokens, result = self._sampler.sample(sample, logits, self._first_rank(self._runner.last_tokens))
        self._set_last_tokens(tokens)
        self._reader.read(result, step.result)

    def launch_batch(
        self, shape: BatchShape, microbatch: int | None, batch_at: BatchAt, logits_of: LogitsOf = "last"
    ) -> HeadOutput:
        """Launch a step with given batches. No sampler runs, and only the greedy tokens are recorded."""
        return self._runner.run(self._runner.prepare(shape, logits_of, microbatch, batch_at))

    def page_copy_specs(self) -> list[ProgramSpec]:
        """Return the programs that `copy_page` needs."""
        specs, sites = self._executables.specs, self._runner.sites.values()
        return [specs.page_copy(site.group, site.extent_pages) for site in sites if any(site.kv)]

    def state_specs(self) -> list[ProgramSpec]:
        """Return the programs that write the sampling state of a sequence when it starts.

        While layers change, these include the programs of the instances that will take over the sequence. With a start
        placement, only the devices of the head have a sampling state.
        """
        groups = [self.group] if self._runner.is_placed else [site.group for site in self._runner.sites.values()]
        return [self._sampler.state_spec(group) for group in groups]

    def copy_page(self, lanes: list[Lane], lane: Lane, source: np.ndarray, target: np.ndarray) -> None:
        """Launch the copy of a page of a lane in all layers.

        `source` and `target` are page ids `[rows]`, as in block tables. Donates the cache, layer by layer. If a copy
        fails, some of the cache is lost.
        """
        number = lanes.index(lane)
        for home, layers in self._runner.placement.layers_by_home(number).items():
            site, ranks = self._runner.sites[home], lane.ranks[home]
            ids = np.stack([source[ranks], target[ranks]], axis=1).astype(np.int32)  # [tp, 2]
            program = self._executables.get(self._executables.specs.page_copy(site.group, site.extent_pages))
            columns = jax.device_put(ids, site.group.sharded)
            for layer in layers:
                site.kv[layer] = program(site.kv[layer], columns)

    def _set_last_tokens(self, tokens: jax.Array) -> None:
        """Copy the last tokens of all slots from the first rank to all ranks."""
        if self.group.tp == 1:
            self._runner.last_tokens = assemble(self.group, [tokens], replicated=True)
        else:
            self._runner.last_tokens = jax.device_put(tokens, self.group.replicated)

    def _first_rank(self, array: jax.Array) -> jax.Array:
        return disassemble(self.group, array)[0]
