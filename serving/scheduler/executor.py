"""Interface of the scheduler to a cluster, real or simulated."""

from dataclasses import dataclass
from typing import Protocol

from serving.scheduler.actions import Action
from serving.scheduler.view import ClusterView


@dataclass(frozen=True)
class Outcome:
    """Answer of an executor to an action: accepted, or refused with a reason."""

    accepted: bool
    detail: str = ""
    """Reason for a refusal, for the log."""
    soon: bool = False
    """Whether the action was refused only because programs are still being compiled. It may be accepted soon."""


class Executor(Protocol):
    """Interface to a cluster: the owner of the instances and the queue.

    The methods run in one thread and never wait for a device. The next snapshot shows the effect of an accepted action:
    a dispatched or rejected request has left the queue, and a preempted request is in the queue again. While an
    instance merges or splits, its `transition_to` is set. During a placement change, its `changes_placement` is set.

    A merge or split has failed if it ends and the instances do not have the requested degree. The requests of these
    instances still run or wait. A placement change has failed if it ends and some layers are not on their new devices.
    """

    def snapshot(self) -> ClusterView:
        """Return the present state of the cluster."""
        ...

    def apply(self, action: Action) -> Outcome:
        """Start an action, or refuse it without changes. An invalid action is refused, without an exception."""
        ...
