"""A step of an instance: its plan, its inputs, the launched step, and the thread that reads the results.

A step is one pass of the instance's sequences through the model.
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
    """Error: a step could not be prepared. Nothing has changed. The reason is `__cause__`."""


class Row(NamedTuple):
    """One sequence in a step. The step computes the sequence's tokens `start` to `start + length - 1`.

    Attributes:
        place: index of the row in the batch.
    """

    place: int
    sequence: Sequence
    start: int
    length: int

    @property
    def samples(self) -> bool:
        """Whether the step samples the next token of the sequence.

        The step samples if the row contains the sequence's last token. A chunk before the end of a prompt samples
        nothing.
        """
        return self.stop == self.sequence.num_tokens

    @property
    def stop(self) -> int:
        return self.start + self.length


def drop_sample(row: Row) -> None:
    """Cancel the sampling of a row whose sequence has ended or was preempted. The sampling must not be launched yet.

    If the sequence was preempted, it samples the token after its restart.
    """
    sequence = row.sequence
    sequence.num_in_flight -= 1
    if (pages := sequence.host_pages) is not None:
        pages.num_computed = min(pages.num_computed, sequence.num_tokens - 1)


def clear_in_flight(sampled: Iterable[Row]) -> None:
    """Forget the sampled tokens that the host has not read, because these tokens are lost.

    Args:
        sampled: rows whose next token a step has sampled. Do not pass other rows of the step. Their sequences may have
            been preempted, and may now have tokens in flight on another instance.
    """
    for row in sampled:
        row.sequence.num_in_flight = 0
        row.sequence.host_pages = None  # they may count the lost token as known


@dataclass(frozen=True)
class StepPlan:
    """Contents of a step.

    Attributes:
        shape: static shape of the batch.
        rows: sequences in the step.
        logits_of: tokens whose logits the step computes. "all": all tokens. "last": the last token of each row.
        lane: index of the lane, if the step has only one lane. None: the step has equally many rows for each lane.
    """

    shape: BatchShape
    rows: tuple[Row, ...]
    logits_of: LogitsOf = "last"
    lane: int | None = None

    @property
    def decodes(self) -> bool:
        """Whether the step only decodes: every row has one token, and no prompt is computed."""
        return self.shape.num_tokens == self.shape.num_rows

    def batch(self, lanes: SequenceOf[Lane], home: Home, blocks: Blocks | None, shape: BatchShape, /) -> StepBatch:
        """Return the inputs of the step for one home (device group).

        Args:
            lanes: lanes of the instance. The block tables come from these lanes.
            blocks: indices of the microbatches that the home computes. The inputs have the rows of these microbatches
                side by side. None: the home computes all rows of the plan.
            shape: shape of the rows that the home computes.
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
            if stop > sequence.num_known:  # only the last token can be unknown
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
        """Return the rows of the microbatches `blocks`, with new places.

        The new places are for a batch that has only these microbatches, side by side in the order of `blocks`.
        """
        width = self.shape.num_rows // num_lanes
        first = {block: index * width for index, block in enumerate(blocks)}
        places = [(row, *divmod(row.place, width)) for row in self.rows]
        return [row._replace(place=first[block] + place) for row, block, place in places if block in first]


@dataclass(eq=False)
class PendingStep:
    """Launched step whose results the host has not taken.

    Attributes:
        rows: all rows of the step.
        sampled: rows whose next token the step samples.
        decodes: whether all rows decode. False if layers change their degree or home during the step.
        result: future of the sampled tokens. This is the last result that the reader thread reads for the step.
        logits: logits `[V, R]` of a step whose sampling is not launched yet, because it needs the tokens of the
            previous step (`Runner.sample_late`). None: the sampling is launched.
        prompt_row: row of a prompt whose log-probabilities the step computes. None: there is no such prompt.
        prompt_result: future of the log-probabilities of `prompt_row`.
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
        """Number of prompt tokens in the step. 0 if all rows decode."""
        return 0 if self.decodes else sum(row.length for row in self.rows if row.length > 1)

    @property
    def beside_decodes(self) -> bool:
        """Whether the step computes prompts and also decodes."""
        return not self.decodes and any(row.length == 1 for row in self.rows)

    @property
    def done(self) -> bool:
        return self.result.done()

    def drop(self) -> None:
        """Record that the results of the step are lost.

        If the sampling is not launched yet, `result` gets an error, because nothing else would complete the future.
        """
        if self.logits is not None:
            self.result.set_exception(RuntimeError("a step before this step has failed"))


class ResultReader:
    """Thread that reads results from devices, in the order in which `read` and `when_ready` are called.

    Args:
        name: name of the thread.
        on_result: function that the thread calls after each result. It must not block.
    """

    def __init__(self, name: str, on_result: Callable[[], None]):
        self._on_result = on_result
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def read(self, array: jax.Array, result: "Future[np.ndarray] | None" = None) -> "Future[np.ndarray]":
        """Let the thread copy an array `[rows, ...]` to the host. Return a future of the copy, `[rows, values]`.

        All axes of the array except the first become one axis. The returned future is `result`, or a new future if
        `result` is None.
        """
        return self._submit(lambda: np.asarray(array).reshape(len(array), -1), result)

    def when_ready(self, arrays: list[jax.Array]) -> "Future[Any]":
        """Return a future that is done when the arrays are computed.

        Until then, do not donate the arrays to a program.
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
        """Let the thread read all requested results and then end. If `wait`, wait until the thread has ended."""
        self._thread.shutdown(wait=wait)
