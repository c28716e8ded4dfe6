"""Requests drawn from statistics of real traffic (ServeGen): rates over time, and distributions of lengths."""

import math
from pathlib import Path

import numpy as np

from amoeba_jax.errors import ConfigError

# Start in seconds and requests per second of each window; token counts with their probabilities.
KEYS = ("window_s", "rate_rps", "input_tokens_value", "input_tokens_prob", "output_tokens_value", "output_tokens_prob")
MAX_DRAWN = 20_000_000


def draw_specs(
    path: Path,
    arrays: dict[str, np.ndarray],
    random: np.random.Generator,
    duration_s: float | None,
    rate_scale: float,
    most: int | None,
) -> dict[str, np.ndarray]:
    """Draw random requests from statistics. Return the arrays `arrival_s`, `input_tokens` and `output_tokens`.

    The statistics have a request rate for each window of time. Intervals between arrivals have a gamma distribution.
    Their coefficient of variation in a window is `cv_rate_weighted`, or 1 if the file has no such array. The lengths of
    prompts and outputs are drawn independently.

    Raises `ConfigError` for more than `MAX_DRAWN` requests, and for rates that are negative or not finite.

    Args:
        path: file of the statistics, for error messages.
        arrays: arrays of the file by name: `KEYS`, and optionally `cv_rate_weighted`.
        rate_scale: factor by which all rates are multiplied.
        duration_s: end of the arrivals, in seconds from the start of the first window. None: the end of the last
            window.
        most: maximum number of requests.
    """
    starts, rates = arrays["window_s"].astype(float), arrays["rate_rps"].astype(float) * rate_scale
    if (rates < 0).any() or not np.isfinite(rates).all():
        raise ConfigError(f"rate_rps of the trace {path} has {rates.min():g}: rates must be finite and at least 0")
    width = float(starts[1] - starts[0]) if len(starts) > 1 else 600.0
    end = starts[-1] + width if duration_s is None else min(duration_s, starts[-1] + width)
    lengths = np.clip(end - starts, 0, width)
    expected = float((rates * lengths).sum())
    if expected > MAX_DRAWN and (most is None or most > MAX_DRAWN):
        raise ConfigError(
            f"{path} gives about {expected:.0f} requests, but the maximum is {MAX_DRAWN}: set num_prompts, or "
            "lower trace_rate_scale or duration_s"
        )
    variations = arrays.get("cv_rate_weighted", np.ones(len(rates)))
    times, count = [np.zeros(0)], 0
    for start, rate, seconds, variation in zip(starts, rates, lengths, variations, strict=True):
        if seconds <= 0 or rate <= 0:
            continue
        part = _gamma_times(random, rate, float(max(variation, 0.05)), seconds)
        times.append(start + part)
        count += len(part)
        if most is not None and count >= most:
            break
    arrivals = np.concatenate(times)[:most]
    return {
        "arrival_s": arrivals,
        "input_tokens": _draw(random, arrays, "input_tokens", len(arrivals)),
        "output_tokens": _draw(random, arrays, "output_tokens", len(arrivals)),
    }


def _gamma_times(random: np.random.Generator, rate: float, variation: float, seconds: float) -> np.ndarray:
    shape = 1 / variation**2
    number = math.ceil(rate * seconds + 6 * variation * math.sqrt(rate * seconds) + 16)
    times = np.cumsum(random.gamma(shape, 1 / (rate * shape), number))
    return times[times < seconds]


def _draw(random: np.random.Generator, arrays: dict[str, np.ndarray], name: str, count: int) -> np.ndarray:
    totals = np.cumsum(arrays[f"{name}_prob"].astype(float))
    places = np.searchsorted(totals, random.random(count) * totals[-1], side="right")
    return arrays[f"{name}_value"][np.minimum(places, len(totals) - 1)].astype(np.int64)
