"""Dispatcher thread: the only thread that launches programs.

One thread launches the programs of all instances, for two reasons. On CPU, two threads can deadlock if they launch
collective programs on different device groups (measured). On GPU, all ranks must launch their NCCL programs in one
common order.

Other threads use `Dispatcher.call` to run a function in the dispatcher thread. `Dispatcher.call` returns a future.
"""

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from amoeba_jax.engine.engine import Engine
from amoeba_jax.errors import EngineClosedError
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.output_thread import OutputThread

T = TypeVar("T")
_WAKE = object()  # item in the queue of calls: only start the next turn of the loop


class Dispatcher:
    """Thread that runs the loop of an `Engine`, and runs functions for other threads.

    Attributes:
        outputs: thread that converts new tokens of sequences to outputs of requests.
        num_held: number of turns of the loop that launched nothing because `outputs` had too much left to convert.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()  # items: (function, future), _WAKE, or None to stop
        # Reentrant: the garbage collector may run a finalizer inside `call`, and the finalizer may use `call` too.
        self._lock = threading.RLock()
        self._closed: BaseException | None = None
        self.num_held = 0
        self.outputs = OutputThread(self._end_early, self.wake)
        # Other threads read results and compile programs. They wake the dispatcher thread after each result or program.
        engine.cluster.factory.on_result = engine.cluster.executables.background.on_arrival = self.wake
        self._thread = threading.Thread(target=self._run, name="amoeba-dispatcher", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """Let the dispatcher thread run `function(*args)` in the next turn of the loop. Return a future of the result.

        Raises `EngineClosedError` if `close` was called, or if the dispatcher thread has failed. Any thread may use
        `call`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed is not None:
                raise self._closed_error()
            self._calls.put((lambda: function(*args), future))
        return future

    def wake(self) -> None:
        """If the loop is waiting, start the next turn of the loop at once. Any thread may use `wake`."""
        self._calls.put(_WAKE)

    def close(self) -> None:
        """End all requests, stop the dispatcher thread and the output thread, and free the device memory.

        May be called more than once.
        """
        with self._lock:
            if self._closed is None:
                self._closed = EngineClosedError("close() was called")
                self._engine.closing = True  # the present call may be a warm-up, which ends early
                self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.outputs.close()

    def _run(self) -> None:
        """Run the loop of the engine (module `engine`) until `close` is called or an error occurs."""
        engine = self._engine
        try:
            timeout_s = engine.interval_s
            while self._serve_calls(timeout_s):
                engine.collect()
                if self.outputs.behind:
                    self.num_held += 1
                    timeout_s = None
                else:
                    timeout_s = 0.0 if engine.advance() else engine.interval_s
        except BaseException as error:  # donated buffers may be lost, so the loop cannot continue
            with self._lock:
                self._closed = error
            engine.fail(error)
            traceback.clear_frames(error.__traceback__)  # the frames hold device buffers as long as the error lives
        else:
            engine.fail(EngineClosedError("the engine was closed"))
        finally:
            self._fail_pending_calls()
            engine.close()

    def _serve_calls(self, timeout_s: float | None) -> bool:
        """Wait until another thread uses `call`, `wake` or `close`. Then run the functions that were passed to `call`.

        Wait at most `timeout_s` seconds, or without limit if `timeout_s` is None. Return False if the loop must stop.
        """
        block = True
        while True:
            try:
                item = self._calls.get(block=block, timeout=timeout_s)
            except queue.Empty:
                return True
            block = False
            if item is None:
                return False
            if item is _WAKE:
                continue
            function, future = item
            # The caller may have cancelled the future. After this line, the caller can no longer cancel it.
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
            # Drop `function` before waiting for the next call. It may hold the last reference to an `LLM`.
            item = function = future = None

    def _fail_pending_calls(self) -> None:
        while True:
            try:
                item = self._calls.get(block=False)
            except queue.Empty:
                return
            if item is not None and item is not _WAKE and item[1].set_running_or_notify_cancel():
                item[1].set_exception(self._closed_error())

    def _closed_error(self) -> EngineClosedError:
        error = EngineClosedError(f"the engine is closed: {self._closed}")
        error.__cause__ = self._closed
        return error

    def _end_early(self, sequence: Sequence, stop: str | None) -> None:
        """Ask the engine to end a sequence early. Return at once, before the sequence has ended.

        `stop` is the stop string that was found in the output. If `stop` is None, the sequence is aborted.
        """
        with contextlib.suppress(EngineClosedError):
            self.call(self._engine.sequences.finish, [sequence], "abort" if stop is None else "stop", stop)
