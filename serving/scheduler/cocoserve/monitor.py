"""Monitor of the policy `cocoserve`: averages of vacancy, SLO violations and load over recent snapshots."""

import math
from collections.abc import Mapping

from serving.scheduler.amoeba_config import AmoebaConfig
from serving.scheduler.cocoserve.config import CocoServeConfig
from serving.scheduler.view import ClusterView, InstanceView


class Monitor:
    """Averages over about the last `CocoServeConfig.window_s` seconds, and the decision whether SLOs are violated.

    A waiting request violates its SLO if its first token is late. A running request violates its SLO if its first token
    is late, or if the recent steps of its instance exceed the TPOT SLO.

    Args:
        config: settings of the policy.
        slos: settings with the latency limits `ttft_slo_s` and `tpot_slo_s`.

    Attributes:
        vacancy: average vacancy rate of each device (`DeviceView.vacancy`), by device.
        sequences: average number of running requests by instance id.
        load: average number of running and waiting requests.
        violations: average share of requests that violate their SLOs.
        violated: whether too many requests violate their SLOs. It becomes True when `violations` reaches
            `violation_threshold`, and False when `violations` has fallen below half of this threshold.
    """

    def __init__(self, config: CocoServeConfig, slos: AmoebaConfig):
        self._config, self._slos = config, slos
        self.vacancy: dict[int, float] = {}
        self.sequences: dict[int, float] = {}
        self.load = self.violations = 0.0
        self.violated = False
        self._at_s: float | None = None
        self._present: tuple[Mapping[int, float], Mapping[int, float], float, float] = ({}, {}, 0.0, 0.0)
        """Vacancy, sequences, load and violations in the latest snapshot. They count until the next snapshot."""

    def update(self, view: ClusterView) -> None:
        """Add a snapshot to the averages. New devices and instances start with an average of 0."""
        passed_s = 0.0 if self._at_s is None else view.now_s - self._at_s
        share = 1 - math.exp(-passed_s / self._config.window_s)
        vacancy, sequences, load, violations = self._present
        self.vacancy = {d.id: _nearer(self.vacancy, vacancy, d.id, share) for d in view.devices}
        self.sequences = {i.id: _nearer(self.sequences, sequences, i.id, share) for i in view.instances}
        self.load += (load - self.load) * share
        self.violations += (violations - self.violations) * share
        self._at_s = view.now_s
        num_requests = len(view.queue) + sum(len(i.running) for i in view.instances)
        late = self._late_waiting(view) + sum(self.late_running(view, i) for i in view.instances)
        self._present = (
            {d.id: d.vacancy for d in view.devices},
            {i.id: float(len(i.running)) for i in view.instances},
            float(num_requests),
            late / max(num_requests, 1),
        )
        threshold = self._config.violation_threshold
        self.violated = self.violations >= (threshold / 2 if self.violated else threshold)

    def _late_waiting(self, view: ClusterView) -> int:
        default_s = self._slos.ttft_slo_s
        limits = ((r, default_s if r.ttft_slo_s is None else r.ttft_slo_s) for r in view.queue if not r.started)
        return sum(limit_s is not None and view.now_s - r.arrival_s > limit_s for r, limit_s in limits)

    def late_running(self, view: ClusterView, instance: InstanceView) -> int:
        """Return the number of running requests of an instance that violate their SLOs."""
        if self.is_slow(instance):
            return len(instance.running)
        limit_s = self._slos.ttft_slo_s
        return sum(
            bool(r.uncomputed_tokens) and limit_s is not None and view.now_s - r.arrival_s > limit_s
            for r in instance.running
        )

    def is_slow(self, instance: InstanceView) -> bool:
        """Return whether an instance runs requests, and its recent steps exceed the TPOT SLO."""
        limit_s, step_s = self._slos.tpot_slo_s, instance.step_s
        return bool(instance.running) and limit_s is not None and step_s is not None and step_s > limit_s


def _nearer(means: Mapping[int, float], values: Mapping[int, float], key: int, share: float) -> float:
    """Return the average `means[key]`, moved toward the value `values[key]` by the fraction `share` of the difference.

    If `means` lacks the key, the average starts at 0. If `values` lacks the key, the average does not change.
    """
    mean = means.get(key, 0.0)
    return mean + (values.get(key, mean) - mean) * share
