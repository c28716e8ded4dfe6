"""Arrival times of bursty load, in alternating phases of a low and a high request rate (Flying Serving 6.1.3)."""

import math
from collections.abc import Iterator

import numpy as np

from amoeba_jax.errors import ConfigError
from serving.bench.arrivals import draw_arrivals

LOW, HIGH = "low", "high"


def read_rates(name: str, text: str) -> tuple[float, float]:
    """Parse a range of request rates such as "2:5". Return `(lowest, highest)`, which are equal for a single number.

    Raises `ConfigError` for an invalid text. `name` is the name of the setting in the error message.
    """
    parts = text.split(":")
    try:
        rates = [float(part) for part in parts]
    except ValueError:
        rates = []
    if len(rates) not in (1, 2) or not 0 < rates[0] <= rates[-1] < math.inf:
        raise ConfigError(
            f"{name}={text!r} must be the lowest and the highest rate in requests per second, such as 2:5; both "
            "above 0 and finite"
        )
    return rates[0], rates[-1]


def draw_phases(
    random: np.random.Generator,
    low: tuple[float, float],
    high: tuple[float, float],
    phase_s: float,
    burstiness: float,
    most: int | None,
    duration_s: float | None,
) -> Iterator[tuple[float, str]]:
    """Draw random arrival times of bursty load. Yield `(arrival_s, phase)` for each request, in the order of arrival.

    Low and high phases alternate, beginning with a low phase. The rate of each phase is drawn uniformly between the
    lowest and the highest rate of its kind. `arrival_s` is in seconds. `phase` is `LOW` or `HIGH`.

    Args:
        low: lowest and highest rate of low phases, in requests per second.
        high: lowest and highest rate of high phases, in requests per second.
        phase_s: seconds of each phase.
        burstiness: shape of the distribution of the intervals between arrivals. See `draw_arrivals`.
        most: maximum number of requests.
        duration_s: end of the arrivals in seconds. At least one of `most` and `duration_s` is required.
    """
    assert most is not None or duration_s is not None, "most or duration_s is required"
    number, start_s = 0, 0.0
    for index in range(10**9):
        kind, rates = ((LOW, low), (HIGH, high))[index % 2]
        rate, length_s = random.uniform(*rates), phase_s
        if duration_s is not None:
            length_s = min(phase_s, duration_s - start_s)
            if length_s <= 0:
                return
        for time_s in draw_arrivals(random, rate, burstiness, None, length_s):
            if number == most:
                return
            number += 1
            yield start_s + float(time_s), kind
        start_s += phase_s
