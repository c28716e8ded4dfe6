"""How outputs get from the engine's threads to event loops."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

from amoeba_jax.request import Delivery, OutputThread, Request


class Loop(asyncio.SelectorEventLoop):
    """Counts how often it is woken up."""

    num_woken = 0

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        self.num_woken += 1
        return super().call_soon_threadsafe(callback, *args, context=context)


class Echo:
    """A request that delivers its updates as they are. The first waits until it may."""

    def __init__(self, deliver: Callable[[Delivery], None], may_begin: threading.Event):
        self._deliver, self._may_begin = deliver, may_begin

    def take(self, update: Any, _: Any) -> None:
        assert self._may_begin.wait(30)
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
