"""Rows, tables and time limits of `gpu.py`."""

import gc
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table


class OutOfTime(BaseException):
    """Error of a part whose time is used up. It derives from `BaseException`, so that `except Exception` does not catch
    it."""


class PartSkipped(Exception):
    """Error of a part that cannot run on this machine. Its message is the reason."""


@dataclass(frozen=True)
class KernelRow:
    """Time of a call of paged attention or of experts, and the shares of the device's rates that the call reaches."""

    TITLE: ClassVar[str] = "kernels"
    COLUMNS: ClassVar[tuple[str, ...]] = ("work", "us", "GB/s", "of bandwidth", "TFLOP/s", "of matmul")
    work: str
    time_s: float
    bytes_per_s: float
    bandwidth_share: float
    flops_per_s: float
    flops_share: float

    def cells(self) -> tuple[str, ...]:
        moved = f"{self.bytes_per_s / 1e9:,.1f}", f"{self.bandwidth_share:.0%}"
        done = f"{self.flops_per_s / 1e12:.3g}", f"{self.flops_share:.0%}"
        return self.work, f"{self.time_s * 1e6:,.1f}", *moved, *done


@dataclass(frozen=True)
class StepRow:
    """Time of a decode step or of a prompt in the engine.

    Attributes:
        alone_s: seconds of the same programs without the engine; None for prompts.
        tokens_per_s: tokens per second, summed over all instances.
        bound_s: minimum seconds that the device needs for this work.
        bound_by: name of the rate of the device (such as bandwidth) that limits this work.
    """

    TITLE: ClassVar[str] = "steps of the engine"
    COLUMNS: ClassVar[tuple[str, ...]] = ("work", "ms", "programs alone, ms", "tokens/s", "bound, ms", "by", "of bound")
    work: str
    time_s: float
    alone_s: float | None
    tokens_per_s: float
    bound_s: float
    bound_by: str

    def cells(self) -> tuple[str, ...]:
        alone = "" if self.alone_s is None else f"{self.alone_s * 1e3:,.2f}"
        bound = f"{self.bound_s * 1e3:,.2f}", self.bound_by, f"{self.bound_s / self.time_s:.0%}"
        return self.work, f"{self.time_s * 1e3:,.2f}", alone, f"{self.tokens_per_s:,.0f}", *bound


@dataclass(frozen=True)
class LoadRow:
    """Result of `amoeba bench` with one load.

    Attributes:
        compiled: number of programs compiled during the run. Compilation delays requests.
    """

    TITLE: ClassVar[str] = "gRPC server"
    COLUMNS: ClassVar[tuple[str, ...]] = (
        "load", "done", "failed", "requests/s", "output tokens/s", "all tokens/s",
        "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "TPOT p99, ms", "compiled",
    )  # fmt: skip
    load: str
    compiled: int
    report: dict[str, Any]

    def cells(self) -> tuple[str, ...]:
        counts = (str(self.report[name]) for name in ("completed", "failed"))
        rates = ("request_throughput", "output_throughput", "total_token_throughput")
        times = (f"{p}_{metric}_ms" for metric in ("ttft", "tpot") for p in ("p50", "p99"))
        figures = ("" if self.report[name] is None else f"{self.report[name]:,.1f}" for name in (*rates, *times))
        return self.load, *counts, *figures, str(self.compiled)


@dataclass(frozen=True)
class ChangeRow:
    """Change of degree of all devices while requests decode.

    Attributes:
        kv_bytes: bytes of KV pages that moved, summed over all devices.
        weight_bytes: bytes of weights restored from other devices, summed over all devices.
        extra_bytes: maximum temporary bytes on a device.
        steps: number of steps during the change, summed over all devices.
        requests: number of requests that paused or resumed.
    """

    TITLE: ClassVar[str] = "changes"
    COLUMNS: ClassVar[tuple[str, ...]] = (
        "change", "ms", "KV moved, MB", "weights moved, MB", "extra, MB", "steps meanwhile", "paused or resumed",
    )  # fmt: skip
    change: str
    time_s: float
    kv_bytes: int
    weight_bytes: int
    extra_bytes: int
    steps: int
    requests: int

    def cells(self) -> tuple[str, ...]:
        sizes = (f"{size / 1e6:,.1f}" for size in (self.kv_bytes, self.weight_bytes, self.extra_bytes))
        return self.change, f"{self.time_s * 1e3:,.1f}", *sizes, str(self.steps), str(self.requests)


Row = KernelRow | StepRow | LoadRow | ChangeRow


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the main thread if the `with` block takes longer than `seconds`.

    If XLA is running at that time, the error is raised when XLA returns.
    """

    def expire(*_: Any) -> None:
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, expire)
    earlier = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *earlier)
        signal.signal(signal.SIGALRM, handler)


def run_part(part: Callable[[], Iterator[Row]], seconds: float) -> dict[str, Any]:
    """Run a part for at most `seconds`.

    Return a dict with the rows, status (ok, out of time, skipped or failed), error and seconds of the part.
    """
    rows: list[Row] = []
    status, error = "ok", ""
    start = time.perf_counter()
    try:
        with time_limit(seconds):
            rows.extend(part())
    except OutOfTime:
        status, error = "out of time", f"its {seconds:.0f} s are used"
    except PartSkipped as reason:
        status, error = "skipped", str(reason)
    except Exception as failure:
        traceback.print_exc()
        status, error = "failed", f"{type(failure).__name__}: {failure}"
    gc.collect()
    return {"status": status, "error": error, "seconds": time.perf_counter() - start, "rows": rows}


def run_parts(
    parts: dict[str, tuple[Callable[[], Iterator[Row]], float]],
    seconds: float,
    done: Callable[[str, dict[str, Any]], None],
) -> None:
    """Run parts in turn, and call `done` with the name and the result of each part.

    Args:
        parts: (function, share of the time) of each part, by name.
        seconds: time of all parts together.
    """
    end, left = time.perf_counter() + seconds, sum(share for _, share in parts.values())
    for name, (part, share) in parts.items():
        done(name, run_part(part, max(end - time.perf_counter(), 0.0) * share / left))
        left -= share


def show(name: str, result: dict[str, Any], console: Console) -> None:
    """Print the tables of a part, and a line with its status and seconds. `result`: result of `run_part`."""
    for kind in dict.fromkeys(map(type, result["rows"])):
        table = Table(title=kind.TITLE)
        for column in kind.COLUMNS:
            table.add_column(column, justify="right" if table.columns else "left")
        for row in result["rows"]:
            if isinstance(row, kind):
                table.add_row(*row.cells())
        console.print(table)
    reason = f": {result['error']}" if result["error"] else ""
    line = f"{name}: {result['status']}{reason} ({result['seconds']:.0f} s)"
    console.print(line, style="" if result["status"] == "ok" else "bold red", markup=False, highlight=False)
