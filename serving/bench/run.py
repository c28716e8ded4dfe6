"""`amoeba bench`: connect to a server, run the load, and print and save the report."""

import asyncio
import contextlib
import signal
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import grpc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from amoeba_jax.client import AsyncClient, ModelInfo
from serving.bench.cluster_watch import ClusterWatch
from serving.bench.load import Load, LoadConfig, Outcome, Record
from serving.bench.options import BenchConfig
from serving.bench.plot import save_plot
from serving.bench.report import Run, make_report, result_path, save_report
from serving.bench.table import print_report
from serving.bench.workload import PlannedRequest, plan_requests
from serving.errors import EXIT_FAILURE, EXIT_INTERRUPTED, say


def run_bench(config: BenchConfig) -> int:
    """Run a benchmark, print and save its report, and return the exit code.

    The exit code is 0 if at least one request completed, 1 if none completed, and 130 after Ctrl-C. Raises
    `ConfigError` for invalid settings, and `grpc.RpcError` if the server does not answer.
    """
    run = asyncio.run(_run(config))
    output = config.output
    report = make_report(run, config.metrics, output.label, output.save_detailed)
    print_report(report, config.metrics, Console())
    if output.wants_file:
        path = result_path(run, output.result_dir, output.result_filename)
        save_report(report, path)
        say(f"saved {path}")
    if output.plot is not None:
        save_plot(run, output.plot)
        say(f"saved {output.plot}")
    if run.interrupted:
        return EXIT_INTERRUPTED
    return 0 if report["completed"] else EXIT_FAILURE


async def _run(config: BenchConfig) -> Run:
    connection, workload = config.connection, config.workload
    load_config = replace(config.load, request_id_prefix=f"{config.load.request_id_prefix}{uuid.uuid4().hex[:8]}-")
    async with connection.open() as client, connection.open(admin=True) as admin:
        model = await _wait_for_model(client, connection.ready_timeout_s)
        requests = plan_requests(workload, model.max_model_len)
        with _stop_signals() as stop:
            if config.num_warmups:
                await _warm_up(client, model, load_config, requests[0], config.num_warmups, stop)
            load, watch = Load(client, model, load_config), ClusterWatch()
            date = datetime.now()
            with _progress(len(requests)) as progress:
                watching = asyncio.ensure_future(watch.follow(admin, connection.watch_interval_s, load.clock))
                try:
                    duration_s = await load.run(requests, stop, progress)
                finally:
                    watching.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await watching
        return Run(
            date=date,
            model=model,
            workload=workload,
            load=load_config,
            num_planned=len(requests),
            records=load.records,
            duration_s=duration_s,
            watch=watch,
            interrupted=stop.is_set(),
        )


async def _wait_for_model(client: AsyncClient, timeout_s: float) -> ModelInfo:
    """Wait up to `timeout_s` seconds until the server is available, and return its model.

    Raises `grpc.aio.AioRpcError` if the server is unavailable for longer. Any other error is raised at once.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + timeout_s
    while True:
        try:
            return await client.model_info(timeout_s=30.0)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or clock() >= end:
                raise
        await asyncio.sleep(min(1.0, max(end - clock(), 0.0)))


async def _warm_up(
    client: AsyncClient, model: ModelInfo, config: LoadConfig, first: PlannedRequest, number: int, stop: asyncio.Event
) -> None:
    """Send the first request `number` times before the run. Print a warning if some of these requests fail."""
    load = Load(client, model, replace(config, request_id_prefix=f"{config.request_id_prefix}warmup-"))
    await load.run([replace(first, index=i, arrival_s=0.0) for i in range(number)], stop)
    failed = [record for record in load.records if record.outcome is Outcome.FAILED]
    if failed:
        say(
            f"warning: {len(failed)} of {number} warm-up requests failed, the first with {failed[0].status}: "
            f"{failed[0].error}"
        )


@contextlib.contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """Yield an event that is set by the first SIGINT or SIGTERM. A second signal then acts as usual."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, handlers[number])

    def on_signal() -> None:
        say("stopping: cancelling running requests")
        stop.set()
        restore()

    try:
        for number in numbers:
            loop.add_signal_handler(number, on_signal)
    except (RuntimeError, ValueError):  # Not in the main thread, which alone receives signals.
        yield stop
        return
    try:
        yield stop
    finally:
        restore()


class _Counter:
    """Counter of ended requests in a progress bar. Call the object with the record of each request that has ended."""

    def __init__(self, progress: Progress, total: int):
        self._progress = progress
        self._task = progress.add_task("requests", total=total, tokens=0, failed=0)
        self._tokens = self._failed = 0

    def __call__(self, record: Record) -> None:
        self._tokens += record.output_tokens
        self._failed += record.outcome is Outcome.FAILED
        self._progress.update(self._task, advance=1, tokens=self._tokens, failed=self._failed)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[_Counter]:
    """Show a progress bar for `total` requests while the context is open. Yield its counter.

    The bar is hidden if stderr is not a terminal.
    """
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed, {task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        yield _Counter(progress, total)
