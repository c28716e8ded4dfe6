"""What the baselines share: a request is bound to an instance when it is first seen, and that instance's devices
merge for what they were given, as the baselines in the papers on AMOEBA and Gyges do. They split by the rule that all
policies have; the papers say nothing about it."""

from collections.abc import Callable

from serving.scheduler.actions import Action, Dispatch, ScaleDown, ScaleUp
from serving.scheduler.admission import Admission
from serving.scheduler.instance_facts import fits_split
from serving.scheduler.room import Room
from serving.scheduler.split_rule import SplitConfig, SplitRule
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest

Choose = Callable[[list[InstanceView], WaitingRequest], InstanceView]


class BoundRequests:
    """Waiting requests by the device whose instance they wait for. One whose instance takes no new requests any more
    is bound again."""

    def __init__(self, admission: Admission, reserved_growth: float, splits: SplitConfig):
        self.admission, self.reserved_growth = admission, reserved_growth
        self.splits, self._index = SplitRule(splits), admission.index()
        self.device_of: dict[str, int] = {}
        self._pressed = False
        """A short request found no room when decisions were last made."""

    def waiting_tokens(self, view: ClusterView) -> dict[int, int]:
        """Prompt tokens that wait for each instance, by its id."""
        home = {device: instance.id for instance in view.instances for device in instance.devices}
        waiting = {instance.id: 0 for instance in view.instances}
        for request in view.queue:
            if (device := self.device_of.get(request.request_id)) in home:
                waiting[home[device]] += request.prompt_tokens
        return waiting

    def decide(self, view: ClusterView, choose: Choose) -> list[Action]:
        """Bind new requests with `choose`; then split, dispatch and merge. An instance serves in the queue's order."""
        rejects, queue = self.admission.screen(view, self._index, f"a TP{view.longest.degree} instance")
        known = {request.request_id for request in queue}
        leaving = self.splits.leaving(view, view.instances, view.with_hidden(self._index.largest), self._pressed)
        left = {instance.id for instance, _ in leaving}
        served = {device for i in view.instances if i.id not in left for device in i.devices}
        self.device_of = {n: device for n, device in self.device_of.items() if n in known and device in served}
        choices = [i for i in view.instances if i.transition_to is None and not i.draining and i.id not in left]
        for request in queue:
            if request.request_id not in self.device_of and choices:
                self.device_of[request.request_id] = choose(choices, request).devices[0]
        room = Room(view, self.reserved_growth)
        actions: list[Action] = [*rejects, *self.splits.split(view, room, leaving, self._pressed)]
        homes = {device: instance for instance in view.instances for device in instance.devices}
        placed = 0
        for request in queue:
            if (device := self.device_of.get(request.request_id)) is not None:
                actions += (done := self._place(view, room, homes[device], request))
                placed += any(isinstance(action, Dispatch) for action in done) or view.is_long(request.max_total_tokens)
        self._pressed = placed < len(queue)
        return actions

    def _place(self, view: ClusterView, room: Room, instance: InstanceView, request: WaitingRequest) -> list[Action]:
        """Dispatch a request to its instance; or make that instance grow, if it is too small; or wait for room."""
        if instance in room.with_room(request):
            reason = f"its turn, load {room.load(instance):.2f}"
            room.give(instance, request)
            return [Dispatch(request.request_id, instance.id, reason)]
        if not view.is_long(request.max_total_tokens) and room.can_join(instance, request):
            return [Dispatch(request.request_id, instance.id, room.join(instance, request))]
        degree = view.degree_for(request.max_total_tokens)
        assert degree is not None, "requests that fit at no degree were turned away"
        if not room.takes(instance) or instance.capacity_tokens >= request.max_total_tokens:
            room.close(instance)
            return []
        if instance.degree >= degree:  # it was merged without releasing weights: split, it can merge and release them
            room.close(instance)
            if not fits_split(view, instance, view.base_degree) or (instance.devices, view.base_degree) in view.refused:
                return []
            reason = f"it keeps weights and holds fewer than the {request.max_total_tokens} tokens of its next request"
            return [ScaleDown(instance.devices, view.base_degree, reason)]
        devices = next(group for group in view.groups(degree) if instance.devices[0] in group)
        members = view.instances_on(devices)
        if not all(room.takes(member) for member in members) or (devices, degree) in view.refused:
            return []
        for member in members:
            room.close(member)
        reason = f"{request.request_id} may grow to {request.max_total_tokens} tokens and its instance holds fewer"
        return [ScaleUp(devices, degree, reason)]
