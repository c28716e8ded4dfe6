"""Policies on a simulated host with the capacities of `cluster_views` and given rates."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serving.scheduler import Action, DegreeLimits, Policy, RejectKind, Scheduler, WaitingRequest
from serving.simulator.batching import TokenBudget
from serving.simulator.event_loop import Cluster, LoopConfig
from serving.simulator.faults import Faults
from serving.simulator.host_config import HostConfig
from serving.simulator.pricing import Pricing
from serving.simulator.requests import RequestTable
from serving.simulator.router import OneHost
from serving.simulator.step_cost import RateStepCost
from serving.simulator.tally import Ending
from serving.simulator.transformation_cost import FixedTransformation

Arrivals = list[tuple[WaitingRequest, int]]

RATES = RateStepCost(
    prefill={1: 4_000.0, 2: 7_000.0, 4: 12_000.0},
    decode={1: 400.0, 2: 560.0, 4: 688.0},
    decode_each={1: 25.0, 2: 33.0, 4: 40.0},
)
"""Four TP1 instances generate 1600 tokens a second together, one TP4 instance 688: 57% less, the loss that Gyges 3.1
reports."""


def table(arrivals: Arrivals) -> RequestTable:
    """Requests, and the tokens that each will generate, as columns."""
    ordered = sorted(arrivals, key=lambda a: a[0].arrival_s)
    requests = [request for request, _ in ordered]
    deadlines = [np.nan if r.deadline_s is None else r.deadline_s - r.arrival_s for r in requests]
    return RequestTable(
        np.array([r.arrival_s for r in requests]),
        np.array([r.prompt_tokens for r in requests]),
        np.array([tokens for _, tokens in ordered]),
        np.array([r.max_total_tokens - r.prompt_tokens for r in requests]),
        np.zeros(len(requests), int),
        priority=np.array([r.priority for r in requests]),
        deadline_s=np.array(deadlines),
        names=[r.request_id for r in requests],
    )


@dataclass
class Simulated:
    """What came of a simulation, by the ids of requests."""

    cluster: Cluster
    names: list[str]
    log: list[tuple[float, Action]] = field(init=False)
    """Actions that the executor took on."""

    def __post_init__(self) -> None:
        self.executor = self.cluster.hosts[0].executor
        self.log = self.executor.log

    def _times(self, column: str) -> dict[str, float]:
        values = getattr(self.cluster.records, column)
        return {name: value for name, value in zip(self.names, values, strict=True) if value == value}

    @property
    def finished_s(self) -> dict[str, float]:
        endings = self.cluster.records.ending
        ends = self._times("end_s")
        return {n: ends[n] for n, e in zip(self.names, endings, strict=True) if e == Ending.COMPLETED}

    @property
    def first_token_s(self) -> dict[str, float]:
        return self._times("first_token_s")

    @property
    def rejected(self) -> dict[str, RejectKind]:
        endings = zip(self.names, self.cluster.records.ending, strict=True)
        return {n: RejectKind(Ending(e).name.lower()) for n, e in endings if e > Ending.COMPLETED}

    @property
    def degrees(self) -> list[int]:
        return [instance.degree for instance in self.executor.instances]

    def count(self, *kinds: type[Action]) -> int:
        """Actions of some kinds."""
        return sum(isinstance(action, kinds) for _, action in self.log)

    def generated_tokens(self, arrivals: Arrivals) -> int:
        """Output tokens of the requests that have finished."""
        finished = self.finished_s
        return sum(tokens for request, tokens in arrivals if request.request_id in finished)


def simulate(
    policy: Policy,
    arrivals: Arrivals,
    until_s: float,
    degrees: tuple[DegreeLimits, ...],
    num_devices: int = 8,
    fail_transformations: int = 0,
    **changes: Any,
) -> tuple[Simulated, Scheduler]:
    """Serve arrivals with a policy, on a host that starts with TP1 instances, and is strict."""
    settings: dict[str, Any] = {
        "num_devices": num_devices,
        "limits": degrees,
        "pricing": Pricing(RATES, TokenBudget(2048)),
        "transformation": FixedTransformation(1.0),
        "degrees_at_start": (1,) * num_devices,
        "strict": True,
    }
    config = HostConfig(**(settings | changes))
    requests = table(arrivals)
    faults = Faults(transformations=fail_transformations)
    cluster = Cluster(config, 1, lambda: policy, requests, OneHost(), faults, keep_log=True)
    cluster.run(LoopConfig(until_s=until_s))
    return Simulated(cluster, list(requests.names or ())), cluster.hosts[0].scheduler
