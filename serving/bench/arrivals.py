"""When requests come."""

import math

import numpy as np


def draw_arrivals(
    random: np.random.Generator,
    rate: float,
    burstiness: float,
    count: int | None,
    duration_s: float | None,
) -> np.ndarray:
    """Ascending times in seconds: at most `count`, all before `duration_s`. One of the two must be given, and
    `count` for an infinite rate.

    Intervals have a gamma distribution with mean 1 / `rate` (per second) and shape `burstiness`: 1 is a Poisson
    process, less comes in bursts, more is regular, infinity has equal intervals. At an infinite rate all come at 0.
    """
    if math.isinf(rate):
        assert count is not None, "an infinite rate has no end in time"
        return np.zeros(count)
    parts = [np.empty(0)]
    end, left = 0.0, count
    while left != 0 and (duration_s is None or end < duration_s):
        wanted = math.inf if duration_s is None else 1.1 * rate * (duration_s - end) + 16
        number = int(min(wanted, math.inf if left is None else left))
        times = end + np.cumsum(_draw_intervals(random, rate, burstiness, number))
        parts.append(times)
        end, left = times[-1], None if left is None else left - number
    arrivals = np.concatenate(parts)
    return arrivals if duration_s is None else arrivals[arrivals < duration_s]


def _draw_intervals(random: np.random.Generator, rate: float, burstiness: float, number: int) -> np.ndarray:
    if math.isinf(burstiness):
        return np.full(number, 1 / rate)
    return random.gamma(burstiness, 1 / (rate * burstiness), number)
