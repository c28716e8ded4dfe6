"""Results of a simulation. Reports use the field names of `amoeba bench`.

The objectives are the latency limits in `slo.Slo`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.bench.statistics import statistics
from serving.scheduler import SchedulerCounters
from serving.simulator.event_loop import Cluster
from serving.simulator.host_config import HostConfig
from serving.simulator.requests import RequestTable
from serving.simulator.slo import Slo, own_limit
from serving.simulator.tally import Ending, Limit, Tally

PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(frozen=True)
class PolicyResult:
    """Result of the simulation of one policy.

    Arrays have one element for each request. A time is NaN if its event, such as the first token, did not happen.
    """

    policy: str
    duration_s: float
    ttft_s: np.ndarray
    tpot_s: np.ndarray
    e2el_s: np.ndarray
    """End-to-end latency: seconds from the arrival to the end."""
    queue_s: np.ndarray
    """Seconds in the queue, including waits after preemptions."""
    prefill_s: np.ndarray
    """Seconds from the first dispatch to the first token."""
    kept: np.ndarray
    """Whether each request completed and met the objectives."""
    judged: np.ndarray
    """Whether each request counts in `kept_share`. If all requests have ended, or there is no objective, all count. In
    any other case, a request counts if the latest end within its objectives has passed. A request without a latest
    end, for example with a TTFT limit only, counts if it has ended or if its first token is late. Without these rules,
    only the quick requests would count near the end of the run."""
    ending: np.ndarray
    """`Ending` of each request."""
    requests: RequestTable
    tally: Tally
    counters: dict[str, int]
    """Counters of the schedulers by name, summed over all schedulers."""
    num_devices: int
    preempted: int
    hosts: tuple[HostConfig, ...]
    """Configuration of each host."""
    has_objectives: bool
    """Whether a request has an objective. If not, `kept` tells whether each request completed."""
    price_per_hour: float | None
    """Price of a device for an hour in USD. None: unknown."""
    overloaded: bool
    """Whether the run stopped because too many requests waited."""

    @property
    def completed(self) -> np.ndarray:
        """Bool for each request: whether the request completed."""
        return self.ending == Ending.COMPLETED

    @property
    def output_throughput(self) -> float:
        """Tokens per second that all completed requests generated together."""
        return float(self.requests.output_len[self.completed].sum()) / self.duration_s if self.duration_s else 0.0

    @property
    def kept_share(self) -> float:
        """Share of the requests in `judged` that completed within the latency limits, or 1 if `judged` is empty."""
        return float(self.kept[self.judged].mean()) if self.judged.any() else 1.0

    @property
    def refused(self) -> np.ndarray:
        """Bool for each request: whether the request was refused because no instance can hold it."""
        return self.ending == Ending.NEVER_FITS

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Price of the devices in USD for each million output tokens.

        None if the price of a device is unknown, or if there are no tokens.
        """
        if self.price_per_hour is None or not self.output_throughput:
            return None
        return self.num_devices * self.price_per_hour / 3600 / self.output_throughput * 1e6

    def limits(self) -> dict[str, Any]:
        """Return the resources of the policy, and the time that requests waited for them, as a dict for JSON.

        The keys are `degrees`, `instances_at_start` (number by degree), `cache_tokens` (capacity of the KV cache),
        `slots` (maximum number of running requests) and `waited_s` (seconds by the resource that waiting requests
        lacked).
        """
        cache = slots = 0
        start: dict[int, int] = {}
        for host in self.hosts:
            limits = {limit.degree: limit for limit in host.limits}
            for degree in host.degrees_at_start:
                start[degree] = start.get(degree, 0) + 1
                cache, slots = cache + limits[degree].capacity_tokens, slots + limits[degree].max_requests
        return {
            "degrees": sorted({limit.degree for host in self.hosts for limit in host.limits}),
            "instances_at_start": {str(degree): start[degree] for degree in sorted(start)},
            "cache_tokens": cache,
            "slots": slots,
            "waited_s": {limit.value: self.tally.limited_s.get(limit, 0.0) for limit in Limit},
        }

    def device_seconds(self) -> dict[int, float]:
        """Return the seconds that devices spent at each tensor-parallel degree, summed over the devices.

        Unused degrees are missing.
        """
        seconds: dict[int, float] = {}
        for at_s, degree, change in self.tally.degrees:
            seconds[degree] = seconds.get(degree, 0.0) + change * max(self.duration_s - at_s, 0.0)
        return {degree: seconds[degree] for degree in sorted(seconds) if seconds[degree] > 1e-9}

    def report(self) -> dict[str, Any]:
        """Return the result as a dict that JSON can represent.

        The dict has the fields of `amoeba bench`, and counts of actions. The keys `limits` and `explain` have the
        results of the methods `limits` and `parts`.
        """
        return self._figures(np.ones(len(self.requests), bool)) | {
            "policy": self.policy,
            "duration": self.duration_s,
            "classes": self._classes(),
            "merges": self.counters["scale_ups"],
            "splits": self.counters["scale_downs"],
            "preemptions": self.preempted,
            "transformations_failed": self.counters["transformations_failed"],
            "prefix_tokens": self.tally.prefix_tokens,
            "steps": self.tally.steps,
            "device_seconds": {str(degree): seconds for degree, seconds in self.device_seconds().items()},
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "too_long": int(self.requests.too_long.sum()),
            "limits": self.limits(),
            "explain": self.parts(),
        }

    def _classes(self) -> dict[str, dict[str, Any]]:
        names = self.requests.kind_names
        if len(names) < 2:
            return {}
        return {name: self._figures(self.requests.kinds == kind) for kind, name in enumerate(names)}

    def _figures(self, rows: np.ndarray) -> dict[str, Any]:
        done = self.completed & rows
        inputs, outputs = self.requests.input_len[done].sum(), self.requests.output_len[done].sum()
        duration_s = self.duration_s or 1.0
        figures: dict[str, Any] = {
            "requests": int(rows.sum()),
            "completed": int(done.sum()),
            "failed": int((rows & (self.ending > Ending.COMPLETED)).sum()),
            "unfinished": int((rows & (self.ending == Ending.OPEN)).sum()),
            "total_input_tokens": int(inputs),
            "total_output_tokens": int(outputs),
            "request_throughput": float(done.sum() / duration_s),
            "request_goodput": float((self.kept & rows).sum() / duration_s),
            "slo_share": self._share(rows) if self.has_objectives else None,
            "output_throughput": float(outputs / duration_s),
            "total_token_throughput": float((inputs + outputs) / duration_s),
        }
        for ending in (Ending.NEVER_FITS, Ending.DEADLINE, Ending.QUEUE_FULL):
            figures[f"rejected_{ending.name.lower()}"] = int((rows & (self.ending == ending)).sum())
        for name, values in (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("e2el", self.e2el_s)):
            chosen = values[done]
            figures |= statistics(name, chosen[~np.isnan(chosen)], PERCENTILES)
        figures |= statistics("queue", self.queue_s[done], PERCENTILES)
        if rows.all():
            gaps = self.tally.gap_percentiles_s(PERCENTILES)
            figures["mean_itl_ms"] = None if (mean := self.tally.mean_gap_s) is None else mean * 1e3
            for percentile, gap in zip(PERCENTILES, gaps, strict=True):
                figures[f"p{percentile:g}_itl_ms"] = None if gap is None else gap * 1e3
        return figures

    def _share(self, rows: np.ndarray) -> float | None:
        return float(self.kept[rows & self.judged].mean()) if (rows & self.judged).any() else None

    def parts(self) -> dict[str, float]:
        """Return the parts of the mean latency by cause, and totals of all merges and splits.

        The values of the keys `ttft_*` add up to the mean TTFT of completed requests, in seconds. The values of the
        keys `token_*` add up to the mean seconds for a generated token. All other values are totals.
        """
        done = self.completed & ~np.isnan(self.ttft_s)
        tally, tokens = self.tally, max(self.tally.generated_tokens, 1)
        return {
            "ttft_queue_s": float(np.nanmean(self.ttft_s[done] - self.prefill_s[done])) if done.any() else 0.0,
            "ttft_prefill_s": float(np.nanmean(self.prefill_s[done])) if done.any() else 0.0,
            "token_decode_s": tally.decode_s / tokens,
            "token_prompts_s": tally.interference_s / tokens,
            "token_transformations_s": tally.switch_s / tokens,
            "transformations": float(len(tally.changes)),
            "transformation_s": float(sum(change[3] for change in tally.changes)),
            "moved_kv_gb": tally.kv_bytes / 1e9,
            "moved_weights_gb": tally.weight_bytes / 1e9,
        }


