"""Waits for the device, in a thread that launches nothing."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np


class ResultReader:
    """Copies results to the host in the order of the calls.

    Args:
        name: of its thread.
        on_result: called in its thread whenever a result has arrived; must not block.
    """

    def __init__(self, name: str, on_result: Callable[[], None]):
        self._on_result = on_result
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def read(self, array: jax.Array) -> "Future[np.ndarray]":
        """Copy a result `[rows, ...]` to the host, as `[rows, values of each]`."""
        return self._submit(lambda: np.asarray(array).reshape(len(array), -1))

    def when_ready(self, arrays: list[jax.Array]) -> "Future[Any]":
        """Done when arrays, which must not be donated before, have been computed."""
        return self._submit(lambda: jax.block_until_ready(arrays))

    def _submit(self, what: Callable[[], Any]) -> "Future[Any]":
        future = self._thread.submit(what)
        future.add_done_callback(lambda _: self._on_result())
        return future

    def close(self, wait: bool) -> None:
        """Take nothing any more. `wait` until what was asked for has been read."""
        self._thread.shutdown(wait=wait)
