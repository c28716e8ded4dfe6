"""Has instances get in step before they change together.

The first to end its last step waits for those of the others, for up to a whole one, and so do its requests. So some
launch another step or two, and wait a little before each, so that all end together:

    TP1  -- step --|..|---- step ----|..|---- step ----|.|
    TP1  -------- step --------|.|------- step --------|.| merged
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
_LEAST_STEP_S = 0.005


class LastStep(NamedTuple):
    """What an instance has launched.

    Attributes:
        end_s: when all of that is expected to have run, in seconds of `time.perf_counter`.
        step_s: seconds that another step takes; infinite where it has no requests that wait for one.
        most_steps: how many more it may launch.
    """

    end_s: float
    step_s: float
    most_steps: int


class Approach(NamedTuple):
    """What an instance does until all are in step: that many steps, with a wait, in seconds, before each of them, and
    one behind the last."""

    num_steps: int
    wait_s: float
    last_wait_s: float


def approaches(members: Sequence[LastStep]) -> list[Approach]:
    """The soonest way for instances to end a step together that has no request wait for long; where there is none, the
    one with the shortest waits."""
    meetings = {m.end_s for m in members}
    meetings |= {m.end_s + n * m.step_s for m in members for n in range(1, m.most_steps + 1)}
    best, least = list[Approach](), math.inf
    for meeting_s in sorted(at for at in meetings if at >= max(m.end_s for m in members)):
        found = [_approach(member, meeting_s) for member in members]
        share = max(_share(approach, member.step_s) for approach, member in zip(found, members, strict=True))
        if share < least:
            best, least = found, share
        if least <= _WAIT_SHARE:
            break
    return best


def _approach(member: LastStep, meeting_s: float) -> Approach:
    """With as many steps as there is time for. The waits before them are longer than the last, as the step behind that
    is longer."""
    seconds, step_s = meeting_s - member.end_s, member.step_s
    num_steps = min(member.most_steps, int(seconds / step_s + 1e-6))
    if num_steps == 0:
        return Approach(0, 0.0, seconds)
    spare_s = max(seconds - num_steps * step_s, 0.0)
    last_wait_s = max((spare_s - num_steps * _SWITCH_SHARE * step_s) / (num_steps + 1), 0.0)
    return Approach(num_steps, (spare_s - last_wait_s) / num_steps, last_wait_s)


def _share(approach: Approach, step_s: float) -> float:
    """The longest that a request waits besides, in steps."""
    return max(approach.wait_s / step_s, approach.last_wait_s / step_s + _SWITCH_SHARE)


class InStep:
    """Instances that are about to change together, and the steps that they launch before. Used by the dispatcher thread
    only.

    It is planned once: what steps take differs by more than a later plan would gain.

    Args:
        instances: some of which have steps that run.
        now: in seconds of `time.perf_counter`.
    """

    def __init__(self, instances: Sequence[Instance], now: float):
        self._planned_at = now
        self._planned: dict[Instance, tuple[int, float]] = {}
        """How many steps each that launches some will have launched in all then, and the wait before each."""
        active = [i for i in instances if i.has_steps or i.running]
        members = [_last_step(instance, now) for instance in active]
        if min(member.step_s for member in members) <= _LEAST_STEP_S:
            return
        for instance, (num_steps, wait_s, _) in zip(active, approaches(members), strict=True):
            if num_steps:
                num_steps += instance.begun is not None
                self._planned[instance] = instance.num_launched + num_steps, wait_s

    def due_s(self, instance: Instance, now: float) -> float:
        """Seconds from `now` until one of them launches another step; infinite while one of its own computes, and where
        it has launched all that it is to."""
        num_launched, wait_s = self._planned.get(instance, (0, 0.0))
        if instance.num_launched >= num_launched or instance.has_steps:
            return math.inf
        return max(max(instance.pace.taken_at, self._planned_at) + wait_s - now, 0.0)


def _last_step(instance: Instance, now: float) -> LastStep:
    """What an instance has launched. It launches no more with a prompt to compute, which others would wait for, or
    without pages for them, which a request would lose."""
    going_on = [sequence for sequence in instance.running if sequence.num_uncomputed_tokens > 0]
    step_s = (instance.pace.step_s or 0.0) if going_on else math.inf
    decode = all(s.num_uncomputed_tokens == 1 and not s.needs_prompt_logits for s in going_on)
    has_room = instance.lane.cache.num_available_pages >= _MOST_STEPS * len(going_on)
    most_steps = _MOST_STEPS if going_on and decode and has_room else 0
    return LastStep(max(_end_s(instance), now), step_s, most_steps)


def _end_s(instance: Instance) -> float:
    """When an instance has run, or is expected to run, what it has launched or begun, by `time.perf_counter()`."""
    pace, end_s = instance.pace, instance.pace.taken_at
    steps = [(step.launched_at, step.decodes, step.prompt_tokens) for step in instance.pending]
    if (begun := instance.begun) is not None:
        steps.append((begun.launched_at, begun.plan.decodes, begun.plan.prompt_tokens))
    for launched_at, decodes, prompt_tokens in steps:
        expected = None if decodes else pace.expected(launched_at, False, prompt_tokens)
        begins_at = max(end_s, launched_at)
        end_s = begins_at + (pace.step_s or 0.0) if expected is None else max(expected.ends_at, begins_at)
    return end_s