def collect(
    policy: str, cluster: Cluster, slo: Slo, num_devices: int, price_per_hour: float | None = None
) -> PolicyResult:
    """Return the result of a policy from a cluster whose run has ended."""
    records, requests = cluster.records, cluster.requests
    dispatch, first, end = (np.array(c) for c in (records.dispatch_s, records.first_token_s, records.end_s))
    ending = np.array(records.ending)
    ttft_s = first - requests.arrival_s
    e2el_s = end - requests.arrival_s
    more = np.maximum(requests.output_len - 1, 1)
    done = ending == Ending.COMPLETED
    tpot_s = np.where(done & (requests.output_len > 1), (end - first) / more, np.nan)
    kept = done & slo.kept(ttft_s, tpot_s, e2el_s, requests.ttft_slo_s, requests.tpot_slo_s)
    last_s = float(np.nanmax(end)) if done.any() else cluster.now_s
    stopped = cluster.now_s < requests.span_s  # The run stopped before all requests arrived.
    own = [column for column in (requests.ttft_slo_s, requests.tpot_slo_s) if column is not None]
    counters = [host.scheduler.counters.by_name() for host in cluster.hosts] or [SchedulerCounters().by_name()]
    return PolicyResult(
        policy=policy,
        duration_s=cluster.now_s if stopped else max(last_s, requests.span_s),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2el_s=e2el_s,
        queue_s=np.array(records.waited_s),
        prefill_s=first - dispatch,
        kept=kept,
        judged=_judged(cluster, slo, ttft_s, ending),
        ending=ending,
        requests=requests,
        tally=cluster.tally,
        counters={name: sum(c[name] for c in counters) for name in counters[0]},
        num_devices=num_devices,
        preempted=sum(host.executor.num_preempted for host in cluster.hosts),
        hosts=tuple(host.executor.config for host in cluster.hosts),
        has_objectives=bool(slo.limits_s) or not all(np.isnan(column).all() for column in own),
        price_per_hour=price_per_hour,
        overloaded=cluster.overloaded,
    )


def _judged(cluster: Cluster, slo: Slo, ttft_s: np.ndarray, ending: np.ndarray) -> np.ndarray:
    """Return a bool for each request: whether it counts in `PolicyResult.kept_share` (see `PolicyResult.judged`)."""
    requests, is_open = cluster.requests, ending == Ending.OPEN
    if not is_open.any() or not slo.limits_s:
        return np.ones(len(requests), bool)
    latest_s = slo.latest_s(requests.output_len, requests.ttft_slo_s, requests.tpot_slo_s)
    limit_s = own_limit(requests.ttft_slo_s, slo.ttft_s)
    first_is_late = np.isnan(ttft_s) & (requests.arrival_s + limit_s <= cluster.now_s)
    return np.where(np.isfinite(latest_s), requests.arrival_s + latest_s <= cluster.now_s, ~is_open | first_is_late)
