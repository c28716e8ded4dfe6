"""Who decides where waiting sequences go: the engine itself, or whatever it is given for that, such as a scheduler."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from amoeba_jax.engine.engine import Engine


class Placement(Protocol):
    """Decides about `engine.waiting`. Called in the dispatcher thread, between steps; must not wait for a device.

    Attributes:
        interval_s: seconds after which `place` is called again though nothing has happened.
    """

    interval_s: float

    def place(self, engine: "Engine") -> None:
        """Start, preempt and reject sequences, and change instances, by `Engine.start`, `preempt`, `reject` and
        `transform`. Whatever it leaves in `engine.waiting` waits; `Engine.num_changes` tells whether anything has
        happened that bears on it."""
        ...
