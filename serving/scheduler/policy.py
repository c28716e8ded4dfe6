"""Interface of all scheduling policies."""

from typing import Protocol

from serving.scheduler.actions import Action
from serving.scheduler.view import ClusterView


class Policy(Protocol):
    """Interface of a scheduling policy, which assigns requests to instances, and merges and splits instances.

    A policy is deterministic: equal sequences of snapshots give equal decisions.
    """

    name: str

    def decide(self, view: ClusterView) -> list[Action]:
        """Return the next actions, in the order in which to execute them."""
        ...
