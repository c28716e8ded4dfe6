"""Settings of the policy `flying`: docs/scheduling.md."""

from dataclasses import dataclass
from typing import Literal, get_args

from serving.scheduler.amoeba_config import AmoebaConfig

Preemption = Literal["hard", "soft", "sequential"]
PREEMPTIONS: tuple[str, ...] = get_args(Preemption)


@dataclass(frozen=True)
class FlyingConfig:
    """What can be tuned."""

    preemption: str = "hard"
    """What becomes of the requests on devices that an urgent request takes (Flying Serving 5.2). "hard": they pause.
    "soft": they go on, and the urgent request runs beside them until the group is there; then all run on it.
    "sequential": they are waited for."""
    urgent_degree: int | None = None
    """Groups for urgent requests have this degree, or the next lower one that there can be. None: the highest. Where
    that is all devices, all other requests pause."""
    max_pause_s: float = 10.0
    """Requests pause for this long at most. Then they have the devices for as long as they had paused, before others
    may take them again; shorter pauses add up."""
    calm_requests: float = 1.5
    """Requests a device, running and waiting, up to which groups serve at the highest degree."""
    burst_requests: float = 4.0
    """Requests a device from which on groups split to the base degree: at least twice `calm_requests`, so that noise of
    30% about one of them does not reach the other. Where half of the slots are fewer, both are less in proportion."""
    load_window_s: float = 3.0
    """Time constant of the mean over requests a device."""
    dwell_s: float = 10.0
    """Groups bind for a light load no sooner than this after the last change for load. They split at once."""
    burst_wait_s: float = 1.0
    """Groups split once a short request has found no room for this long."""
    ttft_slo_s: float | None = AmoebaConfig.ttft_slo_s
    """Seconds in which a request should have its first token, unless it names an SLO of its own: groups split earlier
    than `burst_wait_s`, and a long request has a group of its own, where it would come later. None: no matter."""
    tpot_slo_s: float | None = AmoebaConfig.tpot_slo_s
    """Seconds that each further token should take, likewise: requests keep away from instances with longer steps."""
    lookahead: int = 32
    """A decision goes past at most that many requests that find no place."""
    reserved_growth: float = 0.0
    """Share kept free of what running requests may still grow by."""
