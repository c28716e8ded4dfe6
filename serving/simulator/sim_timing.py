"""What steps and transformations took in a simulation, as the snapshots of an engine tell it."""

from collections import deque
from collections.abc import Collection, Iterable

from serving.scheduler import Timing
from serving.simulator.instance import SimInstance

_NUM_TRANSFORMATIONS = 8


class SimTimings:
    """Those of one host. Remembers figures of degrees that no instance has any more."""

    def __init__(self) -> None:
        self._steps_s: dict[int, float] = {}
        self._prompt_tokens_per_s: dict[int, float] = {}
        self._latest: dict[tuple[int, int], deque[float]] = {}
        self._transformations_s: dict[tuple[int, int], float] = {}

    def take(self, instances: Collection[SimInstance]) -> Timing:
        """The figures with those of present instances: medians over the instances of a degree."""
        for degree in {len(instance.devices) for instance in instances}:
            alike = [instance for instance in instances if len(instance.devices) == degree]
            if steps := [instance.step_s for instance in alike if instance.step_s is not None]:
                self._steps_s[degree] = _median(steps)
            if rates := [i.prompt_tokens_per_s for i in alike if i.prompt_tokens_per_s is not None]:
                self._prompt_tokens_per_s[degree] = _median(rates)
        return Timing(dict(self._steps_s), dict(self._prompt_tokens_per_s), self._transformations_s)

    def add_transformation(self, before: int, after: int, seconds: float) -> None:
        """Take note of how long a transformation from one degree to another took."""
        known = self._latest.setdefault((before, after), deque(maxlen=_NUM_TRANSFORMATIONS))
        known.append(seconds)
        self._transformations_s = self._transformations_s | {(before, after): _median(known)}


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
