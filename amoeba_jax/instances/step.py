"""Step of an instance: the plan, the inputs, the launched step, and the thread that reads the results from devices.

In a step, an instance computes tokens of its sequences, in one pass through the model.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.programs.batch import BatchShape, StepBatch
from amoeba_jax.programs.step_program import LogitsOf
from amoeba_jax.programs.work import Blocks
from sharding.placement import Home


class StepNotLaunchedError(RuntimeError):
    """Error: a step could not be prepared. Nothing was launched or changed. `__cause__` is the original error."""


class Row(NamedTuple):
    """Row of a step: a sequence, and the consecutive tokens of this sequence that the step computes.

    Attributes:
        place: index of the row in the batch of the step.
        start: index of the first token to compute. Index 0 is the first token of the prompt.
        length: number of tokens to compute.
    """

    place: int
    sequence: Sequence
    start: int
    length: int

    @property
    def samples(self) -> bool:
        """Whether the step samples the next token of the sequence.

        True if the row ends with the last token that the sequence has now. Otherwise, a later step samples the token.
        """
        return self.stop == self.sequence.num_tokens

    @property
    def stop(self) -> int:
        return self.start + self.length


def drop_sample(row: Row) -> None:
    """Cancel the sampling of a row whose sequence has ended or was preempted.

    Call this before the sampling is launched. A preempted sequence samples its next token after it has started again.
    """
    sequence = row.sequence
    sequence.num_in_flight -= 1
    if (pages := sequence.host_pages) is not None:
        pages.num_computed = min(pages.num_computed, sequence.num_tokens - 1)


def clear_in_flight(sampled: Iterable[Row]) -> None:
    """Forget sampled tokens that are lost. The host has not read these tokens, and never will.

    Args:
        sampled: rows whose sampled tokens are lost. Rows that sample nothing must not be included: their sequences may
            already run on other instances, with tokens in flight there.
    """
    for row in sampled:
        row.sequence.num_in_flight = 0
        row.sequence.host_pages = None  # the copied pages may include a lost token


@dataclass(frozen=True)
class StepPlan:
    """Plan of a step: its shape, its rows, and the logits to compute.

    Attributes:
        shape: static shape of the batch, for which programs are compiled.
        rows: rows of the step, one for each sequence.
        logits_of: tokens whose logits the step computes. "all": all tokens of the step. "last": each row's last token.
        lane: index of a lane, if the instance has several lanes and all rows of the step belong to this lane. None: the
            step has equally many rows for each lane of the instance.
    """

    shape: BatchShape
    rows: tuple[Row, ...]
    logits_of: LogitsOf = "last"
    lane: int | None = None

    @property
    def decodes(self) -> bool:
        """Whether the step only decodes. If True, every row has one token."""
        return self.shape.num_tokens == self.shape.num_rows

    def batch(self, lanes: SequenceOf[Lane], home: Home, blocks: Blocks | None, shape: BatchShape, /) -> StepBatch:
        """Return the inputs of the step for one home (device group).

        Args:
            lanes: all lanes of the instance. The lanes have the block tables of the sequences.
            blocks: indices of the microbatches that the home computes. In the inputs, the rows of these microbatches
                lie side by side, in the order of `blocks`. None: the home computes all rows of the plan.
            shape: shape of the part of the step that the home computes.
        """
        batch, num_tokens, num_rows = StepBatch(shape, home.degree), shape.num_tokens, shape.num_rows
        first_token = np.cumsum([0, *(length for count, length in shape.groups for _ in range(count))])
        tokens, sources = np.zeros(num_tokens, np.int32), np.full(num_tokens, -1, np.int32)
        positions = np.full(num_tokens, -1, np.int32)
        last_token, num_pages = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        slots = np.full(num_rows, -1, np.int32)
        for row in self.rows if blocks is None else self._rows_of(blocks, len(lanes)):
            place, sequence, start, length = row
            first, stop = first_token[place], start + length
            positions[first : first + length] = np.arange(start, stop)
            if stop > sequence.num_known:  # the host does not know the last token of the row yet
                sources[first + length - 1] = sequence.slot
            known = sequence.tokens(start, stop)
            tokens[first : first + len(known)] = known
            last_token[place] = first + length - 1
            if row.samples:
                slots[place] = sequence.slot
            lane = lanes[0] if len(lanes) == 1 else next(lane for lane in lanes if sequence in lane.running)
            if home in lane.ranks:
                assert sequence.pages is not None
                num_pages[place] = used = lane.pages.geometry.pages_for(stop)
                batch.set_table(place, lane.table(sequence.pages, home)[:, :used])
        batch.set("tokens", tokens)
        batch.set("sources", sources)
        batch.set("positions", positions)
        batch.set("last_token", last_token)
        batch.set("slots", slots)
        batch.set("num_pages", num_pages)
        return batch

    def _rows_of(self, blocks: Blocks, num_lanes: int) -> list[Row]:
        """Return the rows of the microbatches `blocks`, with new values of `place`.

        Each new place is an index in a batch that has only these microbatches, in the order of `blocks`.
        """
        width = self.shape.num_rows // num_lanes
        first = {block: index * width for index, block in enumerate(blocks)}
        places = [(row, *divmod(row.place, width)) for row in self.rows]
        return [row._replace(place=first[block] + place) for row, block, place in places if block in first]


@dataclass(eq=False)
class PendingStep:
    """Launched step whose results the dispatcher thread has not taken yet.

    Attributes:
        rows: all rows of the step, without padding.
        sampled: rows for which the step samples a next token.
        decodes: whether all rows decode, and the instance is in no transition (change of its degree or placement).
        result: future of the sampled tokens. The reader thread completes this future last, after `prompt_result`.
        logits: logits `[V, R]` for a sampling that waits for the tokens of the previous step (`Runner.sample_late`).
            None: no sampling waits.
        prompt_row: row of the prompt, if the step computes log-probabilities of a prompt. None: the step does not.
        prompt_result: future of the log-probabilities of the prompt. None if `prompt_row` is None.
        launched_at: time of the launch, a value of `time.perf_counter()`.
    """

    rows: tuple[Row, ...]
    sampled: list[Row]
    decodes: bool
    result: "Future[np.ndarray]" = field(default_factory=Future)
    logits: jax.Array | None = None
    prompt_row: Row | None = None
    prompt_result: "Future[np.ndarray] | None" = None
    launched_at: float = field(default_factory=time.perf_counter)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens that the step computes in chunks of prompts (rows with more than one token)."""
        return 0 if self.decodes else sum(row.length for row in self.rows if row.length > 1)

    @property
    def beside_decodes(self) -> bool:
        """Whether the step computes chunks of prompts and also decodes other sequences."""
        return not self.decodes and any(row.length == 1 for row in self.rows)

    @property
    def done(self) -> bool:
        return self.result.done()

    def drop(self) -> None:
        """Record that the results of the step are lost.

        If the sampling is not launched yet, complete `result` with an error. Otherwise, the reader thread completes
        `result`.
        """
        if self.logits is not None:
            self.result.set_exception(RuntimeError("a step before this step has failed"))


