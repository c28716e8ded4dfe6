"""Task that polls the engine, updates the metrics, and detects failures of the engine."""

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from amoeba_jax.errors import EngineClosedError, EngineStuckError
from amoeba_jax.host_memory import trim_host_memory
from serving.runtime.metrics import ServerMetrics
from serving.runtime.snapshot import take_snapshot

if TYPE_CHECKING:
    from amoeba_jax import LLM

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
_TRIM_INTERVAL_S = 60.0


async def watch_engine(
    backend: "LLM", metrics: ServerMetrics, timeout_s: float, interval_s: float = INTERVAL_S
) -> EngineClosedError | EngineStuckError:
    """Copy the state of the engine into `metrics` every `interval_s` seconds until the engine fails. Return the error.

    An engine that has not answered for `timeout_s` seconds counts as failed.
    """
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, thread_name_prefix="amoeba-monitor")
    next_trim_s = time.monotonic() + _TRIM_INTERVAL_S
    try:
        while True:
            try:
                # Not `wait_for`: before Python 3.12 it loses a cancellation that arrives together with the answer.
                async with asyncio.timeout(timeout_s):
                    snapshot = await loop.run_in_executor(thread, take_snapshot, backend)
            except EngineClosedError as error:
                return error
            except TimeoutError:
                return EngineStuckError(
                    f"it has not answered for {timeout_s:g} s (engine_timeout_s): a device call does not return, or "
                    "a compilation takes longer"
                )
            except Exception:  # the engine is alive: try again after the interval
                logger.exception("the state of the engine could not be read")
                await asyncio.sleep(interval_s)
                continue
            metrics.latest = snapshot
            if time.monotonic() >= next_trim_s:
                # Messages of all sizes fragment the heap: without this, freed memory stays with the process and grows.
                await loop.run_in_executor(thread, trim_host_memory)
                next_trim_s = time.monotonic() + _TRIM_INTERVAL_S
            if metrics.ready_programs is None:
                metrics.ready_programs = snapshot.stats.awaited_programs
            await asyncio.sleep(interval_s)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
