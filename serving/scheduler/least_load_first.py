"""Baseline: the least-loaded instance is next."""

from bisect import insort
from collections.abc import Collection, Set

from serving.scheduler.admission import Admission
from serving.scheduler.instance_tables import discard
from serving.scheduler.naive import BindingPolicy
from serving.scheduler.room import Room
from serving.scheduler.split_rule import SplitConfig
from serving.scheduler.view import InstanceView


class LeastLoadFirstPolicy(BindingPolicy):
    """Gives each request to the instance with the smallest load, whether it could hold the request or not. The instance
    merges with its neighbours for one that it can't hold, and splits by `SplitRule`."""

    name = "least_load_first"

    def __init__(
        self, admission: Admission | None = None, reserved_growth: float = 0.0, splits: SplitConfig | None = None
    ):
        super().__init__(admission, reserved_growth, splits)
        self._room_listed: Room | None = None
        self._by_load: list[tuple[float, int]] = []
        """Load and first device of each instance, in order."""
        self._loads: dict[int, float] = {}
        """By first device, as listed."""
        self._changed: set[int] = set()
        """Devices whose instance is to be listed again before the next choice."""

    def loads_changed(self, devices: Set[int]) -> None:
        """See `BindingPolicy.loads_changed`."""
        self._changed |= devices

    def choose(self, room: Room, closed: Collection[int]) -> InstanceView:
        """See `BindingPolicy.choose`. What waits for an instance counts as its load."""
        self._list_again(room)
        for _, device in self._by_load:
            if (chosen := room.home[device]).id not in closed:
                self._changed.add(device)  # what waits for it is about to change
                return chosen
        raise LookupError("all instances are closed")

    def _list_again(self, room: Room) -> None:
        if room is not self._room_listed:
            self._room_listed, self._by_load, self._loads, self._changed = room, [], {}, set(room.home)
        changed = {room.home[device].devices[0] if device in room.home else device for device in self._changed}
        for device in changed | self._changed:
            if (load := self._loads.pop(device, None)) is not None:
                discard(self._by_load, (load, device))
        for device in changed & room.home.keys():
            load = self._loads[device] = self._load(room.home[device])
            insort(self._by_load, (load, device))
        self._changed.clear()

    def _load(self, instance: InstanceView) -> float:
        tokens = sum(self.bound.tokens.get(device, 0) for device in instance.devices)
        return instance.load + 2 * tokens / instance.capacity_tokens
