"""Settings of the policy `flying`: docs/scheduling.md."""

from dataclasses import dataclass
from typing import Literal, get_args

from serving.scheduler.amoeba_config import AmoebaConfig

Preemption = Literal["hard", "soft", "sequential"]
PREEMPTIONS: tuple[str, ...] = get_args(Preemption)


@dataclass(frozen=True)
class FlyingConfig:
    """Settings of the policy `flying`."""

    preemption: str = "hard"
    """Treatment of running requests on devices that an urgent request takes (Flying Serving 5.2). "hard": they pause.
    "soft": they continue, and the urgent request runs next to them until the group is merged. "sequential": the merge
    waits for their end."""
    urgent_degree: int | None = None
    """Highest degree of groups for urgent requests. A lower degree is used if no group of this degree can merge. None:
    the highest degree of the cluster. If a group includes all devices, all other requests pause."""
    max_pause_s: float = 10.0
    """Longest pause in seconds. Afterwards the paused requests run for as long as they were paused, before they may be
    paused again. Shorter pauses add up."""
    calm_requests: float = 1.5
    """Average number of running, paused and waiting requests for each device, up to which all instances merge to the
    highest degree."""
    burst_requests: float = 4.0
    """Average number of requests for each device, from which groups split to the base degree. It should be at least
    twice `calm_requests`, so that noise does not cause changes. If half of a device's slots are fewer than this limit,
    both limits are scaled down."""
    load_window_s: float = 3.0
    """Time constant in seconds for averaging the number of requests."""
    dwell_s: float = 10.0
    """Minimum seconds between a merge or split because of load and the next merge because of light load."""
    burst_wait_s: float = 1.0
    """Seconds that a short request waits for room before groups split for it."""
    ttft_slo_s: float | None = AmoebaConfig.ttft_slo_s
    """Limit in seconds for the time from arrival to first token, for requests without their own limit. If a short
    request would miss the limit, groups split before `burst_wait_s`. If a long request would miss it, another group
    merges. None: no limit."""
    tpot_slo_s: float | None = AmoebaConfig.tpot_slo_s
    """Limit in seconds for each further token, for requests without their own limit. Requests avoid instances with
    longer steps. None: no limit."""
    lookahead: int = 32
    """Maximum number of requests without room that one decision skips."""
    reserved_growth: float = 0.0
    """Share of the tokens that running requests may still generate, for which KV cache is kept free."""
