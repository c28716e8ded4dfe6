"""What decides where waiting sequences go in place of the engine itself, such as a scheduler."""

from typing import Protocol


class SchedulerHook(Protocol):
    """Decides about the `waiting` sequences of the engine that it was made for.

    Attributes:
        interval_s: seconds after which `schedule` is called again though nothing has happened.
    """

    interval_s: float

    def schedule(self) -> None:
        """Start, preempt and reject sequences, and change instances, by `Engine.admission`, `Engine.reject`
        and `Engine.transform`. Called in the dispatcher thread, between steps; must not wait for a device.

        Whatever it leaves in `Engine.waiting` waits. `Engine.num_changes` tells whether anything has happened that
        bears on it."""
        ...
