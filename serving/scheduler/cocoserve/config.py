"""Settings of the policy `cocoserve` (docs/scheduling.md)."""

from dataclasses import dataclass

REQUEST_POLICIES = ("amoeba", "flying")


@dataclass(frozen=True)
class CocoServeConfig:
    """Settings of the policy `cocoserve`. The latency limits (SLOs) are settings of the policy `amoeba`."""

    request_policy: str = "amoeba"
    """Policy that dispatches requests, and that merges and splits instances: one of `REQUEST_POLICIES`."""
    vacancy_threshold: float = 0.5
    """Minimum vacancy rate of a device at which layers are replicated to it (T_up of CoCoServe 5).

    The rate is averaged over `window_s`.
    """
    violation_threshold: float = 0.1
    """Minimum share of requests that miss their SLOs at which modules are reduced (T_down of CoCoServe 5).

    The share is averaged over `window_s`. Reductions end when it has fallen to half of this threshold.
    """
    window_s: float = 5.0
    """Time constant in seconds for averaging vacancy, violations and load."""
    cool_down_s: float = 10.0
    """Minimum seconds from one change to the next, so that the averages show the effect of a change.

    Evictions before a merge do not wait.
    """
    split_batch: int = 8
    """Minimum number of running requests of an instance for each home of a replicated layer.

    A small share of a batch takes about as long as the whole batch, because each step reads all weights.
    """
    scale_out: bool = True
    """Whether an empty device that can hold all layers gets a separate instance. If not, layers are replicated there.

    The instance ends when few requests are left.
    """
    migrated_share: float = 0.1
    """Share of the layers that one migration moves."""
    batch_step: int = 5
    """Number of requests by which a reduction lowers the batch of an instance (CoCoServe 4.2).

    Also the smallest batch.
    """
