"""Plot of a benchmark run: throughput, TTFT and instances over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amoeba_jax.errors import ConfigError
from serving.bench.cluster_watch import Sample
from serving.bench.load import Outcome
from serving.bench.metrics import tokens_per_bin
from serving.bench.report import Run

_KIND_COLORS = {"random": "#5b8fd9", "burst": "#5b8fd9", "trace": "#5b8fd9", "short": "#5b8fd9", "long": "#e8890c"}
_DEGREE_COLORS = {1: "#5b8fd9", 2: "#b04fb0", 4: "#2f9e6e", 8: "#e8890c"}


def load_matplotlib() -> Any:
    """Return the class `Figure` of matplotlib. Raises `ConfigError` if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib ({error}): pip install 'amoeba-jax[plots]'") from error
    return Figure


def save_plot(run: Run, path: Path) -> None:
    """Write the plot of a benchmark run to a file. The suffix of the file name determines the format.

    Raises `ConfigError` if the file cannot be written.
    """
    try:
        draw_run(run).savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: unknown format.
        raise ConfigError(f"the plot {path} cannot be written: {error}") from error


def draw_run(run: Run) -> Any:
    """Return a matplotlib figure with three plots of a run. Raises `ConfigError` if matplotlib is not installed.

    The plots show output tokens per second over time, TTFT by arrival time, and the number of devices at each
    tensor-parallel degree over time.
    """
    figure = load_matplotlib()(figsize=(10, 8), layout="tight")
    tokens, waits, degrees = figure.subplots(3, 1, sharex=True)
    _draw_tokens(tokens, run)
    _draw_waits(waits, run)
    _draw_degrees(degrees, run)
    degrees.set_xlabel("seconds")
    degrees.set_xlim(0, run.duration_s)
    return figure


def _draw_tokens(axes: Any, run: Run) -> None:
    width_s = min(max(run.duration_s / 100, 0.1), 10.0)
    rates = [count / width_s for count in tokens_per_bin(run.records, run.duration_s, width_s)]
    edges = [place * width_s for place in range(len(rates) + 1)]
    axes.stairs(rates, edges, fill=True, color="#5b8fd9")
    axes.set_ylabel("output tokens / s")


def _draw_waits(axes: Any, run: Run) -> None:
    kinds = list(dict.fromkeys(record.request.kind for record in run.records))
    for kind in kinds:
        waits = [(r.arrival_s, r.ttft_s) for r in run.records if r.request.kind == kind and r.ttft_s is not None]
        if waits:
            axes.scatter(*zip(*waits, strict=True), s=14, color=_KIND_COLORS[kind], label=kind)
    failed = [r.arrival_s for r in run.records if r.outcome is Outcome.FAILED]
    if failed:
        axes.scatter(failed, [0.0] * len(failed), marker="x", color="#c03030", label="failed", clip_on=False)
    axes.set_ylabel("TTFT (s) by arrival")
    axes.set_ylim(bottom=0)
    if len(kinds) > 1 or failed:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _draw_degrees(axes: Any, run: Run) -> None:
    axes.set_ylabel("devices")
    samples = run.watch.samples
    if not samples:
        axes.text(0.5, 0.5, "no samples of instances", ha="center", transform=axes.transAxes)
        return
    times, counts = degree_steps(samples, run.watch.end_s(run.duration_s))
    colors = [_DEGREE_COLORS.get(degree, "#8c8c8c") for degree in counts]
    labels = [f"TP{degree}" for degree in counts]
    axes.stackplot(times, *counts.values(), colors=colors, labels=labels, step="post")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def degree_steps(samples: Sequence[Sample], end_s: float) -> tuple[list[float], dict[int, list[int]]]:
    """Return `(times, counts)`: the number of devices at each tensor-parallel degree, over time.

    `counts[degree][i]` is the number of devices in instances of `degree`, from `times[i]` until `times[i + 1]`. `times`
    is in seconds: 0, the time of each sample after the first, and `end_s` (the end of the run).
    """
    times = [0.0, *(sample.time_s for sample in samples[1:]), max(end_s, samples[-1].time_s)]
    by_degree = [sample.devices_by_degree() for sample in (*samples, samples[-1])]
    degrees = sorted(set().union(*by_degree))
    return times, {degree: [counts.get(degree, 0) for counts in by_degree] for degree in degrees}
