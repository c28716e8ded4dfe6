"""What steps and transformations took in a simulation, as the snapshots of an engine tell it."""

from collections import deque
from collections.abc import Iterable
from statistics import median

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
        self._transformations_s: dict[tuple[int, int], deque[float]] = {}

    def take(self, instances: Iterable[SimInstance]) -> Timing:
        """The figures with those of present instances: medians over the instances of a degree."""
        steps: dict[int, list[float]] = {}
        prompts: dict[int, list[float]] = {}
        for instance in instances:
            if instance.step_s is not None:
                steps.setdefault(instance.degree, []).append(instance.step_s)
            if instance.prompt_tokens_per_s is not None:
                prompts.setdefault(instance.degree, []).append(instance.prompt_tokens_per_s)
        self._steps_s |= {degree: median(values) for degree, values in steps.items()}
        self._prompt_tokens_per_s |= {degree: median(values) for degree, values in prompts.items()}
        for _, before, after, seconds in self._tally.changes[self._seen :]:
            known = self._transformations_s.setdefault((before, after), deque(maxlen=_NUM_TRANSFORMATIONS))
            known.append(seconds)
        self._seen = len(self._tally.changes)
        transformations_s = {degrees: median(values) for degrees, values in self._transformations_s.items()}
        return Timing(dict(self._steps_s), dict(self._prompt_tokens_per_s), transformations_s)
