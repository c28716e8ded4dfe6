"""One serving replica: a sub-mesh with its weights view, its share of the KV cache, and its running sequences."""

from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from amoeba_jax.instances.pace import Pace
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step_plan import (
    PendingStep,
    Row,
    SamplingState,
    StateLostError,
    StepInputs,
    StepNotLaunchedError,
    StepPlan,
)
from amoeba_jax.instances.step_runner import StepRunner
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.batch import BatchShape, StepBatch
from amoeba_jax.programs.buckets import Buckets
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.program_requests import ProgramRequest
from amoeba_jax.programs.step_program import HeadOutput, LogitsOf, StepKey, segment_keys
from amoeba_jax.sampling.rows import (
    NO_SLOT,
    SamplerKind,
    StepRow,
    bad_word_pairs,
    pack,
    packed_size,
    sampling_row,
    state_rows,
)
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.weights.store import WeightStore
from kvcache.allocator import OutOfPagesError
from kvcache.pages import PagePool
from kvcache.prefix_cache import PrefixCache
from sharding.mesh import SubMesh, assemble, disassemble, replaced_if_lost

# A row that samples nothing: padding, or a chunk in mid-prompt.
_NO_SAMPLE = StepRow(sampling_row(SamplingParams(temperature=0), 0, 1, ()), NO_SLOT, 0, 0)


class _Sampler(NamedTuple):
    """`sampler.draw`, or `draw_full`, and the settings that it gets."""

    program: jax.stages.Compiled
    packed: np.ndarray
    full: bool


class _Prepared(NamedTuple):
    """All that a step needs before its first program is launched."""

    batch: StepBatch
    inputs: StepInputs | None
    """None in a transition, which has its own."""
    sampled: list[Row]
    sampler: _Sampler | None
    take_column: jax.stages.Compiled | None
    token_logprobs: jax.stages.Compiled | None


