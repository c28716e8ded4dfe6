"""Settings of the policy `cocoserve`: docs/scheduling.md."""

from dataclasses import dataclass
from typing import Literal, get_args

RequestPolicy = Literal["amoeba", "flying"]
REQUEST_POLICIES: tuple[RequestPolicy, ...] = get_args(RequestPolicy)


@dataclass(frozen=True)
class CocoServeConfig:
    """Settings of the policy `cocoserve`, in addition to the settings of `amoeba` with the limits of latencies."""

    request_policy: RequestPolicy = "amoeba"
    """Policy that dispatches requests, and that merges and splits instances."""
    vacancy_threshold: float = 0.5
    """Vacancy rate of a device, averaged over `window_s`, from which layers replicate to it (T_up of CoCoServe 5)."""
    violation_threshold: float = 0.1
    """Share of requests that violate their SLOs, averaged over `window_s`, from which modules are reduced (T_down of
    CoCoServe 5). Reductions end when the share has fallen to half of this threshold."""
    window_s: float = 5.0
    """Time constant in seconds for averaging vacancy, violations and load."""
    cool_down_s: float = 10.0
    """Minimum seconds from one change to the next, so that the averages show its effect. It does not apply to evictions
    before a merge."""
    split_batch: int = 8
    """Running requests that an instance needs for each home of a replicated layer. A smaller share of a batch takes
    about as long as the whole batch, because each step reads all weights."""
    scale_out: bool = True
    """Whether all layers replicate to an empty device that holds them, and become an instance of their own there. It
    ends when few requests are left. Otherwise, layers replicate there."""
    migrated_share: float = 0.1
    """Share of the layers that one migration moves."""
    batch_step: int = 5
    """Number of requests by which one reduction lowers the batch of an instance, and its minimum (CoCoServe 4.2)."""
