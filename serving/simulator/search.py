"""Search for the highest request rate, or the fewest devices, at which a policy meets the latency limits (`slo.Slo`).

A trial is one simulation. It passes if at least `slo.share` of the requests meet the limits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from amoeba_jax.errors import ConfigError
from serving.bench.burst import read_rates
from serving.bench.workload import WorkloadConfig
from serving.simulator.errors import DoesNotFitError, SimulationError
from serving.simulator.result import PolicyResult
from serving.simulator.settings import SimulationConfig
from serving.simulator.simulate import request_table, simulate

_CLOSE_ENOUGH = 1.05
"""Precision of the search: it ends if the lowest failing rate is at most this many times the highest passing rate."""
_LARGEST_FACTOR = 2.0**14
_WAITING_PER_DEVICE = 50
"""Limit of waiting requests for each device. A trial above the limit stops and fails."""


@dataclass(frozen=True)
class Trial:
    """One simulation of a search, with its result."""

    value: float
    """Requests per second, or number of devices."""
    kept_share: float
    """Share of requests that met the objectives."""
    passed: bool
    lacks: str = ""
    """Reason why the trial did not pass."""


@dataclass(frozen=True)
class Answer:
    """Result of a search. `value` is the best value that passed, or None if no value passed."""

    policy: str
    value: float | None
    trials: tuple[Trial, ...]
    at_limit: bool = False
    """Whether the search ended at the highest or lowest value that it may try. The true answer may lie beyond it."""

    @property
    def note(self) -> str:
        """Remark for the user: whether the search ended at its limit, and why a trial failed. It may be empty."""
        failed = [trial for trial in self.trials if not trial.passed]
        if self.at_limit:
            return "the search ended at its limit" + (f": {failed[-1].lacks}" if failed else "")
        if not failed:
            return ""
        nearest = min(failed, key=lambda trial: abs(trial.value - (self.value or 0.0)))
        return f"at {nearest.value:.4g}: {nearest.lacks}"


_RATES = ("low_rate", "high_rate")
OnTrial = Callable[[Trial], None]


def scale_workload(workload: WorkloadConfig, factor: float) -> WorkloadConfig:
    """Return the workload with `factor` times the request rate. The duration stays the same.

    Raises `SimulationError` if the request rate is infinite, and `ConfigError` if the new workload is invalid, for
    example because of too many requests.
    """
    if workload.dataset_name == "mix":
        return replace(
            workload,
            short_per_minute=workload.short_per_minute * factor,
            long_per_minute=workload.long_per_minute * factor,
        )
    if workload.dataset_name == "burst":
        rates = {name: read_rates(name, getattr(workload, name)) for name in _RATES}
        return replace(workload, **{name: ":".join(str(r * factor) for r in both) for name, both in rates.items()})
    if workload.request_rate is not None and math.isfinite(workload.request_rate):
        return replace(workload, request_rate=workload.request_rate * factor)
    if workload.dataset_name == "trace":
        count = None if workload.num_prompts is None else max(1, int(workload.num_prompts * factor))
        return replace(workload, trace_rate_scale=workload.trace_rate_scale * factor, num_prompts=count)
    raise SimulationError(f"request_rate={workload.request_rate} cannot be scaled: set a finite rate")


def _check(config: SimulationConfig) -> None:
    if not config.slo.limits_s and not config.slo.classes:
        raise SimulationError("the search needs an objective: set --slo, such as ttft:10 tpot:0.1")


def find_max_rate(config: SimulationConfig, policy: str, on_trial: OnTrial = lambda trial: None) -> Answer:
    """Find the highest request rate at which a policy meets the latency limits of `config.slo`.

    The result is accurate to 5%. The rate is doubled or halved until one trial passes and one trial fails. Then the
    interval between these rates is bisected. `on_trial` is called after each trial.

    Raises `SimulationError` if there is no latency limit, or if all requests arrive at once.
    """
    _check(config)
    if not request_table(config).span_s:
        raise SimulationError("all requests arrive at once: the search needs a trace with times, or a request_rate")
    trials: list[Trial] = []

    def passes(factor: float) -> bool:
        trials.append(_try(replace(config, workload=scale_workload(config.workload, factor)), policy))
        on_trial(trials[-1])
        return trials[-1].passed

    low, high = (1.0, 2.0) if passes(1.0) else (0.5, 1.0)
    if low == 1.0:
        try:
            while high <= _LARGEST_FACTOR and passes(high):
                low, high = high, high * 2
        except ConfigError:  # The workload has too many requests.
            high = math.inf
        if high > _LARGEST_FACTOR:
            return Answer(policy, _best(trials), tuple(trials), at_limit=True)
    else:
        try:
            while low >= 1 / 1024 and not passes(low):
                low, high = low / 2, low
        except ConfigError:  # The trace has no request left.
            low = 0.0
        if low < 1 / 1024:
            return Answer(policy, None, tuple(trials), at_limit=True)
    while high / low > _CLOSE_ENOUGH:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if passes(middle) else (low, middle)
    return Answer(policy, _best(trials), tuple(trials))


def _best(trials: list[Trial]) -> float | None:
    return max((trial.value for trial in trials if trial.passed), default=None)


def find_min_devices(config: SimulationConfig, policy: str, on_trial: OnTrial = lambda trial: None) -> Answer:
    """Find the smallest number of devices with which a policy meets the latency limits of `config.slo`.

    With 8 devices for each scheduler, the candidates are 1, 2, 4, 8, 16, 24, 32 and so on, up to `num_devices`. The
    search is a bisection: it assumes that every number above a passing number also passes. `on_trial` is called after
    each trial.

    Raises `SimulationError` if there is no latency limit.
    """
    _check(config)
    sizes = _sizes(config)
    trials: list[Trial] = []

    def passes(size: int) -> bool:
        try:
            smaller = replace(config, num_devices=size, devices_per_scheduler=min(config.host_devices(), size))
            trial = _try(smaller, policy)
        except DoesNotFitError as error:
            trial = Trial(size, 0.0, False, f"the model does not fit: {error}")
        trials.append(replace(trial, value=float(size)))
        on_trial(trials[-1])
        return trials[-1].passed

    if not passes(sizes[-1]):
        return Answer(policy, None, tuple(trials), at_limit=True)
    low, high = -1, len(sizes) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(sizes[middle]) else (middle, high)
    return Answer(policy, float(sizes[high]), tuple(trials))


def _sizes(config: SimulationConfig) -> list[int]:
    per = config.host_devices()
    sizes = [1 << power for power in range(per.bit_length()) if 1 << power < per]
    return sizes + list(range(per, config.num_devices + 1, per))


def _try(config: SimulationConfig, policy: str) -> Trial:
    limit = _WAITING_PER_DEVICE * min(part.host_devices() for part in config.parts())
    result = simulate(config, policy, queue_limit=limit)
    span_s, share = result.requests.span_s, result.kept_share
    rate = len(result.requests) / span_s if span_s else 0.0
    passed = share >= config.slo.share and not result.overloaded
    return Trial(rate, share, passed, "" if passed else _lack(result))


def _lack(result: PolicyResult) -> str:
    """Return a text that says why requests missed the latency limits.

    The reason is the resource for which requests waited longest. If they hardly waited, it is the speed of steps.
    """
    text = "overloaded" if result.overloaded else f"{result.kept_share:.1%} within the objectives"
    if refused := int(result.refused.sum()):
        text += f", {refused} refused"
    waited_s = result.tally.limited_s
    if sum(waited_s.values()) < 0.02 * (result.duration_s or 1.0) * len(result.hosts):
        return f"{text}; steps are too slow"
    return f"{text}; requests waited for {max(waited_s, key=lambda limit: waited_s[limit])}"
