"""How outputs get from the engine's threads to event loops."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from amoeba_jax.instances.sequence import Entries, Sequence, Update
from amoeba_jax.output_thread import MAX_BACKLOG, OutputThread
from amoeba_jax.outputs import RequestDelta
from amoeba_jax.request import Delivery, Request
from amoeba_jax.sampling.rows import TokenLogprobs, sampling_row
from amoeba_jax.sampling_params import SamplingParams


class Loop(asyncio.SelectorEventLoop):
    """Counts how often it is woken up."""

    num_woken = 0

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        self.num_woken += 1
        return super().call_soon_threadsafe(callback, *args, context=context)


class Echo:
    """A request that delivers its updates as they are. The first waits until it may."""

    def __init__(self, deliver: Callable[[Delivery], None], may_begin: threading.Event):
        self.id, self.inbox = "echo", deque()
        self._deliver, self._may_begin = deliver, may_begin

    def take(self, updates: list[Any], _: Any) -> None:
        assert self._may_begin.wait(30)
        for update in updates:
            self._deliver(update)


def run(loops: list[Loop], num_updates: int) -> list[list[Any]]:
    """What each loop gets of updates that are all queued before the first is taken."""
    outputs, may_begin = OutputThread(lambda *_: None), threading.Event()
    arrived: list[list[Any]] = [[] for _ in loops]
    for number in range(num_updates):
        for loop, got in zip(loops, arrived, strict=True):
            echo = Echo(outputs.in_loop(loop, got.append), may_begin)
            outputs.put(cast(Request, echo), cast(Any, number))
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
    """However much of another request is queued before it."""
    outputs, may_begin = OutputThread(lambda *_: None), threading.Event()
    order: list[str] = []
    busy, quiet = (
        Echo(lambda _, name=name: order.append(name), may_begin)  # type: ignore[misc]
        for name in ("busy", "quiet")
    )
    for number in range(3000):
        outputs.put(cast(Request, busy), cast(Any, number))
    outputs.put(cast(Request, quiet), cast(Any, 0))
    may_begin.set()
    outputs.close()
    assert order.count("busy") == 3000
    assert order.index("quiet") <= 2 * 64  # the turn that had begun, and one more


def test_the_backlog_is_bounded_and_says_when_there_is_room_again():
    may_begin, has_room = threading.Event(), threading.Event()
    outputs = OutputThread(lambda *_: None, has_room.set)
    echo = Echo(lambda _: None, may_begin)
    assert not outputs.behind
    for number in range(MAX_BACKLOG + 64):
        outputs.put(cast(Request, echo), cast(Any, number))
    assert outputs.behind
    assert outputs.backlog >= MAX_BACKLOG
    assert not has_room.is_set()
    may_begin.set()
    assert has_room.wait(30)
    outputs.close()
    assert (outputs.behind, outputs.backlog) == (False, 0)


class Spy:
    """Counts the tokens and samples in what a request delivers."""

    def __init__(self) -> None:
        self.deltas: list[RequestDelta] = []

    def __call__(self, delivery: Delivery) -> None:
        assert isinstance(delivery, RequestDelta)
        self.deltas.append(delivery)


def test_work_for_a_token_does_not_grow_with_samples_or_length():
    """What is delivered for a step has its tokens alone: not the other samples, nor what came before."""
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
