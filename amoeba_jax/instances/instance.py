"""One serving replica: devices with a view of the weights, a share of the KV cache, and running sequences."""

from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from amoeba_jax.instances.changing import Changing, PageCounts
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.pace import Pace
from amoeba_jax.instances.paused import PausedPages
from amoeba_jax.instances.runner import Runner, StepInputs
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.site import Site
from amoeba_jax.instances.step_batch import step_batch
from amoeba_jax.instances.step_plan import PendingStep, Row, StepNotLaunchedError, StepPlan
from amoeba_jax.instances.step_sampler import SampleCall, StepSampler, sampler_kind
from amoeba_jax.programs.batch import BatchShape, StepBatch
from amoeba_jax.programs.buckets import Buckets
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.programs.step_program import HeadOutput, LogitsOf
from amoeba_jax.sampling.rows import SamplerKind
from kvcache.allocator import OutOfPagesError
from sharding.mesh import assemble, disassemble
from sharding.placement import Home


class _Prepared(NamedTuple):
    """All that a step needs before its first program is launched."""

    inputs: StepInputs
    sampled: list[Row]
    sample: SampleCall | None
    take_column: jax.stages.Compiled | None
    token_logprobs: jax.stages.Compiled | None


class Instance:
    """Launches steps. Used by the dispatcher thread only.

    Args:
        runner: of its steps, at its placement.
        lanes: its sequences. One, or, while it merges or splits, one for each instance of the lower degree.
        sampler: on its first device.
        buckets: its step shapes.
        lane_buckets: those of instances of the lower degree, while it merges or splits.
        released: the degree for which chunks of its weights are KV extents.
        on_result: called from another thread whenever a result has arrived; must not block.

    Attributes:
        transition: what changes the placement of its layers.
        pace: of its steps whose results were taken.
        last_was_prompt: its latest step computed a prompt.
        paused: instances over its devices whose requests are paused while it serves.
    """

    def __init__(
        self,
        runner: Runner,
        lanes: list[Lane],
        sampler: StepSampler,
        on_result: Callable[[], None],
        executables: Executables,
        *,
        buckets: Buckets,
        released: int,
    ):
        self.group = runner.group
        self.id = self.group.start
        self.runner, self.lanes, self.sampler = runner, lanes, sampler
        self.buckets = self.lane_buckets = buckets
        self.released = released
        self.pending: deque[PendingStep] = deque()
        self.num_launched = 0
        self.last_was_prompt = False
        self.transition: Changing | None = None
        self.pace = Pace()
        self._executables, self._on_result = executables, on_result
        self._known_at: object = None
        self._known: dict[tuple[BatchShape, LogitsOf, int | None, SamplerKind], bool] = {}
        self._free_slots = list(range(sampler.num_slots))[::-1]
        self.paused: tuple[Instance, ...] = ()
        self._paused_pages: PausedPages | None = None
        # Waiting for the device happens here, in a thread that launches nothing.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix=f"amoeba-read-{self.id}")

    @property
    def tp(self) -> int:
        return self.group.tp

    @property
    def site(self) -> Site:
        """Where its embedding and head are computed, and in steady state all layers."""
        return self.runner.sites[self.runner.placement.ends]

    @property
    def lane(self) -> Lane:
        """The only lane of an instance in steady state."""
        (lane,) = self.lanes
        return lane

    @property
    def has_free_slot(self) -> bool:
        return any(lane.has_free_slot for lane in self.lanes)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that it holds when empty and all of its layers are at its degree."""
        return self.page_counts().total * self.lanes[0].pages.geometry.page_size

    # Sequences

    @property
    def running(self) -> list[Sequence]:
        """The sequences of all lanes."""
        if len(self.lanes) == 1:
            return self.lanes[0].running
        return [sequence for lane in self.lanes for sequence in lane.running]

    @property
    def max_running(self) -> int:
        """Sequences that it decodes at once."""
        return self.buckets.max_num_seqs

    @property
    def num_free_slots(self) -> int:
        """Sequences that it could run besides those that it runs."""
        return max(min(self.max_running - len(self.running), len(self._free_slots)), 0)

    def lane_of(self, sequence: Sequence) -> Lane:
        """The lane that has a running sequence."""
        if len(self.lanes) == 1:
            return self.lanes[0]
        return next(lane for lane in self.lanes if sequence in lane.running)

    def add(self, sequence: Sequence, lane: Lane) -> None:
        """Take a sequence that has its pages. Where that fails, it is not taken.

        Raises whatever the sampler's program does, or `StateLostError`.
        """
        slot = self._free_slots.pop()
        try:
            self.sampler.remember(sequence, slot)
        except BaseException:
            self._free_slots.append(slot)
            raise
        sequence.slot = slot
        lane.running.append(sequence)

    def reserve(self, sequence: Sequence, num_tokens: int) -> Collection[Sequence]:
        """Give a sequence pages for that many tokens.

        Returns none, or, where they do not fit, the sequences that hold the pages it lacks, itself among them.
        """
        assert sequence.pages is not None
        lane = self.lane_of(sequence)
        try:
            lane.cache.reserve(sequence.pages, num_tokens)
        except OutOfPagesError:
            if len(self.lanes) > 1:
                return self._reserve_beside(sequence, num_tokens, lane)
            if self._paused_pages is not None:
                in_the_way = self._paused_pages.in_the_way(self._num_lacking(sequence, num_tokens))
                if yielding := [s for s in in_the_way if s.rank >= sequence.rank]:
                    return yielding
            return lane.running
        return ()

    def _num_lacking(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that a sequence has yet to get for that many tokens."""
        assert sequence.pages is not None
        return sequence.pages.pool.geometry.pages_for(num_tokens) - sequence.pages.num_pages

    def _reserve_beside(self, sequence: Sequence, num_tokens: int, lane: Lane) -> Collection[Sequence]:
        """Cached prefixes of other lanes may have the pages that a lane lacks, of those that all lanes share."""
        assert sequence.pages is not None
        needed = self._num_lacking(sequence, num_tokens)
        lane.cache.evict(min(needed, lane.cache.num_evictable_pages))
        for other in sorted(self.lanes, key=lambda other: -other.cache.num_evictable_pages):
            if other is not lane and lane.pages.num_free_pages < needed:
                other.cache.evict(min(needed - lane.pages.num_free_pages, other.cache.num_evictable_pages))
        try:
            lane.cache.reserve(sequence.pages, num_tokens)
        except OutOfPagesError:
            # Of the pages that only this lane has there is none, or of those that all lanes share.
            return lane.running if lane.lacks_own_pages(needed) else self.running
        return ()

    def remove(self, sequence: Sequence) -> None:
        """Give up a sequence; its pages stay with the prefix cache as long as there is room."""
        lane = self.lane_of(sequence)
        self.leave(sequence, lane)
        sequence.slot = -1
        assert sequence.pages is not None
        lane.cache.release(sequence.pages)
        sequence.pages = None

    def leave(self, sequence: Sequence, lane: Lane) -> None:
        """Have a sequence not run here any more, which keeps its pages."""
        lane.running.remove(sequence)
        self._free_slots.append(sequence.slot)

    def page_counts(self) -> PageCounts:
        """How its pages are used, at its own degree."""
        lane = self.lanes[0]
        ranks = lane.ranks[self.runner.placement.ends]
        cached = sum(lane.cache.num_evictable_pages for lane in self.lanes)
        if self._paused_pages is None:
            free = min(lane.pages.free_by_rank()[ranks])
        else:
            free = self._paused_pages.num_free_pages()
        return PageCounts(min(lane.pages.total_by_rank()[ranks]), free + cached, cached)

    def take_the_place_of(self, members: "tuple[Instance, ...]") -> None:
        """Serve, without a sequence yet, while the sequences of instances over the same devices are paused. They keep
        their slots, of which those on this one's first device are not given to others, and their pages, of which those
        of cached prefixes are given up where this one needs them."""
        kept = {sequence.slot for sequence in members[0].running}
        self._free_slots = [slot for slot in self._free_slots if slot not in kept]
        self.lane.max_running = min(self.lane.max_running, len(self._free_slots) + len(self.running))
        self.paused = members
        self._paused_pages = PausedPages(self.lane.pages, [member.lane for member in members])
        self.lane.cache.lender = self._paused_pages

    def drop_paused(self) -> "tuple[Instance, ...]":
        """Have no paused instances any more, and return those that there were."""
        members, self.paused, self._paused_pages = self.paused, (), None
        for lane in self.lanes:
            lane.cache.lender = None
        return members

    @property
    def paused_sequences(self) -> list[Sequence]:
        """The sequences of paused instances."""
        return [sequence for member in self.paused for sequence in member.running]

    def paused_in_the_way(self, num_pages: int, rank: tuple[int, int]) -> list[Sequence]:
        """The paused sequences, of this rank or behind it, that would have to go for that many pages to be available:
        those that are served last first. None where that would not do."""
        needed, pages = num_pages - self.lane.cache.num_evictable_pages, self._paused_pages
        return [] if pages is None else pages.yielding(needed, rank)

    # Steps

    def specs(self, plan: StepPlan, kind: SamplerKind | None = None) -> list[ProgramSpec]:
        """The programs that `launch_plan` runs for a step, with another kind of sampler if that is given."""
        kind = kind or sampler_kind(plan)
        found = self.runner.specs(plan.shape, plan.logits_of, plan.lane)
        return found + self.sampler.specs(plan.shape, kind, every=plan.logits_of == "all")

    def can_launch(self, plan: StepPlan) -> bool:
        """Whether all of `specs` are there."""
        now = self._executables.version, self.runner.placement
        if self._known_at != now:
            self._known_at, self._known = now, {}
        what = plan.shape, plan.logits_of, plan.lane, sampler_kind(plan)
        if (known := self._known.get(what)) is None:
            known = self._known[what] = self._executables.available(self.specs(plan))
        return known

    def extents_changed(self) -> None:
        """Take note that the cache has other extents: steps need other programs."""
        self._known_at = None

    def launch_plan(self, plan: StepPlan) -> None:
        """Dispatch a step and what samples its tokens, and have the results read in the background.

        Raises `StepNotLaunchedError`, with nothing changed, where it cannot be prepared, such as for lack of a program.
        Any other error has come after the first program: the cache may have lost extents with it.
        """
        try:
            prepared = self._prepare(plan)
        except Exception as error:
            raise StepNotLaunchedError("the step could not be prepared") from error
        every, sampled, sample = plan.logits_of == "all", prepared.sampled, prepared.sample
        head = self.runner.run(prepared.inputs)
        prompt_row = prompt_result = None
        # Taking a rank's part of an array takes time: only where it is wanted.
        logits = self._first_rank(head.logits) if sample is not None or every else None
        if prepared.take_column is not None and prepared.token_logprobs is not None:
            (row,) = plan.rows
            targets = np.zeros(plan.shape.num_tokens, np.int32)
            known = row.sequence.prompt[row.start + 1 : row.start + row.length + 1]
            targets[row.place : row.place + len(known)] = known  # rows before it are padding, of one token each
            prompt_row, prompt_result = row, self._read(prepared.token_logprobs(logits, targets))
            if sample is not None:
                logits = prepared.take_column(logits, np.int32(row.place + row.length - 1))
        if sample is not None:
            assert logits is not None, "taken for the sampler"
            tokens, result = self.sampler.sample(sample, logits, self._first_rank(self.runner.last_tokens))
            self._set_last_tokens(tokens)
        else:
            # Without tokens to take, the result still tells when the step is done.
            if sampled:
                self.runner.last_tokens = head.last_tokens
            result = self._first_rank(head.argmax_ids)
        for row in plan.rows:
            row.sequence.num_computed = row.start + row.length
        for row in sampled:
            row.sequence.num_in_flight += 1
        step = PendingStep(plan.rows, sampled, self._read(result), plan.decodes, prompt_row, prompt_result)
        if self.transition is not None:
            step.decodes = False
            step.switched_bytes = self.transition.pace.behind_step if plan.decodes else 0
        self.pending.append(step)
        self.num_launched += 1
        self.last_was_prompt = not plan.decodes

    def _prepare(self, plan: StepPlan) -> _Prepared:
        """Everything that may fail without harm: the batch, the sampling settings, and all programs."""
        every = plan.logits_of == "all"
        sampled = [row for row in plan.rows if row.samples]
        if every:
            sampled = [row._replace(place=0) for row in sampled]  # of its one column of logits
        sample = self.sampler.prepare(plan, sampled)
        columns = self.sampler.column_programs(plan.shape.num_tokens) if every else (None, None)

        def batch_at(home: Home, block: int | None, shape: BatchShape) -> StepBatch:
            rows, first = plan.rows, 0
            if block is not None:
                first = block * shape.num_rows
                rows = tuple(row for row in rows if first <= row.place < first + shape.num_rows)
            geometry = self.lanes[0].pages.geometry
            return step_batch(shape, home.degree, rows, lambda s: self._table(s, home), geometry, first)

        inputs = self.runner.prepare(plan.shape, plan.logits_of, plan.lane, batch_at)
        return _Prepared(inputs, sampled, sample, *columns)

    def launch(self, batch: StepBatch, logits_of: LogitsOf = "last") -> HeadOutput:
        """Dispatch a step of an instance in steady state, without waiting, and without choosing tokens by any other
        rule than the argmax."""
        inputs = self.runner.prepare(batch.shape, logits_of, None, lambda *_: batch)
        return self.runner.run(inputs)

    def _table(self, sequence: Sequence, home: Home) -> np.ndarray:
        assert sequence.pages is not None
        return self.lane_of(sequence).table(sequence.pages, home)

    def _set_last_tokens(self, tokens: jax.Array) -> None:
        """Have all ranks know what the first has drawn."""
        if self.tp == 1:
            self.runner.last_tokens = assemble(self.group, [tokens], replicated=True)
        else:
            self.runner.last_tokens = jax.device_put(tokens, self.group.replicated)

    def _first_rank(self, array: jax.Array) -> jax.Array:
        return disassemble(self.group, array)[0]

    def _read(self, array: jax.Array) -> "Future[np.ndarray]":
        """Copy a result to the host, a row for each of the step's, without waiting for it here."""
        future = self._reader.submit(lambda: np.asarray(array).reshape(len(array), -1))
        future.add_done_callback(lambda _: self._on_result())
        return future

    def when_ready(self, arrays: list[jax.Array]) -> "Future[Any]":
        """Done when arrays, which must not be donated before, have been computed."""
        future = self._reader.submit(jax.block_until_ready, arrays)
        future.add_done_callback(lambda _: self._on_result())
        return future

    def page_copy_specs(self) -> list[ProgramSpec]:
        """What `copy_page` launches."""
        specs, sites = self._executables.specs, self.runner.sites.values()
        return [specs.page_copy(site.group, site.extent_pages) for site in sites if any(site.kv)]

    def copy_page(self, lane: Lane, source: np.ndarray, target: np.ndarray) -> None:
        """Copy a page of a lane, `[rows]` ids each as in its tables, in all layers: launched, not waited for.

        Donates the cache, layer by layer: what fails part-way has lost some of it.
        """
        number, ids = self.lanes.index(lane), {}
        for layer, homes in enumerate(self.runner.placement.homes()):
            home = homes[number]
            site = self.runner.sites[home]
            if home not in ids:
                ranks = lane.ranks[home]
                columns = np.stack([source[ranks], target[ranks]], axis=1).astype(np.int32)  # [tp, 2]
                program = self._executables.get(self._executables.specs.page_copy(site.group, site.extent_pages))
                ids[home] = program, jax.device_put(columns, site.group.sharded)
            program, columns = ids[home]
            site.kv[layer] = program(site.kv[layer], columns)

    def retire(self) -> None:
        """Stop the reader, once it has read what is pending, and let go of all device buffers but the cache."""
        self.transition = None
        self._reader.shutdown(wait=bool(self.pending))
        del self.sampler, self.runner

    def close(self) -> None:
        """Stop the reader and drop all device buffers, those of paused instances as well."""
        for member in self.drop_paused():
            member.close()
        for site in self.runner.sites.values():
            site.kv.clear()
        self.retire()
