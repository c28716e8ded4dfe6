"""Detection of light and heavy load, with hysteresis (Flying Serving 2.3, use case 1)."""

import math

from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.view import ClusterView


class LoadWatch:
    """Watch that decides from the load and from measured times whether all instances should be merged or split.

    The load is the average number of requests per device. Instances merge when the load is at most `calm_requests`, but
    not sooner than `dwell_s` seconds after the last change. Merged instances split when the load is at least
    `burst_requests`, or when a short request has waited too long.

    Measured times have precedence:

    - If steps are not shorter at the highest tensor-parallel degree than at the base degree, instances do not merge.
      Merged instances split `dwell_s` seconds after the last change.
    - If the highest degree generates at least as many tokens per second as the base degree, instances do not split
      under heavy load.

    Attributes:
        bound: whether all instances should be merged to the highest degree.
        busy: whether the load is heavy: at least `burst_requests`, or a short request has waited too long.
        mean: the load, an average over about `load_window_s` seconds.
    """

    def __init__(self, config: FlyingConfig):
        self._config = config
        self.bound = self.busy = False
        self.mean = 0.0
        self._present = 0.0
        self._at_s: float | None = None
        self._changed_s = 0.0
        self._calm_steps_s: dict[int, float] = {}
        """Seconds of a decode step under light load, by degree.

        Under heavy load, steps have larger batches and take longer.
        """

    def update(self, view: ClusterView, num_requests: int, late: bool) -> None:
        """Add a snapshot to the average, and update `bound` and `busy`.

        Args:
            num_requests: number of running, paused and waiting requests.
            late: whether a short request lacks room and the time `FlyingRound.split_at_s` has come.
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
        """Return `calm_requests` and `burst_requests`. Both are scaled down if devices have few slots for requests."""
        config, base = self._config, view.limits[view.base_degree]
        scale = min(base.max_requests / base.degree / 2 / config.burst_requests, 1.0)
        return config.calm_requests * scale, config.burst_requests * scale

    def _is_faster_merged(self, view: ClusterView) -> bool:
        """Return whether steps under light load are shorter at the highest degree than at the base degree.

        If one of these degrees was not measured, the result is True.
        """
        low = self._calm_steps_s.get(view.base_degree)
        high = self._calm_steps_s.get(max(view.limits))
        return low is None or high is None or high < low
