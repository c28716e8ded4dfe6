"""Child process that runs a function and exchanges messages with its parent."""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import Any


class ChildError(RuntimeError):
    """Error of a process that has ended or does not answer in time."""


class Child:
    """Child process that runs `function(pipe, *arguments)` until `close` is called.

    The function uses `pipe` to exchange messages with `send` and `receive` of this object. `nice`: niceness of the
    process on Linux.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any, nice: int = 0):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=function, args=(theirs, *arguments), daemon=True)
        # On Linux a thread has its own priority, and a new process inherits it.
        starter = threading.Thread(target=self._start, args=(nice,))
        starter.start()
        starter.join()
        theirs.close()

    def _start(self, nice: int) -> None:
        if nice and sys.platform == "linux":
            os.nice(nice)
        self._process.start()

    def send(self, message: Any) -> None:
        """Send a message. Raises `ChildError` if the process has ended."""
        try:
            self._pipe.send(message)
        except OSError as error:
            raise ChildError("the process has ended") from error

    def receive(self, timeout_s: float) -> Any:
        """Return the next message. Raises `ChildError` if the process has ended or sends no message in time."""
        try:
            if self._pipe.poll(timeout_s):
                return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ChildError("the process has ended") from error
        raise ChildError(f"the process has not answered within {timeout_s:g} s")

    def close(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
