"""Baseline: instances take turns."""

import itertools
from collections.abc import Collection

from serving.scheduler.admission import Admission
from serving.scheduler.naive import BindingPolicy
from serving.scheduler.room import Room
from serving.scheduler.split_rule import SplitConfig
from serving.scheduler.view import InstanceView


class RoundRobinPolicy(BindingPolicy):
    """Gives each request to the next instance in the order of devices. The instance merges with its neighbours for one
    that it can't hold, and splits by `SplitRule`."""

    name = "round_robin"

    def __init__(
        self, admission: Admission | None = None, reserved_growth: float = 0.0, splits: SplitConfig | None = None
    ):
        super().__init__(admission, reserved_growth, splits)
        self._next_device = 0

    def choose(self, room: Room, closed: Collection[int]) -> InstanceView:
        """See `BindingPolicy.choose`."""
        num_devices = room.num_devices
        for device in itertools.chain(range(self._next_device, num_devices), range(num_devices)):
            chosen = room.home.get(device)
            if chosen is not None and chosen.devices[0] == device and chosen.id not in closed:
                self._next_device = chosen.devices[-1] + 1
                return chosen
        raise LookupError("all instances are closed")
