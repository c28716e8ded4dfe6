"""What the baselines share: a request is bound to an instance when it is first seen, and that instance's devices
merge for what they were given, as the baselines in the papers on AMOEBA and Gyges do. They split by the rule that all
policies have; the papers say nothing about it."""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Set

from serving.scheduler.actions import Action, Dispatch, ScaleDown, ScaleUp
from serving.scheduler.admission import Admission
from serving.scheduler.bound_requests import BoundRequests
from serving.scheduler.instance_facts import fits_split
from serving.scheduler.queue_order import Key, QueueOrder
from serving.scheduler.room import KeptRoom, Room
from serving.scheduler.split_rule import SplitConfig, SplitRule
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest

_MOST_PASSED = 32
"""Requests of one instance that wait for it to merge, and that a decision goes past to those behind them."""


class BindingPolicy(ABC):
    """Serves each instance in the order of its own queue. A request whose instance is about to split, or is not there
    any more, is bound again. A decision looks at the first requests of instances, and not again at those that found no
    room if nothing has changed for them; it goes past some that wait for their instance to merge."""

    def __init__(
        self, admission: Admission | None = None, reserved_growth: float = 0.0, splits: SplitConfig | None = None
    ):
        self._admission, self._room = admission or Admission(), KeptRoom(reserved_growth)
        self._splits, self._index = SplitRule(splits or SplitConfig()), self._admission.index()
        self.bound = BoundRequests(self._admission.order)
        self._wait: dict[int, Key | None] = {}
        """Instances, by id, that serve no request of their queue until something changes for them, and the place in the
        queue from which on they are kept for their own; None: they may merge for others."""
        self._refused_wait: set[int] = set()
        """Ids of those that wait as a transformation is refused: they may serve once others are."""
        self._look: set[int] = set()
        """Devices whose queues are to be looked at."""
        self._before: tuple[float, object] = (float("-inf"), None)
        """When decisions were last made, and what was refused then."""
        self._pressed = False
        """A short request found no room when decisions were last made."""

    @abstractmethod
    def choose(self, room: Room, closed: Collection[int]) -> InstanceView:
        """The instance that the next request is to wait for, none of those with the ids `closed`; some other is there.
        Called once for each of 10,000 requests where a policy begins with a long queue."""

    def loads_changed(self, devices: Set[int]) -> None:  # noqa: B027 - most policies have nothing to do
        """The instances of these devices have changed, or what waits for them has."""

    def decide(self, view: ClusterView) -> list[Action]:
        """Bind new requests, then split, dispatch and merge: see `Policy.decide`."""
        index, bound, room, longest = self._index, self.bound, self._room.of(view), view.longest
        changed = {device for instance in room.changed for device in instance.devices}
        self._look |= changed
        self.loads_changed(changed)
        bound.update(index.update(view.queue))
        rejects = self._admission.turn_away(view, index, longest.capacity_tokens, f"a TP{longest.degree} instance")
        gone = {reject.request_id for reject in rejects}
        largest = view.with_hidden(index.largest)
        leaving = self._splits.leaving(view, room.merged.values(), largest, self._pressed)
        left = {instance.id for instance, _ in leaving}
        home = room.home
        if left or len(home) < view.num_devices:
            bound.leave({d for d in range(view.num_devices) if d not in home or home[d].id in left})
        self.loads_changed(bound.touched)
        closed = left | room.unsteady.keys()
        if bound.unbound and len(closed) < len(view.instances):
            bound.bind(lambda: self.choose(room, closed), view.now_s, gone)
        actions: list[Action] = [*rejects, *self._splits.split(view, room, leaving, self._pressed)]
        served = self._serve(view, room, gone)
        self._pressed = self._has_waiting(view, gone, served)
        return actions + served

    def _has_waiting(self, view: ClusterView, gone: set[str], served: list[Action]) -> bool:
        """Whether a short request was given no instance, or any request has none to wait for."""
        base_tokens = view.limits[view.base_degree].capacity_tokens
        settled = gone.union(action.request_id for action in served if isinstance(action, Dispatch))
        sizes = [self._index.get(name).max_total_tokens for name in settled]
        num_short = self._index.count(base_tokens) - sum(size <= base_tokens for size in sizes)
        return num_short > 0 or not self.bound.unbound <= gone

    def _serve(self, view: ClusterView, room: Room, gone: Collection[str]) -> list[Action]:
        """Serve the instances for which something has changed, or that may serve what was not served before."""
        bound, look, refused = self.bound, self._look, (view.refused, view.merge_to)
        look |= bound.touched
        starving = self._index.began_to_starve(self._before[0], view.now_s)
        look.update(bound.device_of[name] for name in (*starving, *gone) if name in bound.device_of)
        if refused != self._before[1]:
            look |= self._refused_wait
        bound.touched.clear()
        found = {(i := room.home[device]).id: i for device in look if device in room.home}
        for number in look.union(found):
            self._wait.pop(number, None)
        instances = [i for i in found.values() if bound.waits_for(i)]
        turns = _Turns(view, room, bound, self._admission.order, self._wait)
        actions = turns.serve(instances, gone)
        numbers = {instance.id for instance in instances}
        self._wait |= {number: turns.closed.get(number) for number in numbers - turns.again}
        self._refused_wait = (self._refused_wait | turns.refused) & self._wait.keys()
        self._look, self._before = numbers & turns.again, (view.now_s, refused)
        return actions


