"""AMOEBA's policy: merge for what fits nowhere, send the next long requests there too, split when they are done."""

import dataclasses

from serving.scheduler.actions import Action
from serving.scheduler.admission import Admission
from serving.scheduler.amoeba_config import AmoebaConfig
from serving.scheduler.amoeba_round import Round
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.reserve import Reserve
from serving.scheduler.split_rule import SplitRule
from serving.scheduler.view import ClusterView, WaitingRequest


class AmoebaPolicy:
    """See docs/scheduling.md. Besides what `SplitRule` remembers it knows how large long requests were recently;
    everything else is decided from the snapshot alone."""

    name = "amoeba"

    def __init__(
        self, config: AmoebaConfig | None = None, admission: Admission | None = None, order: QueueOrder | None = None
    ):
        self.config = config or AmoebaConfig()
        self.admission = admission or Admission(order or QueueOrder())
        self._splits = SplitRule(self.config.splits)
        self._largest = (0.0, 0)
        """The largest recent long request: when it was last seen, and its tokens."""
        self._pressed = False
        """A short request found no room when decisions were last made."""

    def decide(self, view: ClusterView) -> list[Action]:
        """See `Policy.decide`."""
        view = dataclasses.replace(view, merge_to=self.config.merge_to)
        longest = view.longest
        rejects, queue = self.admission.screen(view, longest.capacity_tokens, f"a TP{longest.degree} instance")
        round_ = Round(view, self.config, self.admission.order, self._pressed)
        sizes = [r.max_total_tokens for r in queue if view.is_long(r.max_total_tokens)]
        leaving = self._splits.leaving(view, sizes, self._pressed)
        splits = self._splits.split(view, round_.room, leaving)
        round_.busy.update(action.devices[0] for action in splits)
        actions: list[Action] = [*rejects, *splits]
        round_.reserve = Reserve.for_size(view, self._largest_long(view, queue))
        for request in queue:
            if view.is_long(request.max_total_tokens):
                actions += round_.place_long(request)
            else:
                actions += round_.place_short(request)
        self._pressed = round_.pressed
        return actions

    def _largest_long(self, view: ClusterView, queue: list[WaitingRequest]) -> int:
        """Tokens of the largest recent long request; 0 if there was none."""
        requests = [*queue, *(request for instance in view.instances for request in instance.running)]
        size = max((r.max_total_tokens for r in requests if view.is_long(r.max_total_tokens)), default=0)
        seen_s, largest = self._largest
        if size >= largest or view.now_s - seen_s > self.config.reserve_memory_s:
            self._largest = (view.now_s, size)
        return self._largest[1]
