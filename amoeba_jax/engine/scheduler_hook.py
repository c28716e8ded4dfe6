"""Interface of a scheduler that decides where waiting sequences run."""

from typing import Protocol


class SchedulerHook(Protocol):
    """Interface of a scheduler for the waiting sequences of one engine.

    Attributes:
        interval_s: longest time between two calls of `schedule`, in seconds.
    """

    interval_s: float

    def schedule(self) -> None:
        """Decide: start, preempt or reject sequences, or change instances.

        The methods for this are in `Engine.admission`, `Sequences.reject` and `Engine.transform`. All other sequences
        stay in `Engine.waiting`. If `Sequences.num_changes` has not grown, the decision would be the same as before.
        Runs in the dispatcher thread between steps, and must not wait for a device.
        """
        ...
