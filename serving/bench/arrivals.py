"""Arrival times of requests."""

import math

import numpy as np


def draw_arrivals(
    random: np.random.Generator,
    rate: float,
    burstiness: float,
    count: int | None,
    duration_s: float | None,
) -> np.ndarray:
    """Draw random arrival times of requests, in seconds and in ascending order.

    Args:
        rate: mean number of requests per second. At an infinite rate, all requests arrive at time 0.
        burstiness: shape of the gamma distribution of the intervals between arrivals. 1: a Poisson process. Below 1:
            burstier. Infinity: equal intervals.
        count: maximum number of requests. Required if `rate` is infinite.
        duration_s: end of the arrivals in seconds. At least one of `count` and `duration_s` is required.
    """
    if math.isinf(rate):
        assert count is not None, "an infinite rate needs a count"
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
