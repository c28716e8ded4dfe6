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
from functools import partial
from typing import Any, Protocol, TypeVar

from amoeba_jax.engine.engine import Engine
from amoeba_jax.errors import EngineClosedError

T = TypeVar("T")
_RESULT = object()  # in the queue of calls: a result has arrived, or there may be something to launch


class Hold(Protocol):
    """Tells whether launching must pause."""

    @property
    def behind(self) -> bool:
        """No more steps should be launched until `Dispatcher.wake` is called."""
        ...


class Dispatcher:
    """Runs an `Engine` in a thread of its own: calls from other threads between launches, steps while there is work.

    Attributes:
        hold: asked before steps are launched: what takes in the tokens may be behind.
        num_held: times that it was.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()  # (function, future), _RESULT, or None to stop
        # Reentrant: a finalizer that the garbage collector runs inside `call` may call again.
        self._lock = threading.RLock()
        self._closed: BaseException | None = None
        self.hold: Hold | None = None
        self.num_held = 0
        # Waiting for the device happens in threads that launch nothing.
        engine.on_result = partial(self._calls.put, _RESULT)
        self._thread = threading.Thread(target=self._run, name="amoeba-dispatcher", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """Run `function(*args)` in the dispatcher thread, between launches.

        Raises `EngineClosedError` if it is gone.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed is not None:
                raise EngineClosedError(f"the engine is closed: {self._closed}") from self._closed
            self._calls.put((lambda: function(*args), future))
        return future

    def wake(self) -> None:
        """Let the thread look again whether there is something to launch. May be called from any thread."""
        self._calls.put(_RESULT)

    def close(self) -> None:
        """End running requests, stop the thread and free the device memory. May be called twice."""
        with self._lock:
            if self._closed is None:
                self._closed = EngineClosedError("close() was called")
                self._engine.closing = True  # the call that runs now may be a long one
                self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        timeout_s = self._engine.interval_s
        try:
            while self._serve(timeout_s):
                self._engine.collect()
                if self.hold is not None and self.hold.behind:
                    self.num_held += 1
                    timeout_s = None
                else:
                    launched = self._engine.advance()
                    timeout_s = 0.0 if launched else self._engine.interval_s
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

    def _serve(self, timeout_s: float | None) -> bool:
        """Wait for a call or a result, no longer than that, and serve all calls that are queued. False: stop."""
        block = True
        while True:
            try:
                item = self._calls.get(block=block, timeout=timeout_s)
            except queue.Empty:
                return True
            block = False
            if item is None:
                return False
            if item is _RESULT:
                continue
            function, future = item
            # Its caller may have been cancelled, and no one wants the call any more. From here on it cannot be.
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
            # Nothing may outlive its call while this waits for the next: it may hold an `LLM` that no one else does.
            item = function = future = None

    def _fail_pending_calls(self) -> None:
        while True:
            try:
                item = self._calls.get(block=False)
            except queue.Empty:
                return
            if item is not None and item is not _RESULT:
                error = EngineClosedError(f"the engine is closed: {self._closed}")
                error.__cause__ = self._closed
                if item[1].set_running_or_notify_cancel():
                    item[1].set_exception(error)
