"""Settings of the policy `flying` (docs/scheduling.md)."""

from dataclasses import dataclass
from typing import Literal, get_args

from serving.scheduler.amoeba_config import AmoebaConfig

Preemption = Literal["hard", "soft", "sequential"]
PREEMPTIONS: tuple[str, ...] = get_args(Preemption)


@dataclass(frozen=True)
class FlyingConfig:
    """Settings of the policy `flying`."""

    preemption: str = "hard"
    """Treatment of running requests on devices that an urgent request needs (Flying Serving 5.2).

    "hard": they pause. "soft": they continue, and the urgent request runs beside them until the group is merged.
    "sequential": the merge waits for their end.
    """
    urgent_degree: int | None = None
    """Highest degree of groups for urgent requests. None: the highest degree of the cluster.

    A lower degree is used if no group of this degree can merge. If a group includes all devices, all other requests
    pause.
    """
    max_pause_s: float = 10.0
    """Longest pause of requests in seconds. Shorter pauses add up.

    After it, the paused requests run for as long as they were paused, before they may be paused again.
    """
    calm_requests: float = 1.5
    """Highest average number of requests per device at which all instances merge to the highest degree.

    Running, paused and waiting requests count.
    """
    burst_requests: float = 4.0
    """Lowest average number of requests per device at which groups split to the base degree.

    It should be at least twice `calm_requests`, so that noise does not cause changes. If half of a device's slots are
    fewer than this limit, both limits are scaled down.
    """
    load_window_s: float = 3.0
    """Time constant in seconds for averaging the number of requests."""
    dwell_s: float = 10.0
    """Minimum seconds before a merge because of light load, counted from the last merge or split because of load."""
    burst_wait_s: float = 1.0
    """Seconds that a short request waits for room before groups split for it."""
    ttft_slo_s: float | None = AmoebaConfig.ttft_slo_s
    """Limit in seconds for the time from arrival to first token, for requests without their own limit.

    If a short request would miss the limit, groups split before `burst_wait_s`. If a long request would miss it,
    another group merges. None: no limit.
    """
    tpot_slo_s: float | None = AmoebaConfig.tpot_slo_s
    """Limit in seconds for each further token, for requests without their own limit. None: no limit.

    Requests avoid instances with longer steps.
    """
    lookahead: int = 32
    """Maximum number of waiting requests that one decision skips because there is no room for them."""
    reserved_growth: float = 0.0
    """KV cache to keep free for running requests, as a share of the tokens that they may still generate."""
