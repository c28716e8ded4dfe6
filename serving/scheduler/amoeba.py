"""AMOEBA's policy: instances merge for a long request, which does not fit an instance of the base degree.

The merged instance also serves further long requests. When all its long requests have ended, it splits.
"""

import dataclasses

from serving.scheduler.actions import Action
from serving.scheduler.admission import Admission
from serving.scheduler.amoeba_config import AmoebaConfig
from serving.scheduler.amoeba_round import Round
from serving.scheduler.reserve import RecentLargest, Reserve
from serving.scheduler.room import Room
from serving.scheduler.split_rule import SplitRule
from serving.scheduler.view import ClusterView


class AmoebaPolicy:
    """Policy `amoeba` (docs/scheduling.md): merges instances for long requests, and splits them afterwards.

    Between decisions, the policy remembers the size of the largest recent long request. It also remembers when a long
    request last needed each merged instance, and whether a short request found no room in the last decision.
    """

    name = "amoeba"

    def __init__(self, config: AmoebaConfig | None = None, admission: Admission | None = None):
        self.config = config or AmoebaConfig()
        self.admission = admission or Admission()
        self._splits = SplitRule(self.config.splits)
        self._largest = RecentLargest(self.config.reserve_memory_s)
        self._pressed = False
        """Whether a short request found no room in the last decision."""

    def decide(self, view: ClusterView) -> list[Action]:
        """Return the next actions, in the order of their execution (`Policy.decide`)."""
        if view.merge_to != self.config.merge_to:
            view = dataclasses.replace(view, merge_to=self.config.merge_to)
        longest = view.longest
        rejects, queue = self.admission.screen(view, longest.capacity_tokens, f"a TP{longest.degree} instance")
        room = Room(view, self.config.reserved_growth)
        pressed, self._pressed = self._pressed, False
        leaving = self._splits.leaving(view, room, pressed)
        splits = self._splits.split(view, room, leaving, pressed)
        actions: list[Action] = [*rejects, *splits]
        largest = self._largest.update(view)
        if not queue:
            return actions
        reserve = Reserve(view, room, largest)
        round_ = Round(view, room, reserve, self.config, self.admission.order, pressed)
        round_.busy.update(action.devices[0] for action in splits)
        for request in queue:
            actions += round_.place(request)
            if round_.num_unplaced >= self.config.lookahead:
                break
        self._pressed = round_.pressed
        return actions
