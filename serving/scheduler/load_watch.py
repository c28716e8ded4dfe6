"""Whether the cluster is lightly loaded, with hysteresis (Flying Serving 2.3, use case 1)."""

import math

from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.view import ClusterView


class LoadWatch:
    """Follows the number of requests a device. Its mean over `load_window_s` must cross from one limit to the other for
    a change. Groups split at once, and bind when `dwell_s` has passed since the last change. They stay where the
    highest degree is known to generate as many tokens a second as the base degree does under load.

    Attributes:
        bound: groups are to serve at the highest degree.
        busy: there are as many requests as groups split for, or a short one finds no room.
        mean: requests a device, averaged.
    """

    def __init__(self, config: FlyingConfig):
        self._config = config
        self.bound = self.busy = False
        self.mean = 0.0
        self._present = 0.0
        self._at_s: float | None = None
        self._changed_s = 0.0
        self._calm_steps_s: dict[int, float] = {}
        """Seconds of a decode step under a light load, by degree: those of a burst have more requests."""

    def update(self, view: ClusterView, num_requests: int, late: bool) -> None:
        """Take in a snapshot, with how many requests run, pause and wait; `late` tells that a short one has waited for
        `burst_wait_s` without room."""
        config, now_s = self._config, view.now_s
        if self._at_s is None:
            self._at_s = self._changed_s = now_s
        self.mean += (self._present - self.mean) * (1 - math.exp(-(now_s - self._at_s) / config.load_window_s))
        self._at_s, self._present = now_s, num_requests / view.num_devices
        calm, burst = self._limits(view)
        self.busy = late or self.mean >= burst
        dwelt = now_s - self._changed_s >= config.dwell_s
        if self.bound:
            degrees = max(view.limits), view.base_degree
            splits = self.busy and not view.timing.generates_more(*degrees, num_requests)
            change = splits or (dwelt and not self._gains(view))
        else:
            change = dwelt and not late and self.mean <= calm and self._gains(view)
        if change:
            self.bound, self._changed_s = not self.bound, now_s
        elif self.mean <= calm and dwelt:
            steps = {i.degree: i.step_s for i in view.instances if i.step_s is not None and i.running}
            self._calm_steps_s |= steps

    def _limits(self, view: ClusterView) -> tuple[float, float]:
        config, base = self._config, view.limits[view.base_degree]
        scale = min(base.max_requests / base.degree / 2 / config.burst_requests, 1.0)
        return config.calm_requests * scale, config.burst_requests * scale

    def _gains(self, view: ClusterView) -> bool:
        """The highest degree is not known to be as slow as the base degree, by steps that were measured."""
        low = self._calm_steps_s.get(view.base_degree)
        high = self._calm_steps_s.get(max(view.limits))
        return low is None or high is None or high < low
