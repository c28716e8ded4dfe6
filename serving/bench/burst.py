"""Load that comes in bursts: phases of a low and a high rate in turn (Flying Serving 6.1.3)."""

import math
from collections.abc import Iterator

import numpy as np

from amoeba_jax.errors import ConfigError
from serving.bench.arrivals import draw_arrivals

LOW, HIGH = "low", "high"


def read_rates(name: str, text: str) -> tuple[float, float]:
    """The least and the highest rate in a text such as "2:5", or "4" for both. Raises `ConfigError`."""
    parts = text.split(":")
    try:
        rates = [float(part) for part in parts]
    except ValueError:
        rates = []
    if len(rates) not in (1, 2) or not 0 < rates[0] <= rates[-1] < math.inf:
        raise ConfigError(
            f"{name}={text!r} must be two rates in requests a second, the least and the highest, such as 2:5; both "
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
    """Times of requests in seconds, ascending, and the kind of the phase in which each comes.

    Phases of `phase_s` seconds alternate, a low one first. The rate of each is drawn from its range, evenly; intervals
    in it are as in `draw_arrivals`. At most `most` requests come, all before `duration_s`; one of the two must be
    given.
    """
    assert most is not None or duration_s is not None, "it must have an end"
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
