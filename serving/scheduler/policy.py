"""Interface of all policies."""

from typing import Protocol

from serving.scheduler.actions import Action
from serving.scheduler.view import ClusterView


class Policy(Protocol):
    """Interface of a rule that places requests and changes instances.

    Equal sequences of snapshots give equal decisions.
    """

    name: str

    def decide(self, view: ClusterView) -> list[Action]:
        """Return the next actions, in the order of their execution."""
        ...
