"""Baseline: the least-loaded instance is next."""

from serving.scheduler.actions import Action
from serving.scheduler.admission import Admission
from serving.scheduler.naive import BoundRequests
from serving.scheduler.split_rule import SplitConfig
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest


class LeastLoadFirstPolicy:
    """Gives each request to the instance with the smallest load, whether it could hold the request or not. The instance
    merges with its neighbours for one that it can't hold, and splits by `SplitRule`."""

    name = "least_load_first"

    def __init__(
        self, admission: Admission | None = None, reserved_growth: float = 0.0, splits: SplitConfig | None = None
    ):
        self._bound = BoundRequests(admission or Admission(), reserved_growth, splits or SplitConfig())

    def decide(self, view: ClusterView) -> list[Action]:
        """See `Policy.decide`."""
        waiting = self._bound.waiting_tokens(view)

        def choose(choices: list[InstanceView], request: WaitingRequest) -> InstanceView:
            chosen = min(choices, key=lambda i: (i.load + 2 * waiting[i.id] / i.capacity_tokens, i.id))
            waiting[chosen.id] += request.prompt_tokens
            return chosen

        return self._bound.decide(view, choose)