class ResultReader:
    """Thread that reads results from devices, in the order of the calls of `read` and `when_ready`.

    Args:
        name: name of the thread.
        on_result: function that the thread calls after each result. The function must not block.
    """

    def __init__(self, name: str, on_result: Callable[[], None]):
        self._on_result = on_result
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def read(self, array: jax.Array, result: "Future[np.ndarray] | None" = None) -> "Future[np.ndarray]":
        """Let the thread copy an array `[rows, ...]` to the host. Return a future of the copy, `[rows, values]`.

        In the copy, all axes after the first axis are joined into one. The returned future is `result`, or a new future
        if `result` is None.
        """
        return self._submit(lambda: np.asarray(array).reshape(len(array), -1), result)

    def when_ready(self, arrays: list[jax.Array]) -> "Future[Any]":
        """Return a future that is done when the arrays are computed.

        Before the future is done, do not donate the arrays to a program.
        """
        return self._submit(lambda: jax.block_until_ready(arrays))

    def _submit(self, call: Callable[[], Any], future: "Future[Any] | None" = None) -> "Future[Any]":
        future = future or Future()
        self._thread.submit(self._run, call, future)
        return future

    def _run(self, call: Callable[[], Any], future: "Future[Any]") -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        self._on_result()

    def close(self, wait: bool) -> None:
        """End the thread after it has read all requested results. If `wait`, return only after the thread has ended."""
        self._thread.shutdown(wait=wait)
