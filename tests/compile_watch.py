"""Counter of programs that JAX compiles, or loads from its compilation cache."""

from types import TracebackType
from typing import Any

from jax import monitoring

# One event for each program, compiled by XLA or loaded from the persistent cache.
_PROGRAM = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


class CompileWatch:
    """Counter of programs in a context: `with CompileWatch() as watch: ...; watch.programs`.

    Attributes:
        programs: number of programs, compiled or loaded.
        cached: number of programs from the persistent cache.
        seconds: time in XLA without tracing, summed over threads.
    """

    def __init__(self) -> None:
        self.programs = 0
        self.cached = 0
        self.seconds = 0.0

    def __enter__(self) -> "CompileWatch":
        monitoring.register_event_duration_secs_listener(self._on_duration)
        monitoring.register_event_listener(self._on_event)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        monitoring.unregister_event_duration_listener(self._on_duration)
        monitoring.unregister_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _PROGRAM:
            self.programs += 1
            self.seconds += duration_secs

    def _on_event(self, event: str, **_: Any) -> None:
        if event == _CACHE_HIT:
            self.cached += 1
