"""Settings of the scheduler.

Imports no JAX, so that the command line starts fast.
"""

import math
from dataclasses import dataclass

from amoeba_jax.errors import ConfigError
from serving.scheduler import (
    Admission,
    AmoebaConfig,
    FlyingConfig,
    Policy,
    QueueOrder,
    UnknownPolicyError,
    is_policy_file,
    load_policy,
    make_policy,
)
from serving.scheduler.cocoserve.config import REQUEST_POLICIES, CocoServeConfig
from serving.scheduler.flying_config import PREEMPTIONS
from sharding.degrees import is_degree


@dataclass(frozen=True)
class SchedulingConfig:
    """Settings of the scheduler (docs/scheduling.md).

    The scheduler assigns requests to instances. It also merges and splits instances.

    Raises:
        ConfigError: a value is out of range.
    """

    policy: str = "amoeba"
    """Policy that places requests and decides when instances merge and split (docs/scheduling.md), or a class in a
    file, such as my_policy.py:Sjf."""
    linger_s: float = AmoebaConfig.linger_s
    """Seconds that a merged instance is kept after its last long request."""
    ttft_slo_s: float | None = AmoebaConfig.ttft_slo_s
    """Target for the time from arrival to the first token, in seconds.

    If a long request would wait longer, another instance is merged for it. None: no such limit.
    """
    tpot_slo_s: float | None = AmoebaConfig.tpot_slo_s
    """Target for the time per token, in seconds. Short requests go to instances that are expected to meet it.

    None: no such limit.
    """
    split_free_share: float = AmoebaConfig.split_free_share
    """Share of the KV cache of a merged instance that must be free before it splits, from 0 to 1."""
    partial_splits: bool = AmoebaConfig.partial_splits
    """Whether an instance may split to a degree between its own and the lowest."""
    merge_again_after_s: float | None = AmoebaConfig.merge_again_after_s
    """Seconds that a long request waits before another instance is merged for it. Default: never."""
    merge_to: int = AmoebaConfig.merge_to
    """Lowest degree that instances merge to, a power of two."""
    lookahead: int = AmoebaConfig.lookahead
    """Maximum number of waiting requests that one decision skips because there is no room for them."""
    reserve_memory_s: float = AmoebaConfig.reserve_memory_s
    """Seconds for which the scheduler keeps room for a long request as large as the largest recent one."""
    reserved_growth: float = AmoebaConfig.reserved_growth
    """KV cache to keep free for running requests, as a share of the tokens that they may still generate.

    From 0 to 1.
    """
    preemption: str = FlyingConfig.preemption
    """flying: treatment of running requests if an urgent request needs their devices.

    hard: they pause. soft: they continue in the group of the urgent request. sequential: the urgent request waits for
    their end.
    """
    urgent_degree: int | None = FlyingConfig.urgent_degree
    """flying: highest degree of groups for urgent requests, a power of two. Default: the highest degree."""
    max_pause_s: float = FlyingConfig.max_pause_s
    """flying: longest pause of requests in seconds. After it, they run for at least as long as they were paused."""
    calm_requests: float = FlyingConfig.calm_requests
    """flying: highest average number of requests per device at which all instances merge to the highest degree."""
    burst_requests: float = FlyingConfig.burst_requests
    """flying: lowest average number of requests per device at which groups split to the base degree.

    It must be at least twice `calm_requests`.
    """
    load_window_s: float = FlyingConfig.load_window_s
    """flying: time constant in seconds for averaging the number of requests per device."""
    dwell_s: float = FlyingConfig.dwell_s
    """flying: minimum seconds from a merge or split because of load to the next merge because of light load.

    Splits because of heavy load do not wait.
    """
    burst_wait_s: float = FlyingConfig.burst_wait_s
    """flying: seconds that a short request waits for room before groups split for it."""
    request_policy: str = CocoServeConfig.request_policy
    """cocoserve: policy that dispatches requests, and that merges and splits instances: amoeba or flying."""
    vacancy_threshold: float = CocoServeConfig.vacancy_threshold
    """cocoserve: minimum vacancy rate of a device, from 0 to 1, at which layers are replicated to it."""
    violation_threshold: float = CocoServeConfig.violation_threshold
    """cocoserve: minimum share of requests that miss their SLOs, from 0 to 1, at which modules are reduced."""
    window_s: float = CocoServeConfig.window_s
    """cocoserve: time constant in seconds for averaging vacancy, violations and load."""
    cool_down_s: float = CocoServeConfig.cool_down_s
    """cocoserve: minimum seconds from one change of a placement to the next."""
    split_batch: int = CocoServeConfig.split_batch
    """cocoserve: minimum number of running requests of an instance for each device of a replicated layer."""
    scale_out: bool = CocoServeConfig.scale_out
    """cocoserve: whether an instance may start on an empty device, with all layers."""
    migrated_share: float = CocoServeConfig.migrated_share
    """cocoserve: share of the layers that one migration moves, above 0 and at most 1."""
    batch_step: int = CocoServeConfig.batch_step
    """cocoserve: number of requests by which a reduction lowers the batch of an instance. Also the smallest batch."""
    patience_s: float = QueueOrder.patience_s
    """Seconds from the arrival of a request to its due time. The request with the earliest due time goes first.

    An earlier deadline is the due time.
    """
    level_s: float = QueueOrder.level_s
    """Seconds by which each level of priority moves the due time of a request."""
    starving_s: float | None = QueueOrder.starving_s
    """Seconds that a request waits before no other request may overtake it. None: no limit."""
    layers_per_step: int | None = None
    """Number of layers that a transformation changes between two steps.

    It is rounded up to whole segments (`segment_layers`). Default: one segment.
    """

    def __post_init__(self) -> None:
        optional = ("merge_again_after_s", "ttft_slo_s", "tpot_slo_s", "starving_s")
        flying = ("max_pause_s", "calm_requests", "burst_requests", "load_window_s", "dwell_s", "burst_wait_s")
        cocoserve = ("window_s", "cool_down_s")
        for name in ("linger_s", "reserve_memory_s", "patience_s", "level_s", *flying, *cocoserve, *optional):
            value = getattr(self, name)
            if name in optional and value is None:
                continue
            if not _is_number(value) or not 0 <= value < math.inf:
                what = "requests" if name in ("calm_requests", "burst_requests") else "seconds"
                raise ConfigError(f"{name}={value!r} must be {what}, finite and at least 0")
        if self.request_policy not in REQUEST_POLICIES:
            known = ", ".join(REQUEST_POLICIES)
            raise ConfigError(f"request_policy={self.request_policy!r} must be one of {known}")
        if self.preemption not in PREEMPTIONS:
            raise ConfigError(f"preemption={self.preemption!r} must be one of {', '.join(PREEMPTIONS)}")
        if not self.burst_requests >= 2 * self.calm_requests > 0 or not self.load_window_s:
            raise ConfigError(
                f"burst_requests={self.burst_requests!r} must be at least twice calm_requests={self.calm_requests!r}, "
                f"and both and load_window_s={self.load_window_s!r} above 0"
            )
        for name in ("split_free_share", "reserved_growth", "vacancy_threshold", "violation_threshold"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= 1:
                raise ConfigError(f"{name}={value!r} must be from 0 to 1")
        if not _is_number(self.migrated_share) or not 0 < self.migrated_share <= 1:
            raise ConfigError(f"migrated_share={self.migrated_share!r} must be above 0 and at most 1")
        for name in ("window_s", "violation_threshold"):
            if not getattr(self, name):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be above 0")
        for name in ("partial_splits", "scale_out"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be true or false")
        for name in ("layers_per_step", "urgent_degree", "lookahead", "split_batch", "batch_step"):
            value = getattr(self, name)
            if name in ("layers_per_step", "urgent_degree") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a positive integer")
        if not is_degree(self.merge_to):
            raise ConfigError(f"merge_to={self.merge_to!r} must be a degree, a power of two")
        try:
            self.make_policy()
        except UnknownPolicyError as error:
            raise ConfigError(str(error)) from None

    @property
    def amoeba(self) -> AmoebaConfig:
        """Settings of the policy `amoeba`, and of other policies that use its rules."""
        return AmoebaConfig(
            split_free_share=self.split_free_share,
            linger_s=self.linger_s,
            partial_splits=self.partial_splits,
            ttft_slo_s=self.ttft_slo_s,
            tpot_slo_s=self.tpot_slo_s,
            merge_again_after_s=self.merge_again_after_s,
            merge_to=self.merge_to,
            lookahead=self.lookahead,
            reserve_memory_s=self.reserve_memory_s,
            reserved_growth=self.reserved_growth,
        )

    @property
    def flying(self) -> FlyingConfig:
        """Settings of the policy `flying`."""
        return FlyingConfig(
            preemption=self.preemption,  # pyright: ignore[reportArgumentType]
            urgent_degree=self.urgent_degree,
            max_pause_s=self.max_pause_s,
            calm_requests=self.calm_requests,
            burst_requests=self.burst_requests,
            load_window_s=self.load_window_s,
            dwell_s=self.dwell_s,
            burst_wait_s=self.burst_wait_s,
            ttft_slo_s=self.ttft_slo_s,
            tpot_slo_s=self.tpot_slo_s,
            lookahead=self.lookahead,
            reserved_growth=self.reserved_growth,
        )

    @property
    def cocoserve(self) -> CocoServeConfig:
        """Settings of the policy `cocoserve`."""
        return CocoServeConfig(
            request_policy=self.request_policy,
            vacancy_threshold=self.vacancy_threshold,
            violation_threshold=self.violation_threshold,
            window_s=self.window_s,
            cool_down_s=self.cool_down_s,
            split_batch=self.split_batch,
            scale_out=self.scale_out,
            migrated_share=self.migrated_share,
            batch_step=self.batch_step,
        )

    def make_policy(self, name: str | None = None) -> Policy:
        """Return a new policy with these settings. Raises `UnknownPolicyError` if `name` is unknown.

        `name` is the name of the policy. None: the field `policy` of these settings.
        """
        if name is None and is_policy_file(self.policy):
            return load_policy(self.policy)()
        order = QueueOrder(self.patience_s, self.level_s, self.starving_s)
        chosen = self.policy if name is None else name
        return make_policy(chosen, Admission(order), self.amoeba, self.flying, self.cocoserve)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
