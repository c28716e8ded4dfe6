"""Plots of simulations: throughput, time to first token (TTFT), and devices at each tensor-parallel degree."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serving.simulator.errors import SimulationError
from serving.simulator.result import PolicyResult
from serving.simulator.table import SweepPoint

_COLORS = ("#5b8fd9", "#e8890c", "#2f9e6e", "#b04fb0", "#c03030", "#8c8c8c", "#7a5c3e", "#17a2b8")
_STYLES = ("-", "--", ":", "-.")
_DEGREE_COLORS = {1: "#5b8fd9", 2: "#b04fb0", 4: "#2f9e6e", 8: "#e8890c"}


def load_matplotlib() -> Any:
    """Return the class `Figure` of matplotlib. Raises `SimulationError` if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SimulationError(f"plots need matplotlib ({error}): pip install 'amoeba-jax[plots]'") from error
    return Figure


def save_plot(figure: Any, path: Path) -> None:
    """Write a matplotlib figure to a file. The suffix of the file name determines the format.

    Raises `SimulationError` if the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise SimulationError(f"--plot {path} cannot be written: {error}") from error


def draw(results: Mapping[str, PolicyResult]) -> Any:
    """Return a matplotlib figure that compares policies.

    The first plot shows the throughput of each policy over time. The second plot shows the distribution of TTFT for
    each policy and class of requests. One further plot for each policy shows the number of devices at each
    tensor-parallel degree. Raises `SimulationError` if matplotlib is not installed.
    """
    rows = 2 + len(results)
    figure = load_matplotlib()(figsize=(10, 2.6 * rows), layout="constrained")
    axes = figure.subplots(rows, 1)
    for color, (name, result) in zip(_repeated(_COLORS, len(results)), results.items(), strict=True):
        bins = np.array(result.tally.tokens_per_bin) / result.tally.bin_s
        axes[0].plot((np.arange(len(bins)) + 0.5) * result.tally.bin_s, bins, color=color, label=name, linewidth=1)
        kinds, names = result.requests.kinds, result.requests.kind_names
        for kind, style in zip(range(len(names)), _repeated(_STYLES, len(names)), strict=True):
            own = result.ttft_s[kinds == kind]
            ttft_s = np.sort(own[~np.isnan(own)])
            label = name if len(names) == 1 else f"{name}: {names[kind]}"
            if len(ttft_s):
                shares = np.arange(1, len(ttft_s) + 1) / len(own)
                axes[1].plot(ttft_s, shares, color=color, linestyle=style, label=label)
    axes[0].set(xlabel="seconds", ylabel="output tokens / s", ylim=(0, None))
    axes[1].set(xlabel="TTFT (s)", ylabel="share of requests", xscale="log", ylim=(0, 1.02))
    for panel in axes[:2]:
        panel.legend(loc="upper left", bbox_to_anchor=(1, 1))
    for panel, (name, result) in zip(axes[2:], results.items(), strict=True):
        times, counts = degree_steps(result)
        colors = [_DEGREE_COLORS.get(degree, "#8c8c8c") for degree in counts]
        panel.stackplot(times, *counts.values(), colors=colors, labels=[f"TP{d}" for d in counts], step="post")
        panel.set(xlabel="seconds", ylabel=f"{name}: devices", xlim=(0, result.duration_s or 1))
        panel.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def draw_sweep(points: Sequence[SweepPoint]) -> Any:
    """Return a matplotlib figure of goodput against the request rate, with a line for each policy.

    Goodput is requests per second within the latency limits. Raises `SimulationError` if matplotlib is not installed.
    """
    figure = load_matplotlib()(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    names = list(points[0].results)
    for color, name in zip(_repeated(_COLORS, len(names)), names, strict=True):
        results = [point.results[name] for point in points]
        goodputs = [float(result.kept.sum()) / (result.duration_s or 1.0) for result in results]
        axes.plot([point.rate for point in points], goodputs, color=color, marker="o", label=name)
    axes.set(xlabel="requests / s", ylabel="requests / s within the objectives", ylim=(0, None))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def degree_steps(result: PolicyResult) -> tuple[list[float], dict[int, list[int]]]:
    """Return `(times, counts)`: the number of devices at each tensor-parallel degree, over time.

    `counts[degree][i]` is the number of devices in instances of `degree`, from `times[i]` until `times[i + 1]`. `times`
    has each time in seconds at which degrees change, and the end of the run.
    """
    degrees = sorted({degree for _, degree, _ in result.tally.degrees})
    now = dict.fromkeys(degrees, 0)
    times, counts = [], {degree: [] for degree in degrees}
    events = sorted(result.tally.degrees, key=lambda event: event[0])
    for place, (at_s, degree, change) in enumerate(events):
        now[degree] += change
        if place + 1 < len(events) and events[place + 1][0] == at_s:
            continue
        times.append(at_s)
        for known in degrees:
            counts[known].append(now[known])
    times.append(max(result.duration_s, times[-1]))
    for known in degrees:
        counts[known].append(now[known])
    return times, counts


def _repeated(values: tuple[str, ...], count: int) -> list[str]:
    return [values[index % len(values)] for index in range(count)]
