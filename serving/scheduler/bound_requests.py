"""Waiting requests by the device whose instance they wait for."""

from collections.abc import Callable, Collection, Iterator, Mapping, Set
from heapq import merge

from serving.scheduler.ordered_requests import OrderedRequests
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.view import InstanceView, WaitingRequest

Choose = Callable[[], InstanceView]


class BoundRequests:
    """A queue for each device, changed by what changes in the queue of all."""

    def __init__(self, order: QueueOrder):
        self._order = order
        self.device_of: dict[str, int] = {}
        """The device of each request that is bound."""
        self._queues: dict[int, OrderedRequests] = {}
        self.tokens: dict[int, int] = {}
        """Prompt tokens that wait, by device."""
        self.touched: set[int] = set()
        """Devices whose queues have changed since the owner emptied this."""
        self._unbound: dict[str, WaitingRequest] = {}

    def update(self, changes: Mapping[str, WaitingRequest | None]) -> None:
        """Take over what has changed in the queue: see `QueueIndex.update`. Requests that stay keep their device."""
        for name, request in changes.items():
            self._unbound.pop(name, None)
            device = self._take(name)
            if request is not None and device is not None:
                self._put(device, request)
            elif request is not None:
                self._unbound[name] = request

    def leave(self, devices: Set[int]) -> None:
        """Requests of these devices are bound no longer."""
        for device in devices & self._queues.keys():
            for request in list(self._queues[device]):
                self._take(request.request_id)
                self._unbound[request.request_id] = request

    def bind(self, choose: Choose, now_s: float, gone: Collection[str]) -> None:
        """Choose an instance for each request that has none, but for those that are `gone`."""
        for request in sorted(self._unbound.values(), key=lambda r: self._order.key(r, now_s)):
            if request.request_id not in gone:
                device = choose().devices[0]
                del self._unbound[request.request_id]
                self._put(device, request)

    @property
    def unbound(self) -> Set[str]:
        """Ids of requests that have no instance to wait for."""
        return self._unbound.keys()

    def waits_for(self, instance: InstanceView) -> bool:
        """Some request waits for an instance."""
        return not self._queues.keys().isdisjoint(instance.devices)

    def ordered(self, instance: InstanceView, now_s: float) -> Iterator[WaitingRequest]:
        """Requests that wait for an instance as they are served."""
        queues = [self._queues[device] for device in instance.devices if device in self._queues]
        if len(queues) == 1:
            return queues[0].ordered(now_s)
        return merge(*(queue.ordered(now_s) for queue in queues), key=lambda r: self._order.key(r, now_s))

    def _put(self, device: int, request: WaitingRequest) -> None:
        self.device_of[request.request_id] = device
        if device not in self._queues:
            self._queues[device], self.tokens[device] = OrderedRequests(self._order), 0
        self._queues[device].add((request,))
        self.touched.add(device)
        self.tokens[device] += request.prompt_tokens

    def _take(self, name: str) -> int | None:
        """Take a request out of its device's queue. Returns the device."""
        if (device := self.device_of.pop(name, None)) is None:
            return None
        queue = self._queues[device]
        request = queue.remove(name)
        self.touched.add(device)
        assert request is not None, "it is bound"
        self.tokens[device] -= request.prompt_tokens
        if not queue:
            del self._queues[device], self.tokens[device]
        return device
