"""Baseline policy: each request goes to the least-loaded instance."""

from collections.abc import Mapping

from serving.scheduler.baselines.binding import BindingPolicy
from serving.scheduler.view import InstanceView


class LeastLoadFirstPolicy(BindingPolicy):
    """Policy `least_load_first`: each request goes to the instance with the lowest load.

    The instance may be too small for the request. The load of an instance includes the requests that wait for it.
    """

    name = "least_load_first"

    def choose(self, instances: list[InstanceView], waiting_tokens: Mapping[int, int]) -> InstanceView:
        """Return the instance for the next request (`BindingPolicy.choose`)."""
        return min(instances, key=lambda i: i.load + 2 * waiting_tokens.get(i.id, 0) / i.capacity_tokens)
