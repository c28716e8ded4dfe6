"""Baseline: the least-loaded instance is next."""

from serving.scheduler.naive import BindingPolicy
from serving.scheduler.view import InstanceView, WaitingRequest


class LeastLoadFirstPolicy(BindingPolicy):
    """Gives each request to the instance with the smallest load, whether it could hold the request or not. The instance
    merges with its neighbours for one that it can't hold, and splits by `SplitRule`."""

    name = "least_load_first"

    def choose(self, choices: list[InstanceView], request: WaitingRequest) -> InstanceView:
        """See `BindingPolicy.choose`. What waits for an instance counts as its load."""
        return min(choices, key=lambda i: (i.load + 2 * self.bound.tokens(i) / i.capacity_tokens, i.id))
