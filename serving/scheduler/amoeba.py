"""AMOEBA's policy: merge for what fits nowhere, send the next long requests there too, split when they are done."""

import dataclasses

from serving.scheduler.actions import Action, Reject
from serving.scheduler.admission import Admission
from serving.scheduler.amoeba_config import AmoebaConfig
from serving.scheduler.amoeba_round import Round
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.reserve import Reserve
from serving.scheduler.room import KeptRoom, Room
from serving.scheduler.split_rule import SplitRule
from serving.scheduler.view import ClusterView


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
        self._room = KeptRoom(self.config.reserved_growth)
        self._largest = (0.0, 0)
        """The largest recent long request: when it was last seen, and its tokens."""
        self._pressed = False
        """A short request found no room when decisions were last made."""

    def decide(self, view: ClusterView) -> list[Action]:
        """See `Policy.decide`."""
        view, index, longest = dataclasses.replace(view, merge_to=self.config.merge_to), self._index, view.longest
        index.update(view.queue)
        actions: list[Action] = [
            *self.admission.turn_away(view, index, longest.capacity_tokens, f"a TP{longest.degree} instance")
        ]
        gone = {action.request_id for action in actions if isinstance(action, Reject)}
        room = self._room.of(view)
        leaving = self._splits.leaving(view, room.merged.values(), index.largest, self._pressed)
        splits = self._splits.split(view, room, leaving)
        actions += splits
        reserve = Reserve(view, room, self._largest_long(view, room))
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
        return actions

    def _largest_long(self, view: ClusterView, room: Room) -> int:
        """Tokens of the largest recent long request; 0 if there was none."""
        running = [i.largest for i in room.merged.values() if view.has_long(i)]
        waiting = self._index.largest(view.longest.capacity_tokens)
        size = max([waiting if view.is_long(waiting) else 0, *running])
        seen_s, largest = self._largest
        if size >= largest or view.now_s - seen_s > self.config.reserve_memory_s:
            self._largest = (view.now_s, size)
        return self._largest[1]
