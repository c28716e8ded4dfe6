"""AMOEBA's policy: merge for what fits nowhere, send the next long requests there too, split when they are done."""

import dataclasses
from collections.abc import Iterable

from serving.scheduler.actions import Action, Reject
from serving.scheduler.admission import Admission
from serving.scheduler.amoeba_config import AmoebaConfig
from serving.scheduler.amoeba_round import Round
from serving.scheduler.cache_rule import CacheRule
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.reserve import Reserve
from serving.scheduler.room import KeptRoom
from serving.scheduler.split_rule import SplitRule
from serving.scheduler.view import ClusterView, InstanceView


class AmoebaPolicy:
    """See docs/scheduling.md. Besides what `SplitRule` remembers it knows how large long requests were recently;
    everything else is decided from the snapshot alone."""

    name = "amoeba"

    def __init__(
        self, config: AmoebaConfig | None = None, admission: Admission | None = None, order: QueueOrder | None = None
    ):
        self.config = config or AmoebaConfig()
        self.admission = admission or Admission(order or QueueOrder())
        self._splits, self._index = SplitRule(self.config.splits), self.admission.index()
        self._cache = CacheRule(self.config.merge_for_cache_s, self.config.linger_s)
        self._room = KeptRoom(self.config.reserved_growth)
        self._largest = (0.0, 0)
        """The largest recent long request: when it was last seen, and its tokens."""
        self._pressed = False
        """A short request found no room when decisions were last made."""

    def decide(self, view: ClusterView) -> list[Action]:
        """See `Policy.decide`."""
        if view.merge_to != self.config.merge_to:
            view = dataclasses.replace(view, merge_to=self.config.merge_to)
        index, longest = self._index, view.longest
        index.update(view.queue)
        room = self._room.of(view) if view.queue or self._pressed else None
        self._cache.update(view, self._pressed and room is not None and room.most_have_slots)
        if not view.queue and self._rests(view):
            return []
        actions: list[Action] = [
            *self.admission.turn_away(view, index, longest.capacity_tokens, f"a TP{longest.degree} instance")
        ]
        gone = {action.request_id for action in actions if isinstance(action, Reject)}
        room = room or self._room.of(view)
        leaving = self._leaving(view, room.merged.values())
        splits = self._splits.split(view, room, leaving, self._pressed)
        actions += splits
        reserve = Reserve(view, room, self._largest_long(view, room.merged.values()))
        round_ = Round(view, room, reserve, self.config, self.admission.order, self._pressed)
        round_.busy.update(action.devices[0] for action in splits)
        for request in index.ordered(view.now_s):
            if request.request_id in gone:
                continue
            placed = round_.place(request)
            actions += placed
            if round_.num_unplaced >= self.config.lookahead:
                break
        self._pressed = round_.pressed
        if (merge := self._cache.merge(view, room, round_.busy)) is not None:
            actions.append(merge)
        return actions

    def _leaving(self, view: ClusterView, merged: Iterable[InstanceView]) -> list[tuple[InstanceView, int]]:
        """Instances that take no new requests, and the degree that each of them splits to."""
        leaving = self._splits.leaving(view, merged, view.with_hidden(self._index.largest), self._pressed)
        return [pair for pair in leaving if not self._cache.keeps(view, pair[0])]

    def _rests(self, view: ClusterView) -> bool:
        """Whether there is nothing to do where nothing waits: no instance is to split."""
        merged = [i for i in view.instances if i.degree > view.base_degree]
        if self._leaving(view, merged):
            return False
        self._largest_long(view, merged)
        self._pressed = False
        return True

    def _largest_long(self, view: ClusterView, merged: Iterable[InstanceView]) -> int:
        """Tokens of the largest recent long request; 0 if there was none."""
        running = [i.largest for i in merged if view.has_long(i)]
        waiting = view.with_hidden(self._index.largest)(view.longest.capacity_tokens)
        size = max([waiting if view.is_long(waiting) else 0, *running])
        seen_s, largest = self._largest
        if size >= largest or view.now_s - seen_s > self.config.reserve_memory_s:
            self._largest = (view.now_s, size)
        return self._largest[1]
