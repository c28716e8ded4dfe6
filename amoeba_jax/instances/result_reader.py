"""Copies results to the host in a thread, which waits for the device and launches nothing."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np


class ResultReader:
    """Reads results in the order of the calls.

    Args:
        name: name of the thread.
        on_result: called in the thread after each result; must not block.
    """

    def __init__(self, name: str, on_result: Callable[[], None]):
        self._on_result = on_result
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def read(self, array: jax.Array) -> "Future[np.ndarray]":
        """Copy a result `[rows, ...]` to the host, as `[rows, values of each]`."""
        return self._submit(lambda: np.asarray(array).reshape(len(array), -1))

    def when_ready(self, arrays: list[jax.Array]) -> "Future[Any]":
        """Return a future that ends when arrays are computed. No program may take them donated before."""
        return self._submit(lambda: jax.block_until_ready(arrays))

    def _submit(self, call: Callable[[], Any]) -> "Future[Any]":
        future = self._thread.submit(call)
        future.add_done_callback(lambda _: self._on_result())
        return future

    def close(self, wait: bool) -> None:
        """End the thread after the results that were requested. `wait`: return only then."""
        self._thread.shutdown(wait=wait)
