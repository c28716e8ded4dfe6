"""Statistics that a simulation collects.

A gap is the time from one token of a request to the next (inter-token latency).
"""

import math
from array import array
from collections.abc import Sequence
from enum import IntEnum, StrEnum

import numpy as np

from serving.simulator.block import Block

_BINS_PER_FACTOR = 100
"""Number of histogram bins between a gap and e times this gap. Each bin is 1% wide."""
_SHORTEST_S = 1e-6


class Ending(IntEnum):
    """Reason for the end of a request."""

    OPEN = 0
    """The request had not ended when the simulation stopped."""
    COMPLETED = 1
    NEVER_FITS = 2
    DEADLINE = 3
    QUEUE_FULL = 4


class Limit(StrEnum):
    """Resource that waiting requests lack."""

    CACHE = "cache"
    """Room in the KV cache of an instance."""
    SLOTS = "slots"
    """Slot for a further request: all instances run their maximum number of requests."""
    DEGREE = "degree"
    """An instance that can hold the request at all: a merge is needed."""


class Records:
    """Times of all requests: a table with a row for each request, in the order of `RequestTable`.

    Times are in seconds since the start. NaN: the event did not happen.
    """

    def __init__(self, count: int):
        self.dispatch_s = array("d", [math.nan]) * count
        self.first_token_s = array("d", [math.nan]) * count
        self.end_s = array("d", [math.nan]) * count
        self.waited_s = array("d", [0.0]) * count
        """Seconds in the queue, including waits after preemptions."""
        self.prefix_tokens = array("l", [0]) * count
        self.preemptions = array("i", [0]) * count
        self.ending = array("b", [0]) * count


class Tally:
    """Sums over all requests, and lists of events.

    The first three attributes divide the seconds of decode steps by cause. The time of a step counts once for each
    decoding request: a step of 0.02 s with 8 decoding requests adds 0.16 s.

    Attributes:
        decode_s: time that the steps would have taken without prompts, merges and splits.
        interference_s: time that prompts in the same steps added.
        switch_s: time that merges and splits added.
        bin_s: width of the bins of `tokens_per_bin`, in seconds.
        tokens_per_bin: number of generated tokens in each bin of time.
        prefix_tokens: prompt tokens found in the prefix cache.
    """

    def __init__(self, bin_s: float):
        self.bin_s = bin_s
        self.tokens_per_bin: list[float] = []
        self.decode_s = self.interference_s = self.switch_s = 0.0
        self.generated_tokens = self.prompt_tokens = self.steps = self.events = 0
        self.prefix_tokens = 0
        self.kv_bytes = self.weight_bytes = 0.0
        self.changes: list[tuple[float, int, int, float]] = []
        """End, old degree, new degree and seconds of each transformation."""
        self.regroups: list[tuple[float, int, int]] = []
        """Time, old degree and new degree of each pause and resumption."""
        self.degrees: list[tuple[float, int, int]] = []
        """Time, degree, and change of the number of devices in instances of this degree."""
        self.limited_s: dict[Limit, float] = {}
        """Seconds in which requests of a host waited, summed over hosts, by the resource that these requests lacked."""
        self._gaps: dict[int, int] = {}

    def add_tokens(self, start_s: float, end_s: float, tokens: int) -> None:
        """Count generated tokens, spread evenly over the time from `start_s` to `end_s`."""
        self.generated_tokens += tokens
        first, last = int(start_s / self.bin_s), int(end_s / self.bin_s)
        bins = self.tokens_per_bin
        while len(bins) <= last:
            bins.append(0.0)
        if first == last:
            bins[first] += tokens
            return
        rate = tokens / (end_s - start_s)
        bins[first] += rate * ((first + 1) * self.bin_s - start_s)
        for place in range(first + 1, last):
            bins[place] += rate * self.bin_s
        bins[last] += rate * (end_s - last * self.bin_s)

    def add_block(self, block: Block, count: int, now_s: float) -> None:
        """Count the decode steps of a block that ends at `now_s`. A block is a series of similar steps.

        `count` is the number of requests that decode in each step.
        """
        steps = block.steps
        tokens = count * steps
        self.add_tokens(block.start_s, now_s, tokens)
        last_s = block.first_s + block.slope_s * (steps - 1)
        if last_s > 1.02 * block.first_s:
            half = steps // 2
            self.add_gaps(block.first_s + block.slope_s * half / 2, half * count)
            self.add_gaps(last_s - block.slope_s * (steps - half) / 2, (steps - half) * count)
        else:
            self.add_gaps((block.first_s + last_s) / 2, tokens)
        self.decode_s += count * (block.time_s(steps) - block.interference_s - block.switch_s)
        self.interference_s += count * block.interference_s
        self.switch_s += count * block.switch_s

    def add_gaps(self, seconds: float, count: int) -> None:
        """Count `count` gaps between tokens, of `seconds` seconds each."""
        place = int(math.log(max(seconds, _SHORTEST_S) / _SHORTEST_S) * _BINS_PER_FACTOR)
        self._gaps[place] = self._gaps.get(place, 0) + count

    def gap_percentiles_s(self, percentiles: Sequence[float]) -> list[float | None]:
        """Return percentiles (0 to 100) of the gaps between tokens in seconds, accurate to 1%.

        If there are no gaps, each percentile is None.
        """
        places = sorted(self._gaps)
        if not places:
            return [None] * len(percentiles)
        totals = np.cumsum([self._gaps[place] for place in places])
        found = np.searchsorted(totals, np.asarray(percentiles) / 100 * totals[-1])
        return [_gap_s(places[min(int(index), len(places) - 1)]) for index in found]

    @property
    def mean_gap_s(self) -> float | None:
        """Mean of the gaps between tokens in seconds, or None if there are no gaps."""
        count = sum(self._gaps.values())
        return sum(_gap_s(place) * number for place, number in self._gaps.items()) / count if count else None


def _gap_s(place: int) -> float:
    return _SHORTEST_S * math.exp((place + 0.5) / _BINS_PER_FACTOR)
