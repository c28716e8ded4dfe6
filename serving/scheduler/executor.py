"""What carries out a scheduler's decisions: real devices, or a simulation of them."""

from dataclasses import dataclass
from typing import Protocol

from serving.scheduler.actions import Action
from serving.scheduler.view import ClusterView


@dataclass(frozen=True)
class Outcome:
    """Whether an action was taken on."""

    accepted: bool
    detail: str = ""
    """Why not, in words for the log."""
    soon: bool = False
    """Refused for want of what is being prepared."""


class Executor(Protocol):
    """Owns instances and the queue. Both methods are called from one thread, and neither waits for a device.

    What is accepted shows in the next snapshot: a dispatched or rejected request is in the queue no more, a preempted
    one is there again, and the instances of a transformation have `transition_to` set until it has ended. One that ends
    without its degree in place has failed, and its requests run on, or wait.
    """

    def snapshot(self) -> ClusterView:
        """The present state."""
        ...

    def apply(self, action: Action) -> Outcome:
        """Take on an action, or refuse it with nothing changed. Raises nothing that a policy could cause."""
        ...
