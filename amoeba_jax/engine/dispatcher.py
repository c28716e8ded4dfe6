"""The one thread that launches programs.

Two threads that launch collective programs on different sub-meshes can dead-lock (measured on CPU; on GPU the order
of NCCL launches must agree across ranks). So every launch, on every instance, happens here; other threads hand in
calls and get futures.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from amoeba_jax.engine.engine import Engine

T = TypeVar("T")


class EngineClosedError(RuntimeError):
    """The engine was closed, or died of an earlier error."""


class Dispatcher:
    """Runs an `Engine` in a thread of its own: calls from other threads between steps, steps while there is work."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="amoeba-dispatcher", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """Run `function(*args)` in the dispatcher thread, between steps. Raises `EngineClosedError` if it is gone."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed is not None:
                raise EngineClosedError(f"the engine is closed: {self._closed}") from self._closed
            self._calls.put((lambda: function(*args), future))
        return future

    def close(self) -> None:
        """End running requests, stop the thread and free the device memory. May be called twice."""
        with self._lock:
            if self._closed is None:
                self._closed = EngineClosedError("close() was called")
                self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._serve_calls():
                if self._engine.has_work:
                    self._engine.step()
        except BaseException as error:  # donated buffers are lost with the step: nothing can go on
            with self._lock:
                self._closed = error
            self._engine.fail(error)
        else:
            self._engine.fail(EngineClosedError("the engine was closed"))
        finally:
            self._fail_pending_calls()
            self._engine.close()

    def _serve_calls(self) -> bool:
        """Serve what is queued; wait for something if there is nothing else to do. False: stop."""
        block = not self._engine.has_work
        while True:
            try:
                item = self._calls.get(block=block)
            except queue.Empty:
                return True
            if item is None:
                return False
            function, future = item
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            block = not self._engine.has_work

    def _fail_pending_calls(self) -> None:
        while True:
            try:
                item = self._calls.get(block=False)
            except queue.Empty:
                return
            if item is not None:
                item[1].set_exception(EngineClosedError("the engine was closed"))
