"""Baseline: instances take turns."""

from serving.scheduler.actions import Action
from serving.scheduler.admission import Admission
from serving.scheduler.naive import BoundRequests
from serving.scheduler.split_rule import SplitConfig
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest


class RoundRobinPolicy:
    """Gives each request to the next instance in the order of devices. The instance merges with its neighbours for one
    that it can't hold, and splits by `SplitRule`."""

    name = "round_robin"

    def __init__(
        self, admission: Admission | None = None, reserved_growth: float = 0.0, splits: SplitConfig | None = None
    ):
        self._bound = BoundRequests(admission or Admission(), reserved_growth, splits or SplitConfig())
        self._next_device = 0

    def decide(self, view: ClusterView) -> list[Action]:
        """See `Policy.decide`."""
        return self._bound.decide(view, self._choose)

    def _choose(self, choices: list[InstanceView], request: WaitingRequest) -> InstanceView:
        chosen = min(choices, key=lambda i: (i.devices[0] < self._next_device, i.devices[0]))
        self._next_device = chosen.devices[-1] + 1
        return chosen
