"""Measured times of steps, merges and splits in a simulation, which policies see in snapshots of the host."""

from collections import deque
from collections.abc import Collection, Iterable

from serving.scheduler import Throughput, Timing
from serving.simulator.instance import SimInstance

_NUM_TRANSFORMATIONS = 8


class SimTimings:
    """Times of steps, merges and splits, as measured on one simulated host.

    The times of steps are recorded by tensor-parallel degree. They remain even if no instance has this degree any more.
    """

    def __init__(self) -> None:
        self._steps_s: dict[int, float] = {}
        self._prompt_tokens_per_s: dict[int, float] = {}
        self._latest: dict[tuple[int, int], deque[float]] = {}
        self._transformations_s: dict[tuple[int, int], float] = {}
        self._throughput: dict[int, Throughput] = {}

    def take(self, instances: Collection[SimInstance]) -> Timing:
        """Update the times with the latest times of the instances. Return the times of all degrees.

        The time of a step at a degree is the median over the instances of this degree.
        """
        degrees = {instance.degree for instance in instances}
        for degree in degrees:
            alike = [instance for instance in instances if instance.degree == degree]
            if steps := [instance.step_s for instance in alike if instance.step_s is not None]:
                self._steps_s[degree] = _median(steps)
            if rates := [i.prompt_tokens_per_s for i in alike if i.prompt_tokens_per_s is not None]:
                self._prompt_tokens_per_s[degree] = _median(rates)
        if len(degrees) == 1:
            self._take_throughput(degrees.pop(), instances)
        return Timing(
            dict(self._steps_s), dict(self._prompt_tokens_per_s), self._transformations_s, dict(self._throughput)
        )

    def _take_throughput(self, degree: int, instances: Collection[SimInstance]) -> None:
        """Record the total throughput of all instances of the host. All of them have the degree `degree`.

        Only the highest throughput of each degree is kept. Nothing is recorded if an instance merges, splits, or
        does not decode.
        """
        if any(not i.num_decoding or i.change is not None or i.step_s is None for i in instances):
            return
        sequences = sum(instance.step_rows for instance in instances)
        tokens_per_s = sum(i.step_rows / i.step_s for i in instances if i.step_s)
        before = self._throughput.get(degree)
        if before is None or tokens_per_s > before.tokens_per_s:
            self._throughput[degree] = Throughput(sequences, tokens_per_s)

    def add_transformation(self, before: int, after: int, seconds: float) -> None:
        """Record the seconds of a merge or split from degree `before` to degree `after`.

        `take` then returns the median of the latest eight merges or splits from `before` to `after`.
        """
        known = self._latest.setdefault((before, after), deque(maxlen=_NUM_TRANSFORMATIONS))
        known.append(seconds)
        self._transformations_s = self._transformations_s | {(before, after): _median(known)}


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
