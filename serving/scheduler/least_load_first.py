"""Baseline: the least-loaded instance is next."""

from serving.scheduler.naive import BindingPolicy
from serving.scheduler.view import InstanceView, WaitingRequest


class LeastLoadFirstPolicy(BindingPolicy):
    """Gives each request to the instance with the smallest load, whether it could hold the request or not. The instance
    merges with its neighbours for one that it can't hold, and splits by `SplitRule`."""

    name = "least_load_first"

    def choose(self, choices: list[InstanceView], request: WaitingRequest) -> InstanceView:
        """See `BindingPolicy.choose`. What waits for an instance counts as its load."""
        waiting = self.bound.tokens
        loads = []
        for instance in choices:  # for each request that comes: no more than this for each instance
            devices = instance.devices
            tokens = waiting.get(instance.id, 0) if len(devices) == 1 else sum([waiting.get(d, 0) for d in devices])
            loads.append(instance.load + 2 * tokens / instance.capacity_tokens)
        return choices[loads.index(min(loads))]
