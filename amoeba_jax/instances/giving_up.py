"""What becomes of sequences whose instance has lost its cache."""

from collections.abc import Callable, Iterable

from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step_plan import Row


def forget_tokens(sampled: Iterable[Row]) -> None:
    """Tokens that were in flight never come. Their sequences run nowhere else: a preempted one waits for its token
    before it starts again. Others of the same step may run elsewhere, if they were preempted in the midst of their
    prompts."""
    for row in sampled:
        row.sequence.num_in_flight = 0


def give_up(instance: Instance, requeue: Callable[[Instance, Sequence], None]) -> None:
    """Have the sequences of an instance, and those that are paused on its devices, computed again.

    Args:
        requeue: takes a sequence off its instance, to be computed again.
    """
    paused = instance.drop_paused()
    for each in (instance, *paused):
        forget_tokens(row for step in each.pending for row in step.sampled)
        each.pending.clear()
        for lane in each.lanes:
            lane.cache.clear()
            lane.cache.enabled = False  # what it holds is lost: there is nothing to keep
        for sequence in list(each.running):
            requeue(each, sequence)
    for each in paused:
        each.retire()
