"""Baseline policy: instances take turns."""

from collections.abc import Mapping

from serving.scheduler.admission import Admission
from serving.scheduler.baselines.binding import BindingPolicy
from serving.scheduler.split_rule import SplitConfig
from serving.scheduler.view import InstanceView


class RoundRobinPolicy(BindingPolicy):
    """Policy `round_robin`: each request goes to the next instance in device order."""

    name = "round_robin"

    def __init__(
        self, admission: Admission | None = None, reserved_growth: float = 0.0, splits: SplitConfig | None = None
    ):
        super().__init__(admission, reserved_growth, splits)
        self._next_device = 0

    def choose(self, instances: list[InstanceView], waiting_tokens: Mapping[int, int]) -> InstanceView:
        """Return the instance for the next request (`BindingPolicy.choose`)."""
        chosen = next((i for i in instances if i.devices[0] >= self._next_device), instances[0])
        self._next_device = chosen.devices[-1] + 1
        return chosen
