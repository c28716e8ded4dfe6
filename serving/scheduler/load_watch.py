"""Detection of light load, with hysteresis (Flying Serving 2.3, use case 1)."""

import math

from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.view import ClusterView


class LoadWatch:
    """Number of requests for each device, averaged over `load_window_s`.

    Groups merge when the average falls to `calm_requests`, if `dwell_s` has passed since the last change, no short
    request has waited too long, and steps of the highest degree are not slower. They split at once when the average
    rises to `burst_requests` or a short request has waited too long. They do not split if measurements show that the
    highest degree generates at least as many tokens per second as the base degree under load. After `dwell_s`, they
    also split if steps of the highest degree turn out to be slower.

    Attributes:
        bound: whether all groups should be merged to the highest degree.
        busy: whether the average reaches `burst_requests`, or a short request has waited too long.
        mean: requests for each device, averaged.
    """

    def __init__(self, config: FlyingConfig):
        self._config = config
        self.bound = self.busy = False
        self.mean = 0.0
        self._present = 0.0
        self._at_s: float | None = None
        self._changed_s = 0.0
        self._calm_steps_s: dict[int, float] = {}
        """Seconds of a decode step under light load, by degree. Steps under heavy load have larger batches."""

    def update(self, view: ClusterView, num_requests: int, late: bool) -> None:
        """Include a snapshot in the average, and update `bound` and `busy`.

        Args:
            num_requests: running, paused and waiting requests.
            late: whether a short request without room has waited until `FlyingRound.split_at_s`.
        """
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
            change = splits or (dwelt and not self._is_faster_merged(view))
        else:
            change = dwelt and not late and self.mean <= calm and self._is_faster_merged(view)
        if change:
            self.bound, self._changed_s = not self.bound, now_s
        elif self.mean <= calm and dwelt:
            steps = {i.degree: i.step_s for i in view.instances if i.step_s is not None and i.running}
            self._calm_steps_s |= steps

    def _limits(self, view: ClusterView) -> tuple[float, float]:
        """Return `calm_requests` and `burst_requests`, scaled down if devices have few slots."""
        config, base = self._config, view.limits[view.base_degree]
        scale = min(base.max_requests / base.degree / 2 / config.burst_requests, 1.0)
        return config.calm_requests * scale, config.burst_requests * scale

    def _is_faster_merged(self, view: ClusterView) -> bool:
        """Return whether steps of the highest degree are shorter than steps of the base degree under light load. True
        if one of the two was not measured."""
        low = self._calm_steps_s.get(view.base_degree)
        high = self._calm_steps_s.get(max(view.limits))
        return low is None or high is None or high < low