class _Turns:
    """One decision: instances take turns, each time the one whose next request is ahead of those of all others."""

    def __init__(
        self, view: ClusterView, room: Room, bound: BoundRequests, order: QueueOrder, wait: Mapping[int, Key | None]
    ):
        self._view, self._room, self._bound, self._order = view, room, bound, order
        self._wait = wait
        """Instances that are not looked at: see `BindingPolicy`."""
        self.closed: dict[int, Key] = {}
        """The place in the queue of the first request of instances, by id, that found no room."""
        self.again: set[int] = set()
        """Ids of instances that may serve more requests of their queue though nothing changes for them."""
        self.refused: set[int] = set()
        """Ids of instances whose queue has a request that waits for a transformation that is refused."""

    def serve(self, instances: Iterable[InstanceView], gone: Collection[str]) -> list[Action]:
        """Decide about the first requests of instances, and those behind them where these were placed.

        Args:
            gone: requests that were turned away.
        """
        room, bound, now_s, actions = self._room, self._bound, self._view.now_s, []
        turns = []
        for instance in instances:
            requests = (r for r in bound.ordered(instance, now_s) if r.request_id not in gone)
            if (first := next(requests, None)) is not None:
                turns.append((self._order.key(first, now_s), instance.id, first, requests, 0))
        heapq.heapify(turns)
        while turns:
            key, number, request, requests, passed = heapq.heappop(turns)
            instance = room.home[number]
            if done := self._place(instance, request, key):
                actions += done
                self.again.add(number)
            passed += not done
            if room.takes(instance) and passed < _MOST_PASSED and (request := next(requests, None)) is not None:
                heapq.heappush(turns, (self._order.key(request, now_s), number, request, requests, passed))
        return actions

    def _place(self, instance: InstanceView, request: WaitingRequest, key: Key) -> list[Action]:
        """Dispatch a request to its instance; or make that instance grow, if it is too small; or wait for room."""
        view, room = self._view, self._room
        if room.has_room(instance, request):
            reason = f"its turn, load {room.load(instance):.2f}"
            room.give(instance, request)
            return [Dispatch(request.request_id, instance.id, reason)]
        if not view.is_long(request.max_total_tokens) and room.can_join(instance, request):
            return [Dispatch(request.request_id, instance.id, room.join(instance, request))]
        if instance.capacity_tokens >= request.max_total_tokens or not room.takes(instance):
            if not room.is_untouched(instance):
                self.again.add(instance.id)
            self.closed[instance.id] = key
            room.close(instance)
            return []
        return self._grow(instance, request, key)

    def _grow(self, instance: InstanceView, request: WaitingRequest, key: Key) -> list[Action]:
        view, room = self._view, self._room
        degree = view.degree_for(request.max_total_tokens)
        assert degree is not None, "requests that fit at no degree were turned away"
        if instance.degree >= degree:  # it was merged without releasing weights: split, it can merge and release them
            room.close(instance)
            if not fits_split(view, instance, view.base_degree) or self._is_refused(
                instance, instance.devices, view.base_degree
            ):
                return []
            reason = f"it keeps weights and holds fewer than the {request.max_total_tokens} tokens of its next request"
            return [ScaleDown(instance.devices, view.base_degree, reason)]
        first = instance.devices[0] - instance.devices[0] % degree
        devices = tuple(range(first, first + degree))
        if devices[-1] >= view.num_devices or self._is_refused(instance, devices, degree):
            return []
        members = room.members(devices)
        if not all(room.takes(member) and not self._is_ahead(member, key) for member in members):
            self.again.add(instance.id)
            return []
        for member in members:
            room.close(member)
        reason = f"{request.request_id} may grow to {request.max_total_tokens} tokens and its instance holds fewer"
        return [ScaleUp(devices, degree, reason)]

    def _is_refused(self, instance: InstanceView, devices: tuple[int, ...], degree: int) -> bool:
        """The transformation that an instance's next request needs is refused."""
        if (devices, degree) not in self._view.refused:
            return False
        self.refused.add(instance.id)
        return True

    def _is_ahead(self, instance: InstanceView, key: Key) -> bool:
        """The instance, which was not looked at, is kept for a request ahead of that one."""
        kept_from = self._wait.get(instance.id)
        return kept_from is not None and kept_from < key
