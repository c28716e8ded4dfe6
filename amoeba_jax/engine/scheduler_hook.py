"""Interface of a scheduler that decides where waiting sequences run."""

from typing import Protocol


class SchedulerHook(Protocol):
    """Scheduler of the `waiting` sequences of one engine.

    Attributes:
        interval_s: longest time between two calls of `schedule`, in seconds.
    """

    interval_s: float

    def schedule(self) -> None:
        """Start, preempt and reject sequences, and change instances.

        Uses `Engine.admission`, `Sequences.reject` and `Engine.transform`. Sequences that stay in `Engine.waiting`
        wait. `Sequences.num_changes` grows if the decision may be different. Runs in the dispatcher thread between
        steps, and must not wait for a device.
        """
        ...
