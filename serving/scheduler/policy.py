"""What all policies have in common."""

from typing import Protocol

from serving.scheduler.actions import Action
from serving.scheduler.view import ClusterView


class Policy(Protocol):
    """Decides from a snapshot what to do next. Deterministic: equal snapshots in equal order give equal decisions."""

    name: str

    def decide(self, view: ClusterView) -> list[Action]:
        """Actions in the order in which they are to be carried out."""
        ...
