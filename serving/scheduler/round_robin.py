"""Baseline: instances take turns."""

from bisect import bisect_left

from serving.scheduler.admission import Admission
from serving.scheduler.naive import BindingPolicy
from serving.scheduler.split_rule import SplitConfig
from serving.scheduler.view import InstanceView, WaitingRequest


class RoundRobinPolicy(BindingPolicy):
    """Gives each request to the next instance in the order of devices. The instance merges with its neighbours for one
    that it can't hold, and splits by `SplitRule`."""

    name = "round_robin"

    def __init__(
        self, admission: Admission | None = None, reserved_growth: float = 0.0, splits: SplitConfig | None = None
    ):
        super().__init__(admission, reserved_growth, splits)
        self._next_device = 0

    def choose(self, choices: list[InstanceView], request: WaitingRequest) -> InstanceView:
        """See `BindingPolicy.choose`."""
        place = bisect_left(choices, self._next_device, key=lambda i: i.devices[0])
        chosen = choices[place % len(choices)]
        self._next_device = chosen.devices[-1] + 1
        return chosen
