"""What the baselines share: a request is bound to an instance when it is first seen, and that instance's devices
merge for what they were given, as the baselines in the papers on AMOEBA and Gyges do. They split by the rule that all
policies have; the papers say nothing about it."""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Collection

from serving.scheduler.actions import Action, Dispatch, ScaleDown, ScaleUp
from serving.scheduler.admission import Admission
from serving.scheduler.bound_requests import BoundRequests
from serving.scheduler.instance_facts import fits_split
from serving.scheduler.queue_order import Key, QueueOrder
from serving.scheduler.room import KeptRoom, Room
from serving.scheduler.split_rule import SplitConfig, SplitRule
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest

Waits = dict[int, tuple[InstanceView, WaitingRequest]]
"""Instances by id, and the first request of their queue."""

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
        self._waits: Waits = {}
        """Instances that had no room for the first request of their queue when decisions were last made."""
        self._pressed = False
        """A short request found no room when decisions were last made."""

    @abstractmethod
    def choose(self, choices: list[InstanceView], request: WaitingRequest) -> InstanceView:
        """The instance that a request is to wait for."""

    def decide(self, view: ClusterView) -> list[Action]:
        """Bind new requests, then split, dispatch and merge: see `Policy.decide`."""
        index, bound, room, longest = self._index, self.bound, self._room.of(view), view.longest
        bound.update(index.update(view.queue))
        rejects = self._admission.turn_away(view, index, longest.capacity_tokens, f"a TP{longest.degree} instance")
        gone = {reject.request_id for reject in rejects}
        largest = view.with_hidden(index.largest)
        leaving = self._splits.leaving(view, room.merged.values(), largest, self._pressed)
        left = {instance.id for instance, _ in leaving}
        home = room.home
        if left or len(home) < view.num_devices:
            bound.leave({d for d in range(view.num_devices) if d not in home or home[d].id in left})
        if bound.unbound:
            steady = [i for i in view.instances if i.transition_to is None]
            choices = [i for i in steady if not i.draining and i.id not in left]
            bound.bind(choices, self.choose, view.now_s, gone)
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
        turns = _Turns(view, room, self.bound, self._admission.order)
        actions = turns.serve(self._waits, gone)
        self._waits = turns.waits
        return actions


class _Turns:
    """One decision: instances take turns, each time the one whose next request is ahead of those of all others."""

    def __init__(self, view: ClusterView, room: Room, bound: BoundRequests, order: QueueOrder):
        self._view, self._room, self._bound, self._order = view, room, bound, order
        self.waits: Waits = {}
        """Instances that have no room for the first request of their queue."""
        self._waiting: dict[int, Key] = {}
        """The place in the queue of those of these requests that are not looked at again."""

    def serve(self, before: Waits, gone: Collection[str]) -> list[Action]:
        """Decide about the first requests of all instances, and those behind them where these were placed.

        Args:
            before: `waits` of the decision before.
            gone: requests that were turned away.
        """
        room, bound, now_s, actions = self._room, self._bound, self._view.now_s, []
        turns = []
        for number, (key, instance) in bound.first(room.home, now_s).items():
            known, name = before.get(number), key[-1]
            if known is not None and known[0] is instance and known[1] is bound.get(name) and name not in gone:
                self.waits[number], self._waiting[number] = known, key
                continue
            requests = (r for r in bound.ordered(instance, now_s) if r.request_id not in gone)
            if (first := next(requests, None)) is not None:
                turns.append((self._order.key(first, now_s), number, first, requests, 0))
        heapq.heapify(turns)
        while turns:
            key, number, request, requests, passed = heapq.heappop(turns)
            instance = room.home[number]
            done = self._place(instance, request, key)
            actions += done
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
            if room.is_untouched(instance):
                self.waits[instance.id] = instance, request
            room.close(instance)
            return []
        return self._grow(instance, request, key)

    def _grow(self, instance: InstanceView, request: WaitingRequest, key: Key) -> list[Action]:
        view, room = self._view, self._room
        degree = view.degree_for(request.max_total_tokens)
        assert degree is not None, "requests that fit at no degree were turned away"
        if instance.degree >= degree:  # it was merged without releasing weights: split, it can merge and release them
            room.close(instance)
            if not fits_split(view, instance, view.base_degree) or (instance.devices, view.base_degree) in view.refused:
                return []
            reason = f"it keeps weights and holds fewer than the {request.max_total_tokens} tokens of its next request"
            return [ScaleDown(instance.devices, view.base_degree, reason)]
        first = instance.devices[0] - instance.devices[0] % degree
        devices = tuple(range(first, first + degree))
        if devices[-1] >= view.num_devices or (devices, degree) in view.refused:
            return []
        members = room.members(devices)
        if not all(room.takes(member) and self._waiting.get(member.id, key) >= key for member in members):
            return []
        for member in members:
            room.close(member)
        reason = f"{request.request_id} may grow to {request.max_total_tokens} tokens and its instance holds fewer"
        return [ScaleUp(devices, degree, reason)]