class Instance:
    """Launches steps on one sub-mesh. Used by the dispatcher thread only.

    `kv[layer]` is that layer's list of extents, each `[tp * pages, page_elems]` sharded over the ranks. Every step
    donates them and puts the returned arrays (the same memory) in their place. So whatever is launched later sees
    what was launched before, and a page may change hands before the steps that use it have run.

    Attributes:
        buckets: its step shapes.
        released: the degree for which chunks of its weights are KV extents.
        transition: what runs its steps while its layers are in two layouts.
        pace: of its steps whose results were taken.
    """

    def __init__(
        self,
        group: SubMesh,
        pages: PagePool,
        cache: PrefixCache,
        kv: list[list[jax.Array]],
        plans: tuple[SegmentPlan, ...],
        weights: WeightStore,
        executables: Executables,
        state: SamplingState,
        last_tokens: jax.Array,
        on_result: Callable[[], None],
        *,
        buckets: Buckets,
        released: int,
    ):
        self.id = group.start
        self.group = group
        self.pages = pages
        self.cache = cache
        self.kv = kv
        self.plans = plans
        self.executables = executables
        self.state = state
        self.num_slots = state.flags.shape[0]
        self.running: list[Sequence] = []
        self.pending: deque[PendingStep] = deque()
        self.num_launched = 0
        self.buckets = buckets
        self.released = released
        self.transition: StepRunner | None = None
        self.pace = Pace()
        self._store = weights
        self._known_at = -1
        self._known: dict[tuple[BatchShape, LogitsOf, SamplerKind], bool] = {}
        self._free_slots = list(range(self.num_slots))[::-1]
        self.last_tokens = last_tokens
        self._on_result = on_result
        # Waiting for the device happens here, in a thread that launches nothing.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix=f"amoeba-read-{group.start}")

    @property
    def tp(self) -> int:
        return self.group.tp

    @cached_property
    def _weights(self) -> list[list[jax.Array]]:
        """Of each segment. Taken when the first step needs them: in a transition they may still change."""
        return [self._store.view(self.group, plan) for plan in self.plans]

    @property
    def _extent_pages(self) -> tuple[int, ...]:
        """Pages of each extent of a layer, the same for all layers."""
        return tuple(extent.shape[0] // self.tp for extent in self.kv[0])

    @property
    def capacity_tokens(self) -> int:
        """Tokens that it holds when empty."""
        return self.pages.num_total_pages * self.pages.geometry.page_size

    @property
    def max_running(self) -> int:
        """Sequences that it decodes at once."""
        return self.buckets.max_num_seqs

    # Sequences

    @property
    def num_free_slots(self) -> int:
        """Sequences that it could run besides those that it runs."""
        return max(self.max_running - len(self.running), 0)

    @property
    def has_free_slot(self) -> bool:
        return len(self.running) < self.max_running

    def add(self, sequence: Sequence) -> None:
        """Take a sequence that has its pages. Where that fails, it is not taken.

        Raises whatever its program does, or `StateLostError`.
        """
        program = rows = None
        if sequence.sampling.uses_state:
            rows = state_rows(sequence.sampling, sequence.prompt, sequence.output)
            program = self.executables.get(self.executables.requests.set_state(self.group, self.num_slots))
        sequence.slot = self._free_slots.pop()
        self.running.append(sequence)
        if program is None or rows is None:
            return
        state = self.state
        try:
            state.flags, state.bias = program(state.flags, state.bias, np.int32(sequence.slot), *rows)
        except Exception as error:
            self.running.remove(sequence)
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
            if not state.is_lost:
                raise
            state.replace_lost()
            raise StateLostError(f"what sampling remembers is lost: {error}") from error

    def reserve(self, sequence: Sequence, num_tokens: int) -> Collection[Sequence]:
        """Give a sequence pages for that many tokens, in all views.

        Returns none, or, where they do not fit, the sequences that hold the pages it lacks, itself among them.
        """
        assert sequence.pages is not None
        if self.transition is not None and (holders := self.transition.reserve(sequence, num_tokens)):
            return holders
        try:
            self.cache.reserve(sequence.pages, num_tokens)
        except OutOfPagesError:
            return self.running
        return ()

    def remove(self, sequence: Sequence) -> None:
        """Give up a sequence; its pages stay with the prefix cache as long as there is room."""
        if self.transition is not None:
            self.transition.remove(sequence)
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        assert sequence.pages is not None
        self.cache.release(sequence.pages)
        sequence.pages = None

    # Steps

    def requests(self, plan: StepPlan) -> list[ProgramRequest]:
        """The programs that `launch_plan` runs for a step, outside of a transition."""
        return self.step_requests(plan.shape, plan.logits_of, self._sampler_kind(plan))

    def can_launch(self, plan: StepPlan) -> bool:
        """Whether all of `requests` are there."""
        if self._known_at != self.executables.version:
            self._known_at, self._known = self.executables.version, {}
        what = plan.shape, plan.logits_of, self._sampler_kind(plan)
        if (known := self._known.get(what)) is None:
            known = self._known[what] = self.executables.available(self.step_requests(*what))
        return known

    def step_requests(self, shape: BatchShape, logits_of: LogitsOf, sampler: SamplerKind) -> list[ProgramRequest]:
        """The programs of a step and of what samples its tokens."""
        requests, every = self.executables.requests, logits_of == "all"
        keys = self.step_keys(shape, logits_of)
        found = [requests.step(key, plan, self.group) for key, plan in zip(keys, self.plans, strict=True)]
        if every:
            found.append(requests.take_column(self.group, shape.num_tokens))
            found.append(requests.token_logprobs(self.group, shape.num_tokens))
        if sampler != "greedy":
            found.append(self.sampler_request(sampler, 1 if every else shape.num_rows))
        return found

    def sampler_request(self, kind: SamplerKind, num_rows: int) -> ProgramRequest:
        """What draws the next tokens of that many rows."""
        requests, full = self.executables.requests, kind == "full"
        make = requests.draw_full if full else requests.draw
        return make(self.group, num_rows, self.num_slots, packed_size(num_rows, full=full))

    def step_keys(self, shape: BatchShape, logits_of: LogitsOf = "last") -> list[StepKey]:
        """Executables that a step of this shape needs, one per segment."""
        return segment_keys(self.group, self.plans, shape, self._extent_pages, self.num_slots, logits_of)

    def step_programs(self, shape: BatchShape, logits_of: LogitsOf = "last") -> list[jax.stages.Compiled]:
        """The executables of `step_keys`."""
        keys, requests = self.step_keys(shape, logits_of), self.executables.requests
        return [
            self.executables.get(requests.step(key, plan, self.group))
            for key, plan in zip(keys, self.plans, strict=True)
        ]

    def inputs(self, batch: StepBatch, logits_of: LogitsOf = "last") -> StepInputs:
        """What `launch` needs besides the cache. Raises whatever fetching it does, with nothing changed."""
        packed = jax.device_put(batch.packed, self.group.sharded)
        return StepInputs(packed, self.step_programs(batch.shape, logits_of), self._weights)

    def launch(self, batch: StepBatch, logits_of: LogitsOf = "last", inputs: StepInputs | None = None) -> HeadOutput:
        """Dispatch one step without waiting. The tokens it samples as the likeliest are recorded in their slots.

        Donates the cache from the first segment on: what fails after that has lost some of it.
        """
        packed, programs, all_weights = inputs or self.inputs(batch, logits_of)
        hidden: jax.Array | None = None
        head: tuple[jax.Array, jax.Array, jax.Array] | None = None
        for plan, program, weights in zip(self.plans, programs, all_weights, strict=True):
            layers = plan.layers
            tokens = self.last_tokens if plan.shape.embedding or plan.shape.head else None
            kv, hidden, head = program(weights, self.kv[layers.start : layers.stop], hidden, packed, tokens)
            self.kv[layers.start : layers.stop] = kv
        assert head is not None, "the last segment has the head"
        return HeadOutput(*head)

    def launch_plan(self, plan: StepPlan) -> None:
        """Dispatch a step and what samples its tokens, and have the results read in the background.

        Raises `StepNotLaunchedError`, with nothing changed, where it cannot be prepared, such as for lack of a program.
        Any other error has come after the first program: the cache may have lost extents with it.
        """
        try:
            prepared = self._prepare(plan)
        except Exception as error:
            raise StepNotLaunchedError("the step could not be prepared") from error
        every, sampled, sampler = plan.logits_of == "all", prepared.sampled, prepared.sampler
        if self.transition is not None:
            head = self.transition.run(plan, prepared.batch)
        else:
            head = self.launch(prepared.batch, plan.logits_of, prepared.inputs)
        prompt_row = prompt_result = None
        # Taking a rank's part of an array takes time: only where it is wanted.
        logits = self._first_rank(head.logits) if sampler is not None or every else None
        if prepared.take_column is not None and prepared.token_logprobs is not None:
            (row,) = plan.rows
            targets = np.zeros(plan.shape.num_tokens, np.int32)
            known = row.sequence.prompt[row.start + 1 : row.start + row.length + 1]
            targets[row.place : row.place + len(known)] = known  # rows before it are padding, of one token each
            prompt_row, prompt_result = row, self._read(prepared.token_logprobs(logits, targets))
            if sampler is not None:
                logits = prepared.take_column(logits, np.int32(row.place + row.length - 1))
        if sampler is not None:
            assert logits is not None, "taken for the sampler"
            result = self._draw(sampler, logits)
        else:
            # Without tokens to take, the result still tells when the step is done.
            if sampled:
                self.last_tokens = head.last_tokens
            result = self._first_rank(head.likeliest)
        for row in plan.rows:
            row.sequence.num_computed = row.start + row.length
        for row in sampled:
            row.sequence.num_in_flight += 1
        decodes = plan.shape.num_tokens == plan.shape.num_rows and self.transition is None
        self.pending.append(PendingStep(plan.rows, sampled, self._read(result), decodes, prompt_row, prompt_result))
        self.num_launched += 1

    def _prepare(self, plan: StepPlan) -> _Prepared:
        """Everything that may fail without harm: the batch, the sampling settings, and all programs."""
        batch, every = self._batch(plan), plan.logits_of == "all"
        sampled = [row for row in plan.rows if row.samples]
        if every:
            sampled = [row._replace(place=0) for row in sampled]  # of its one column of logits
        sampler = self._sampler(plan, sampled)
        take_column, token_logprobs = self._column_programs(plan) if every else (None, None)
        inputs = self.inputs(batch, plan.logits_of) if self.transition is None else None
        return _Prepared(batch, inputs, sampled, sampler, take_column, token_logprobs)

    def _column_programs(self, plan: StepPlan) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
        """What takes one column of a step's logits, and the log-probabilities of all."""
        requests, tokens = self.executables.requests, plan.shape.num_tokens
        take_column, token_logprobs = (
            requests.take_column(self.group, tokens),
            requests.token_logprobs(self.group, tokens),
        )
        return self.executables.get(take_column), self.executables.get(token_logprobs)

    def _sampler(self, plan: StepPlan, sampled: list[Row]) -> _Sampler | None:
        """What chooses the next tokens of a step; None where the step itself does, as all rows want the likeliest."""
        kind = self._sampler_kind(plan)
        if kind == "greedy":
            return None
        num_rows, full = 1 if plan.logits_of == "all" else plan.shape.num_rows, kind == "full"
        packed = self._pack_sampling(sampled, num_rows, full)
        return _Sampler(self.executables.get(self.sampler_request(kind, num_rows)), packed, full)

    @staticmethod
    def _sampler_kind(plan: StepPlan) -> SamplerKind:
        """Of the program that samples a step's rows."""
        kinds: set[SamplerKind] = {row.sequence.sampling.kind for row in plan.rows if row.samples}
        if "full" in kinds:
            return "full"
        return "draw" if "draw" in kinds or (kinds and plan.logits_of == "all") else "greedy"

    def _draw(self, sampler: _Sampler, logits: jax.Array) -> jax.Array:
        """Choose tokens: the array for the host to read.

        They are drawn on the first rank: every rank has the logits, and one draw is enough.
        """
        tokens, state = self._first_rank(self.last_tokens), self.state
        if sampler.full:
            tokens, state.flags, result = sampler.program(logits, tokens, state.flags, state.bias, sampler.packed)
        else:
            tokens, result = sampler.program(logits, tokens, sampler.packed)
        if self.tp == 1:
            self.last_tokens = assemble(self.group, [tokens], replicated=True)
        else:
            self.last_tokens = jax.device_put(tokens, self.group.replicated)
        return result

    def _pack_sampling(self, sampled: list[Row], num_rows: int, full: bool) -> np.ndarray:
        """The step's sampling settings, a row each. Tokens in flight are those of the step before: one at most."""
        rows = [_NO_SAMPLE] * num_rows
        for row in sampled:
            s = row.sequence
            pairs = bad_word_pairs(s.sampling, s.output, s.num_in_flight > 0)
            rows[row.place] = StepRow(s.sampling, s.slot, s.num_tokens, s.num_generated, pairs)
        return pack(rows, num_rows, full=full)

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

    def _batch(self, plan: StepPlan) -> StepBatch:
        """Inputs of a step."""
        batch, shape = StepBatch(plan.shape, self.tp), plan.shape
        first_token = np.cumsum([0, *(length for rows, length in shape.groups for _ in range(rows))])
        tokens, sources = np.zeros(shape.num_tokens, np.int32), np.full(shape.num_tokens, -1, np.int32)
        positions = np.full(shape.num_tokens, -1, np.int32)
        last_token, slots, num_pages = (np.zeros(shape.num_rows, np.int32) for _ in range(3))
        slots -= 1
        for place, sequence, start, length in plan.rows:
            first, stop = first_token[place], start + length
            positions[first : first + length] = np.arange(start, stop)
            if stop > sequence.num_known:  # only ever the last token is not known
                sources[first + length - 1] = sequence.slot
            known = sequence.tokens(start, stop)
            tokens[first : first + len(known)] = known
            last_token[place] = first + length - 1
            if stop == sequence.num_tokens:
                slots[place] = sequence.slot
            assert sequence.pages is not None
            num_pages[place] = used = self.pages.geometry.pages_for(stop)
            batch.set_table(place, sequence.pages.table[:, :used])
        batch.set("tokens", tokens)
        batch.set("sources", sources)
        batch.set("positions", positions)
        batch.set("last_token", last_token)
        batch.set("slots", slots)
        batch.set("num_pages", num_pages)
        return batch

    @property
    def page_copy_request(self) -> ProgramRequest:
        """What `copy_page` launches."""
        return self.executables.requests.page_copy(self.group, self._extent_pages)

    def page_copy_program(self) -> jax.stages.Compiled:
        """What `copy_page` launches."""
        return self.executables.get(self.page_copy_request)

    def copy_page(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy a page, `[tp]` local ids each, in all layers: launched, not waited for.

        Donates the cache, layer by layer: what fails part-way has lost some of it.
        """
        program = self.page_copy_program()
        ids = jax.device_put(np.stack([source, target], axis=1).astype(np.int32), self.group.sharded)  # [tp, 2]
        for layer, extents in enumerate(self.kv):
            self.kv[layer] = program(extents, ids)

    def replace_lost_extents(self) -> None:
        """Put zeros in the place of extents that failed programs have taken along."""
        for extents in self.kv:
            extents[:] = replaced_if_lost(extents, self.group)

    def forget_weights(self) -> None:
        """Let go of its views of weights, so that those that are replaced are freed. The next step takes them again."""
        self.__dict__.pop("_weights", None)

    def retire(self) -> None:
        """Stop the reader, once it has read what is pending, and let go of all device buffers but the cache."""
        self.transition = None
        self._reader.shutdown(wait=True)
        self.forget_weights()
        del self.state, self.last_tokens

    def close(self) -> None:
        """Stop the reader and drop all device buffers."""
        self.retire()
        self.kv.clear()
