"""Has instances get in step before they change together.

The first to end its last step waits for those of the others, for up to a whole one, and so do its requests. So some
launch another step or two, and each waits a little before every one of them, so that all end together:

    TP1  |--- step ---|.|--- step ---|.| merged
    TP1  ------- step -------|..........| merged
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from amoeba_jax.instances.instance import Instance

# Shares of a step: for how long a request may wait besides, and how much longer the step takes that follows, beside
# which the first layers switch.
_WAIT_SHARE, _SWITCH_SHARE = 0.2, 0.1
_MOST_STEPS = 2
# The host's own times are as long as the waits for shorter steps would be.
_SHORT_STEP_S = 0.005


class Approach(NamedTuple):
    """What an instance does until all are in step: that many steps, and a wait, in seconds, before each of them and
    behind the last."""

    num_steps: int
    wait_s: float
    last_wait_s: float


def approaches(ends_s: Sequence[float], steps_s: Sequence[float]) -> list[Approach]:
    """The soonest way for instances to end a step together that has no request wait for long; where there is none
    within two steps, the one with the shortest waits.

    Args:
        ends_s: when each has run what it has launched.
        steps_s: how long a step of each takes.
    """
    meetings = {end + n * step for end, step in zip(ends_s, steps_s, strict=True) for n in range(_MOST_STEPS + 1)}
    best, least = list[Approach](), math.inf
    for meeting_s in sorted(at for at in meetings if at >= max(ends_s)):
        found = [_approach(meeting_s - end, step) for end, step in zip(ends_s, steps_s, strict=True)]
        share = max(_share(approach, step) for approach, step in zip(found, steps_s, strict=True))
        if share < least:
            best, least = found, share
        if least <= _WAIT_SHARE:
            break
    return best


def _approach(seconds: float, step_s: float) -> Approach:
    """With as many steps as there is time for."""
    num_steps = min(_MOST_STEPS, int(seconds / step_s + 1e-6))
    spare_s = max(seconds - num_steps * step_s, 0.0)
    last_wait_s = max((spare_s - num_steps * _SWITCH_SHARE * step_s) / (num_steps + 1), 0.0)
    return Approach(num_steps, (spare_s - last_wait_s) / max(num_steps, 1), last_wait_s)


def _share(approach: Approach, step_s: float) -> float:
    """The longest that a request waits besides, in steps."""
    return max(approach.wait_s / step_s, approach.last_wait_s / step_s + _SWITCH_SHARE)


class InStep:
    """Instances that are about to change together, and the steps that they launch before. Used by the dispatcher thread
    only.

    It is planned once: what steps take differs by more than a later plan would gain.

    Attributes:
        instances: all of them.
    """

    def __init__(self, instances: list[Instance], now: float):
        self.instances = instances
        active = [instance for instance in instances if instance.running]
        steps_s = [instance.pace.step_s or 0.0 for instance in active]
        self._planned: dict[Instance, tuple[int, float]] = {}
        """How many steps each that launches some will have launched in all then, and the wait before each."""
        if len(active) < 2 or min(steps_s) < _SHORT_STEP_S:
            return
        ends_s = [_end_s(i, step_s) - now for i, step_s in zip(active, steps_s, strict=True)]
        for instance, (num_steps, wait_s, _) in zip(active, approaches(ends_s, steps_s), strict=True):
            num_steps += instance.begun is not None
            self._planned[instance] = instance.num_launched + num_steps, wait_s

    def due_s(self, instance: Instance, now: float) -> float:
        """Seconds until one of them launches another step; infinite while one of its own computes, and where it has
        launched all that it is to."""
        num_launched, wait_s = self._planned.get(instance, (0, 0.0))
        if instance.num_launched >= num_launched or instance.has_steps:
            return math.inf
        return max(instance.pace.taken_at + wait_s - now, 0.0)


def _end_s(instance: Instance, step_s: float) -> float:
    """When an instance has run, or is expected to run, what it has launched or begun, by `time.perf_counter()`."""
    end_s = instance.pace.taken_at
    for step in instance.pending:
        expected = None if step.decodes else instance.pace.expected(step.launched_at, False, step.prompt_tokens)
        begins_at = max(end_s, step.launched_at)
        end_s = begins_at + step_s if expected is None else max(expected.ends_at, begins_at)
    if instance.begun is not None:
        end_s = max(end_s, instance.begun.launched_at) + step_s
    return end_s
