"""Runs of the policy `flying` on a simulated host with strict checks of its actions."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from serving.scheduler import Action, DegreeLimits, FlyingConfig, FlyingPolicy
from serving.simulator.batching import TokenBudget
from serving.simulator.event_loop import Cluster, LoopConfig
from serving.simulator.host_config import HostConfig
from serving.simulator.pricing import Pricing
from serving.simulator.requests import RequestTable
from serving.simulator.router import make_router
from serving.simulator.step_cost import RateStepCost
from serving.simulator.tally import Ending
from serving.simulator.transformation_cost import FixedTransformation

DEGREES = (DegreeLimits(1, 12_000, 16), DegreeLimits(2, 32_000, 32), DegreeLimits(4, 80_000, 64))
"""With kept weights, merged instances hold 24,000 and 48,000 tokens."""
RATES = RateStepCost(
    prefill={1: 4_000, 2: 7_000, 4: 12_000}, decode={1: 500, 2: 800, 4: 1_400}, decode_each={1: 25, 2: 40, 4: 60}
)


class Asked(NamedTuple):
    """A request with its arrival time, prompt and output tokens, and priority."""

    at_s: float
    prompt: int = 400
    output: int = 100
    priority: int = 0


class Run(NamedTuple):
    """Result of a run. `log` has the accepted actions with their times."""

    cluster: Cluster
    log: list[tuple[float, Action]]

    def of(self, *kinds: type) -> list[tuple[float, Action]]:
        """Return the actions of some kinds with their times."""
        return [entry for entry in self.log if isinstance(entry[1], kinds)]

    @property
    def preemptions(self) -> list[int]:
        """Number of recomputations of each request."""
        return list(self.cluster.records.preemptions)

    @property
    def ttft_s(self) -> np.ndarray:
        """Seconds to the first token of each request."""
        return np.array(self.cluster.records.first_token_s) - self.cluster.requests.arrival_s

    @property
    def tpot_s(self) -> np.ndarray:
        """Mean seconds between tokens of each request."""
        records, table = self.cluster.records, self.cluster.requests
        return (np.array(records.end_s) - np.array(records.first_token_s)) / np.maximum(table.output_len - 1, 1)

    def all_completed(self) -> bool:
        """Return whether all requests completed."""
        return all(ending == Ending.COMPLETED for ending in self.cluster.records.ending)


def table_of(asked: Sequence[Asked]) -> RequestTable:
    """Return requests as columns, in order of arrival."""
    ordered = sorted(asked, key=lambda it: it.at_s)
    columns = [np.array([it[field] for it in ordered]) for field in range(4)]
    arrival_s, prompt, output, priority = columns
    return RequestTable(arrival_s, prompt, output, output, np.zeros(len(ordered), int), priority=priority)


def fly(
    asked: Sequence[Asked],
    config: FlyingConfig | None = None,
    num_devices: int = 4,
    degrees_at_start: tuple[int, ...] | None = None,
    policy: FlyingPolicy | None = None,
    rates: RateStepCost = RATES,
) -> Run:
    """Serve requests with `flying` until they end. A forbidden action raises."""
    host = HostConfig(
        num_devices,
        tuple(limits for limits in DEGREES if limits.degree <= num_devices),
        Pricing(rates, TokenBudget(512)),
        FixedTransformation(0.2, 10),
        degrees_at_start or (1,) * num_devices,
        shows_timing=True,
        strict=True,
    )
    table = table_of(asked)
    cluster = Cluster(
        [(host, lambda: policy or FlyingPolicy(config))], table, make_router("round_robin", [1.0], 0, len(table)),
        keep_log=True,
    )  # fmt: skip
    cluster.run(LoopConfig(drain_s=600.0))
    return Run(cluster, cluster.hosts[0].executor.log)
