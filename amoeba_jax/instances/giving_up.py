"""What becomes of sequences whose instance has lost its cache."""

from collections.abc import Callable

from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Sequence


def give_up(instance: Instance, requeue: Callable[[Instance, Sequence], None]) -> None:
    """Have the sequences of an instance, and those that are paused on its devices, computed again.

    Args:
        requeue: takes a sequence off its instance, to be computed again.
    """
    paused = instance.drop_paused()
    for each in (instance, *paused):
        for row in (row for step in each.pending for row in step.sampled):
            row.sequence.num_in_flight = 0  # its token never comes; also if it was preempted a moment ago
        each.pending.clear()
        for lane in each.lanes:
            lane.cache.clear()
            lane.cache.enabled = False  # what it holds is lost: there is nothing to keep
        for sequence in list(each.running):
            requeue(each, sequence)
    for each in paused:
        each.retire()
