"""Threads for slow work and for calls of the engine, outside the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

MAX_TRANSFORM_CALLS = 4
"""Maximum number of calls that run or wait for a transformation at the same time."""
# Texts of at least this length are tokenized one at a time, so that threads stay free for short texts.
_LONG_TEXT_CHARS = 32_768


class Threads:
    """Thread pools, one for each kind of work, so that no kind waits for another."""

    def __init__(self) -> None:
        self.tokenizing = ThreadPoolExecutor(2, thread_name_prefix="amoeba-tokenize")
        self.tokenizing_long = ThreadPoolExecutor(1, thread_name_prefix="amoeba-tokenize-long")
        self.control = ThreadPoolExecutor(4, thread_name_prefix="amoeba-control")
        self.transforming = ThreadPoolExecutor(MAX_TRANSFORM_CALLS, thread_name_prefix="amoeba-transform")
        self.aborting = ThreadPoolExecutor(2, thread_name_prefix="amoeba-abort")

    def run(self, pool: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> "asyncio.Future[T]":
        """Call a function in a thread of a pool. Return a future with its result."""
        return asyncio.get_running_loop().run_in_executor(pool, function, *args)

    def tokenize(self, length: int, function: Callable[[], T]) -> "asyncio.Future[T]":
        """Call a function that tokenizes a text of `length` characters. Return a future with its result.

        Long texts have their own thread, so that short texts do not wait for long texts.
        """
        return self.run(self.tokenizing if length < _LONG_TEXT_CHARS else self.tokenizing_long, function)

    def close(self) -> None:
        """Stop the threads. Calls that have started still complete."""
        for pool in (self.tokenizing, self.tokenizing_long, self.control, self.transforming, self.aborting):
            pool.shutdown(wait=False, cancel_futures=True)
