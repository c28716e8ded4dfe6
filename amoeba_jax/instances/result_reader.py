"""Thread that copies results to the host. It waits for the device, and launches nothing."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np


class ResultReader:
    """Thread that reads results in the order of the calls.

    Args:
        name: name of the thread.
        on_result: function that the thread calls after each result. It must not block.
    """

    def __init__(self, name: str, on_result: Callable[[], None]):
        self._on_result = on_result
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def read(self, array: jax.Array, result: "Future[np.ndarray] | None" = None) -> "Future[np.ndarray]":
        """Copy a result `[rows, ...]` to the host in the thread.

        The future returns an array with two axes: rows and values. It is `result`, or a new future.
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
        """End the thread after all requested results. If `wait`, wait for the end of the thread."""
        self._thread.shutdown(wait=wait)
