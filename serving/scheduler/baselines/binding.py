"""Base class of baseline policies (AMOEBA and Gyges papers) that assign each request to an instance on its arrival."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping

from serving.scheduler.actions import Action, Dispatch, ScaleUp
from serving.scheduler.admission import Admission
from serving.scheduler.room import Room
from serving.scheduler.split_rule import SplitConfig, SplitRule, split_to_release
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest

_MOST_SKIPPED = 32
"""Maximum number of waiting requests of one instance that a decision skips to serve later requests."""


class BindingPolicy(ABC):
    """Base class of policies that bind (assign) each request to an instance on arrival, whatever the request's size.

    If the instance is too small for the request, it merges with its neighbors. The papers do not say when instances
    split. Here, `SplitRule` decides. If an instance splits or disappears, the requests that wait for it are bound
    again.
    """

    def __init__(
        self, admission: Admission | None = None, reserved_growth: float = 0.0, splits: SplitConfig | None = None
    ):
        self._admission, self._growth = admission or Admission(), reserved_growth
        self._splits = SplitRule(splits or SplitConfig())
        self.device_of: dict[str, int] = {}
        """Device to which each request is bound, by request id."""
        self._pressed = False
        """Whether a short request was not dispatched in the last decision."""

    @abstractmethod
    def choose(self, instances: list[InstanceView], waiting_tokens: Mapping[int, int]) -> InstanceView:
        """Return the instance for the next request.

        Args:
            instances: possible instances in device order, at least one.
            waiting_tokens: number of prompt tokens that wait for an instance, by instance id.
        """

    def decide(self, view: ClusterView) -> list[Action]:
        """Return the next actions, in the order of their execution (`Policy.decide`)."""
        longest = view.longest
        rejects, queue = self._admission.screen(view, longest.capacity_tokens, f"a TP{longest.degree} instance")
        room = Room(view, self._growth)
        leaving = self._splits.leaving(view, room, self._pressed)
        self._bind(room, queue, view, {instance.id for instance, _ in leaving})
        splits = self._splits.split(view, room, leaving, self._pressed)
        served = self._serve(view, room, queue)
        dispatched = {action.request_id for action in served if isinstance(action, Dispatch)}
        self._pressed = any(
            request.request_id not in self.device_of
            or (request.request_id not in dispatched and not view.is_long(request.max_total_tokens))
            for request in queue
        )
        return [*rejects, *splits, *served]

    def _bind(self, room: Room, queue: list[WaitingRequest], view: ClusterView, leaving: set[int]) -> None:
        """Bind requests that have no instance, or whose instance will split (`leaving`: ids of these instances)."""
        present = {request.request_id for request in queue}
        staying = {device for device, instance in room.by_device.items() if instance.id not in leaving}
        self.device_of = {n: device for n, device in self.device_of.items() if n in present and device in staying}
        instances = [i for i in view.instances if room.is_steady(i) and i.id not in leaving]
        if not instances:
            return
        waiting_tokens: Counter[int] = Counter()
        for request in queue:
            if (device := self.device_of.get(request.request_id)) is not None:
                waiting_tokens[room.by_device[device].id] += request.prompt_tokens
        for request in queue:
            if request.request_id not in self.device_of:
                instance = self.choose(instances, waiting_tokens)
                self.device_of[request.request_id] = instance.devices[0]
                waiting_tokens[instance.id] += request.prompt_tokens

    def _serve(self, view: ClusterView, room: Room, queue: list[WaitingRequest]) -> list[Action]:
        """Return the actions for the bound requests, in the order of the queue.

        An instance gets no more requests once it is closed, or once `_MOST_SKIPPED` of its requests had to wait.
        """
        actions: list[Action] = []
        skipped: Counter[int] = Counter()
        done: set[int] = set()
        for request in queue:
            if (device := self.device_of.get(request.request_id)) is None:
                continue
            instance = room.by_device[device]
            if instance.id in done:
                continue
            placed = self._place(view, room, instance, request)
            actions += placed
            skipped[instance.id] += not placed
            if not room.is_open(instance) or skipped[instance.id] >= _MOST_SKIPPED:
                done.add(instance.id)
        return actions

    def _place(self, view: ClusterView, room: Room, instance: InstanceView, request: WaitingRequest) -> list[Action]:
        """Return the actions for a request that is bound to `instance`.

        - If the instance has room, dispatch the request.
        - If the instance is large enough but has no room now, close it, so that later requests do not take its tokens.
        - If the degree of the instance is too low for the request, merge the instance with its neighbors.
        - If the degree is high enough, the instance is too small because it has released no weights. Split it, so that
          its devices can merge again with more KV cache.
        """
        if room.has_room(instance, request):
            reason = f"its turn, load {room.load(instance):.2f}"
            room.assign(instance, request)
            return [Dispatch(request.request_id, instance.id, reason)]
        if not view.is_long(request.max_total_tokens) and room.can_join(instance, request):
            return [Dispatch(request.request_id, instance.id, room.join(instance, request))]
        if instance.capacity_tokens >= request.max_total_tokens or not room.is_open(instance):
            room.close(instance)
            return []
        return self._grow(view, room, instance, request)

    def _grow(self, view: ClusterView, room: Room, instance: InstanceView, request: WaitingRequest) -> list[Action]:
        degree = view.degree_for(request.max_total_tokens)
        assert degree is not None, "requests that fit at no degree are rejected"
        if instance.degree >= degree:  # it kept its weights: after a split, it can merge and release them
            split = split_to_release(view, room, instance, request)
            return [] if split is None else [split]
        first = instance.devices[0] - instance.devices[0] % degree
        devices = tuple(range(first, first + degree))
        if devices[-1] >= view.num_devices or (devices, degree) in view.refused:
            return []
        members = room.members(devices)
        if not all(room.is_open(member) for member in members):
            return []
        for member in members:
            room.close(member)
        reason = f"{request.request_id} may grow to {request.max_total_tokens} tokens and its instance holds fewer"
        return [ScaleUp(devices, degree, reason)]
