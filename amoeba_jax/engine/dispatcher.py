"""The one thread that launches programs.

Two threads that launch collective programs on different sub-meshes can dead-lock (measured on CPU; on GPU the order
of NCCL launches must agree across ranks). So every launch, on every instance, happens here; other threads hand in
calls and get futures.
"""

import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from amoeba_jax.engine.engine import Engine
from amoeba_jax.errors import EngineClosedError

T = TypeVar("T")


class Dispatcher:
    """Runs an `Engine` in a thread of its own: calls from other threads between steps, steps while there is work."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        # Reentrant: a finalizer that the garbage collector runs inside `call` may call again.
        self._lock = threading.RLock()
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
            traceback.clear_frames(error.__traceback__)  # they hold device buffers for as long as the error lives
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
            # Nothing may outlive its call while this waits for the next: it may hold an `LLM` that nobody else does.
            item = function = future = None
            block = not self._engine.has_work

    def _fail_pending_calls(self) -> None:
        while True:
            try:
                item = self._calls.get(block=False)
            except queue.Empty:
                return
            if item is not None:
                error = EngineClosedError(f"the engine is closed: {self._closed}")
                error.__cause__ = self._closed
                item[1].set_exception(error)
