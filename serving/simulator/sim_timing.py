"""What steps and transformations took in a simulation, as the snapshots of an engine tell it."""

from collections import deque
from collections.abc import Iterable

from serving.scheduler import Timing
from serving.simulator.instance import SimInstance
from serving.simulator.tally import Tally

_NUM_TRANSFORMATIONS = 8


class SimTimings:
    """Remembers figures of degrees that no instance has any more."""

    def __init__(self, tally: Tally):
        self._tally, self._seen = tally, 0
        self._steps_s: dict[int, float] = {}
        self._prompt_tokens_per_s: dict[int, float] = {}
        self._latest: dict[tuple[int, int], deque[float]] = {}
        self._transformations_s: dict[tuple[int, int], float] = {}

    def take(self, instances: Iterable[SimInstance]) -> Timing:
        """The figures with those of present instances: medians over the instances of a degree."""
        steps: dict[int, list[float]] = {}
        prompts: dict[int, list[float]] = {}
        for instance in instances:
            if instance.step_s is not None:
                steps.setdefault(instance.degree, []).append(instance.step_s)
            if instance.prompt_tokens_per_s is not None:
                prompts.setdefault(instance.degree, []).append(instance.prompt_tokens_per_s)
        self._steps_s |= {degree: _median(values) for degree, values in steps.items()}
        self._prompt_tokens_per_s |= {degree: _median(values) for degree, values in prompts.items()}
        if changes := self._tally.changes[self._seen :]:
            self._seen += len(changes)
            for _, before, after, seconds in changes:
                known = self._latest.setdefault((before, after), deque(maxlen=_NUM_TRANSFORMATIONS))
                known.append(seconds)
            self._transformations_s = {degrees: _median(values) for degrees, values in self._latest.items()}
        return Timing(dict(self._steps_s), dict(self._prompt_tokens_per_s), self._transformations_s)


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
