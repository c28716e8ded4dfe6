"""Delivery of outputs from the engine's threads to event loops."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from amoeba_jax.instances.sequence import Entries, Sequence, Update
from amoeba_jax.output_thread import MAX_BACKLOG, OutputThread
from amoeba_jax.outputs import RequestDelta
from amoeba_jax.request import Delivery, Request
from amoeba_jax.sampling.rows import TokenLogprobs, sampling_row
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.tokenizer import Tokenizer


class Loop(asyncio.SelectorEventLoop):
    """Event loop that counts its wake-ups."""

    num_woken = 0

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        self.num_woken += 1
        return super().call_soon_threadsafe(callback, *args, context=context)


class Echo:
    """A request that delivers its updates unchanged. It waits for `may_begin`."""

    def __init__(self, deliver: Callable[[Delivery], None], may_begin: threading.Event):
        self.id, self.inbox = "echo", deque()
        self._deliver, self._may_begin = deliver, may_begin

    def take(self, updates: list[Any], _: Any) -> None:
        assert self._may_begin.wait(30)
        for update in updates:
            self._deliver(update)


class Number(int):
    """A numbered update. It has one token, or log-probabilities of a prompt."""

    prompt_logprobs: Entries | None = None


def run(loops: list[Loop], num_updates: int) -> list[list[Any]]:
    """Queue all updates before the thread takes the first. Return the updates that each loop gets."""
    outputs, may_begin = OutputThread(lambda *_: None), threading.Event()
    arrived: list[list[Any]] = [[] for _ in loops]
    for number in range(num_updates):
        for loop, got in zip(loops, arrived, strict=True):
            echo = Echo(outputs.in_loop(loop, got.append), may_begin)
            outputs.put(cast(Request, echo), cast(Any, Number(number)))
    may_begin.set()
    outputs.close()
    for loop in loops:
        if not loop.is_closed():
            loop.call_soon(loop.stop)
            loop.run_forever()
            loop.close()
    return arrived


def test_one_wake_up_brings_all_that_has_come():
    loops = [Loop(), Loop()]
    assert run(loops, 50) == [list(range(50))] * 2
    assert [loop.num_woken for loop in loops] == [1, 1]


def test_loops_are_woken_up_before_the_last_of_many():
    (loop,) = loops = [Loop()]
    assert run(loops, 600) == [list(range(600))]
    assert loop.num_woken == 3


def test_a_closed_loop_keeps_nothing_from_others():
    loops = [Loop(), Loop()]
    loops[0].close()
    assert run(loops, 3) == [[], [0, 1, 2]]


def test_a_request_waits_for_one_turn_of_every_other_and_no_more():
    """3,000 updates of another request are queued before it."""
    outputs, may_begin = OutputThread(lambda *_: None), threading.Event()
    order: list[str] = []
    busy, quiet = (
        Echo(lambda _, name=name: order.append(name), may_begin)  # type: ignore[misc]
        for name in ("busy", "quiet")
    )
    for number in range(3000):
        outputs.put(cast(Request, busy), cast(Any, Number(number)))
    outputs.put(cast(Request, quiet), cast(Any, Number(0)))
    may_begin.set()
    outputs.close()
    assert order.count("busy") == 3000
    assert order.index("quiet") <= 2 * 64  # the current turn and one more


def test_the_backlog_is_bounded_and_says_when_there_is_room_again():
    may_begin, has_room = threading.Event(), threading.Event()
    outputs = OutputThread(lambda *_: None, has_room.set)
    echo = Echo(lambda _: None, may_begin)
    assert not outputs.behind
    for number in range(MAX_BACKLOG + 64):
        outputs.put(cast(Request, echo), cast(Any, Number(number)))
    assert outputs.behind
    assert outputs.backlog >= MAX_BACKLOG
    assert not has_room.is_set()
    may_begin.set()
    assert has_room.wait(30)
    outputs.close()
    assert (outputs.behind, outputs.backlog) == (False, 0)


def of_prompt(num_positions: int, k: int) -> Number:
    """Return an update with log-probabilities of `num_positions` tokens, and of the `k` most likely tokens at each."""
    update, every = Number(), (num_positions, 20)
    logprobs = TokenLogprobs(
        np.zeros(num_positions, np.float32),
        np.ones(num_positions, np.int32),
        np.tile(np.arange(20, dtype=np.int32), (num_positions, 1)),
        np.zeros(every, np.float32),
    )
    update.prompt_logprobs = Entries(logprobs, 0, (5,) * num_positions, k)
    return update


def test_log_probabilities_of_a_prompt_count_by_their_entries():
    """A few such updates count as thousands of tokens, both in the backlog and in a turn."""
    may_begin = threading.Event()
    outputs, order = OutputThread(lambda *_: None), []
    busy, quiet = (
        Echo(lambda _, name=name: order.append(name), may_begin)  # type: ignore[misc]
        for name in ("busy", "quiet")
    )
    for number in range(5):
        assert number > 3 or not outputs.behind
        outputs.put(cast(Request, busy), cast(Any, of_prompt(64, 20)))  # the thread may take the first at once
    outputs.put(cast(Request, quiet), cast(Any, Number(0)))
    assert outputs.behind
    may_begin.set()
    outputs.close()
    assert order.count("busy") == 5
    assert order.index("quiet") <= 2
    assert outputs.backlog == 0


def test_log_probabilities_of_a_prompt_are_delivered_as_they_come():
    """A streamed request gets them before its first token. Other requests get them at the end."""
    params, spy, at_once = SamplingParams(max_tokens=2, prompt_logprobs=1, n=2), Spy(), Spy()
    row = sampling_row(params, 0, 16, ())
    sequences = [Sequence("r", (1, *[5] * 8), params, row, lambda _: None, index=index) for index in range(2)]
    streamed = Request(None, sequences, None, spy, every_token=True)
    whole = Request(None, sequences, None, at_once, every_token=False)
    chunk = of_prompt(4, 1).prompt_logprobs
    for request in (streamed, whole):
        for _ in range(2):
            request.take([Update(sequences[0], prompt_logprobs=chunk)], lambda *_: None)
    for sequence in sequences:
        sequence.finish_reason = "length"
    for request in (streamed, whole):
        request.take([Update(sequence, (3,), finished=True) for sequence in sequences], lambda *_: None)
    assert [(len(it.prompt_logprobs), len(it.completions)) for it in spy.deltas] == [(5, 0), (4, 0), (0, 2)]
    assert spy.deltas[0].prompt_logprobs[0] is None
    assert [(len(it.prompt_logprobs), len(it.completions)) for it in at_once.deltas] == [(9, 2)]


class Spy:
    """Records the deliveries of a request."""

    def __init__(self) -> None:
        self.deltas: list[RequestDelta] = []

    def __call__(self, delivery: Delivery) -> None:
        assert isinstance(delivery, RequestDelta)
        self.deltas.append(delivery)


def test_work_for_a_token_does_not_grow_with_samples_or_length():
    """The delivery for a step contains only the tokens of that step: no other samples and no earlier tokens."""
    params, spy = SamplingParams(n=64, max_tokens=200, logprobs=2), Spy()
    row = sampling_row(params, 0, 16, ())
    sequences = [Sequence("r", (1, 2), params, row, lambda _: None, index=index) for index in range(64)]
    request = Request(None, sequences, None, spy, every_token=True)
    logprobs = TokenLogprobs(
        np.zeros(1, np.float32), np.ones(1, np.int32), np.zeros((1, 20), np.int32), np.zeros((1, 20), np.float32)
    )
    for number in range(100):
        sequence = sequences[number % 3]
        request.take([Update(sequence, (5,), Entries(logprobs, 0, (5,), 2))], lambda *_: None)
    assert len(spy.deltas) == 100
    for delta in spy.deltas:
        assert [(len(c.token_ids), len(c.logprobs or ())) for c in delta.completions] == [(1, 1)]


def test_updates_of_one_step_are_one_output():
    params, spy = SamplingParams(n=8, max_tokens=200), Spy()
    row = sampling_row(params, 0, 16, ())
    sequences = [Sequence("r", (1, 2), params, row, lambda _: None, index=index) for index in range(8)]
    request = Request(None, sequences, None, spy, every_token=True)
    request.take([Update(s, (token,)) for token in (4, 5, 6) for s in sequences], lambda *_: None)
    assert [[c.token_ids for c in delta.completions] for delta in spy.deltas] == [[(t,)] * 8 for t in (4, 5, 6)]


def test_text_begins_with_the_space_of_its_first_word(shared_data):
    tokenizer, spy = Tokenizer.from_directory(shared_data / "models" / "stories15M"), Spy()
    prompt, ids = tokenizer.encode("The sea is"), tokenizer.encode("The sea is blue")
    sequence = Sequence("r", tuple(prompt), SamplingParams(), sampling_row(SamplingParams(), 0, 16, ()), lambda _: None)
    request = Request("The sea is", [sequence], tokenizer, spy, every_token=True)
    request.take([Update(sequence, tuple(ids[len(prompt) :]))], lambda *_: None)
    assert [delta.completions[0].text for delta in spy.deltas] == [" blue"]


def test_a_request_ends_when_its_last_token_came():
    """The end is the time of the last token, not the time at which this thread handles it.

    This thread itself finds stop strings. They end a request now.
    """
    spy, params = Spy(), SamplingParams(max_tokens=3, n=2)
    row = sampling_row(params, 0, 16, ())
    sequences = [Sequence("r", (1, 2), params, row, lambda _: None, index=index, arrival=100.0) for index in range(2)]
    request = Request(None, sequences, None, spy, every_token=True)
    for sequence, finished_at in zip(sequences, (110.0, 109.0), strict=True):
        for token in (3, 4, 5):
            sequence.append(token)
        sequence.first_token_at, sequence.finished_at = 104.0, finished_at
    request.take([Update(sequence, (3, 4, 5), finished=True) for sequence in sequences], lambda *_: None)
    assert request.finished
    metrics = spy.deltas[-1].metrics
    assert (metrics.ttft_s, metrics.e2e_s, metrics.tpot_s) == (4.0, 10.0, 3.0)
    sequences[1].finished_at = None
    assert request._ended_at() == pytest.approx(time.monotonic(), abs=60)
