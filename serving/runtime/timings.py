"""Measured durations of steps, merges and splits, which policies use for estimates."""

from collections import deque
from collections.abc import Sequence
from statistics import median

from amoeba_jax.instances.instance import Instance
from amoeba_jax.transform.report import TransformReport
from serving.scheduler import Throughput, Timing

_NUM_TRANSFORMATIONS = 8


class Timings:
    """Measured durations of steps, merges and splits, for each tensor-parallel degree that instances have had.

    Only the engine's thread uses this object.
    """

    def __init__(self) -> None:
        self._steps_s: dict[int, float] = {}
        self._prompt_tokens_per_s: dict[int, float] = {}
        self._transformations_s: dict[tuple[int, int], deque[float]] = {}
        self._throughput: dict[int, Throughput] = {}

    def transformed(self, report: TransformReport) -> None:
        """Record how long a merge or split took, for each group of devices.

        A group that only paused or resumed requests is left out, because no KV pages moved there.
        """
        for group in (group for group in report.groups if not (group.paused or group.resumed)):
            seconds = self._transformations_s.setdefault(
                (group.from_degree, group.to_degree), deque(maxlen=_NUM_TRANSFORMATIONS)
            )
            seconds.append(group.seconds)

    def take(self, instances: Sequence[Instance]) -> Timing:
        """Record the present step durations and throughput of `instances`. Return everything recorded so far.

        The duration of a step is the median over all instances of a degree. If a degree has no instance now, its latest
        duration is kept. The duration of a merge or split is the median of the latest 8 from the same old degree to
        the same new degree.
        """
        self._take_throughput(instances)
        steps: dict[int, list[float]] = {}
        prompts: dict[int, list[float]] = {}
        for instance in instances:
            if (step_s := instance.pace.step_s) is not None:
                steps.setdefault(instance.tp, []).append(step_s)
            if (rate := instance.pace.prompt_tokens_per_s) is not None:
                prompts.setdefault(instance.tp, []).append(rate)
        self._steps_s |= {degree: median(values) for degree, values in steps.items()}
        self._prompt_tokens_per_s |= {degree: median(values) for degree, values in prompts.items()}
        transformations_s = {degrees: median(values) for degrees, values in self._transformations_s.items()}
        return Timing(dict(self._steps_s), dict(self._prompt_tokens_per_s), transformations_s, dict(self._throughput))

    def _take_throughput(self, instances: Sequence[Instance]) -> None:
        """Record the total throughput of all instances if it is a new maximum for their tensor-parallel degree.

        Do nothing if the instances have different degrees, if any instance is merging or splitting, or if any instance
        does not decode.
        """
        rates = [instance.pace.decode_rate for instance in instances if instance.running and not instance.transition]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(instances) or len({instance.tp for instance in instances}) != 1:
            return
        now = Throughput(sum(rate.sequences for rate in known), sum(rate.tokens_per_s for rate in known))
        before = self._throughput.get(degree := instances[0].tp)
        if before is None or now.tokens_per_s > before.tokens_per_s:
            self._throughput[degree] = now
