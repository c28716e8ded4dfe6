"""Compile a program, or load it from bytes."""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax import monitoring

from amoeba_jax.cpu_cache.program_cache import CacheEntry, without_jax_cache_writes
from amoeba_jax.cpu_cache.relocation import PortableProgram, disable_relocation

logger = logging.getLogger(__name__)

# JAX sends one compile event for each program that XLA compiles or that JAX's persistent cache holds. It sends none if
# the program is in JAX's memory. The event of a cache hit comes before the compile event of its program.
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


@dataclass(frozen=True)
class Obtained:
    """Compiled program and its origin.

    Attributes:
        compiled: executable for the requested devices.
        portable: the program as bytes, which load on other devices too. None: the program cannot be written as bytes.
        cached: whether the program was loaded from a cache or from bytes. False: XLA compiled the program.
        relocated: whether the program was loaded from the argument `portable` of `compile_or_load`.
    """

    compiled: jax.stages.Compiled
    portable: PortableProgram | None
    cached: bool
    relocated: bool


class _LatestProgram(threading.local):
    """Origin of the program that this thread compiled or loaded last, as JAX's events report it.

    Attributes:
        is_new: whether XLA compiled the last program. False: the program came from JAX's persistent cache.
        cache_hit: whether JAX has reported a cache hit for the program that this thread is compiling now.
    """

    is_new = False
    cache_hit = False


_latest = _LatestProgram()


def _on_duration(event: str, duration_secs: float, **_: object) -> None:
    if event == _COMPILE_EVENT:
        _latest.is_new, _latest.cache_hit = not _latest.cache_hit, False


def _on_event(event: str, **_: object) -> None:
    if event == _CACHE_HIT_EVENT:
        _latest.cache_hit = True


monitoring.register_event_duration_secs_listener(_on_duration)
monitoring.register_event_listener(_on_event)


def compile_or_load(
    compile: Callable[[], jax.stages.Compiled],
    devices: Sequence[jax.Device],
    *,
    model: str,
    program: str,
    portable: PortableProgram | None = None,
) -> Obtained:
    """Return a program for `devices`. Load it from `portable` or from the disk cache if possible.

    If the program cannot be loaded, it is compiled and written to the disk cache.

    Args:
        compile: function that compiles the program for `devices`.
        devices: devices that run the program.
        model: first part of the key in the disk cache: sizes of the model. "": the disk cache is not used.
        program: second part of the key: all other properties of the program, except its devices.
        portable: bytes of the same program, compiled for another group with the same number of devices. None: the
            program is looked up on disk.
    """
    entry = CacheEntry.of(model, program, devices)
    if portable is not None:
        try:
            return Obtained(portable.load(devices), portable, cached=True, relocated=True)
        except Exception as error:
            disable_relocation(error)
    elif entry is not None and (portable := entry.find()) is not None:
        try:
            return Obtained(portable.load(devices), portable, cached=True, relocated=False)
        except Exception as error:
            logger.warning("%s in the compile cache cannot be loaded (%s). It is compiled again", entry.key, error)
            entry.remove()
    with contextlib.nullcontext() if entry is None else without_jax_cache_writes():
        _latest.is_new = False
        compiled = compile()
    is_new = _latest.is_new
    portable = None
    # XLA gives no bytes, or bytes that do not work, of a program that it has not just compiled.
    if entry is not None and is_new and (portable := PortableProgram.of(compiled, devices)) is not None:
        entry.write(portable)
    return Obtained(compiled, portable, cached=not is_new, relocated=False)
