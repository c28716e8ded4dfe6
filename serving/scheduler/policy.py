"""Interface of all policies."""

from typing import Protocol

from serving.scheduler.actions import Action
from serving.scheduler.view import ClusterView


class Policy(Protocol):
    """Rule for placing requests and changing instances. Equal sequences of snapshots give equal decisions."""

    name: str

    def decide(self, view: ClusterView) -> list[Action]:
        """Return the next actions, in the order of their execution."""
        ...
