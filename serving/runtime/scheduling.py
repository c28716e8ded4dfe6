"""The scheduler of a served model: its settings, and the handle by which the server shows and changes it."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from amoeba_jax import LLM
from amoeba_jax.errors import ConfigError
from amoeba_jax.transform.report import TransformReport, TransformVariant
from serving.runtime.jax_executor import EngineScheduler
from serving.runtime.metrics import ServerMetrics
from serving.scheduler import (
    Admission,
    AmoebaConfig,
    Policy,
    QueueOrder,
    ScaleDown,
    ScaleUp,
    SchedulerCounters,
    UnknownPolicyError,
    make_policy,
)


@dataclass(frozen=True)
class SchedulingConfig:
    """How requests are placed, and when instances change. Raises `ConfigError`. See docs/scheduling.md."""

    policy: str = "amoeba"
    """Name of a policy."""
    linger_s: float = AmoebaConfig.linger_s
    """See `AmoebaConfig`, as of the next nine."""
    ttft_slo_s: float | None = AmoebaConfig.ttft_slo_s
    tpot_slo_s: float | None = AmoebaConfig.tpot_slo_s
    split_free_share: float = AmoebaConfig.split_free_share
    partial_splits: bool = AmoebaConfig.partial_splits
    merge_again_after_s: float | None = AmoebaConfig.merge_again_after_s
    merge_to: int = AmoebaConfig.merge_to
    lookahead: int = AmoebaConfig.lookahead
    reserve_memory_s: float = AmoebaConfig.reserve_memory_s
    reserved_growth: float = AmoebaConfig.reserved_growth
    patience_s: float = QueueOrder.patience_s
    """See `QueueOrder`, as of the next two; of all policies."""
    level_s: float = QueueOrder.level_s
    starving_s: float | None = QueueOrder.starving_s
    layers_per_step: int = 1
    """Layers that a transformation changes between two steps: more end sooner, and make running requests wait longer
    for a token meanwhile."""

    def __post_init__(self) -> None:
        optional = ("merge_again_after_s", "ttft_slo_s", "tpot_slo_s", "starving_s")
        for name in ("linger_s", "reserve_memory_s", "patience_s", "level_s", *optional):
            value = getattr(self, name)
            if name in optional and value is None:
                continue
            if not _is_number(value) or not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value!r} must be seconds, finite and at least 0")
        for name in ("split_free_share", "reserved_growth"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= 1:
                raise ConfigError(f"{name}={value!r} must be from 0 to 1")
        if not isinstance(self.partial_splits, bool):
            raise ConfigError(f"partial_splits={self.partial_splits!r} must be true or false")
        for name in ("layers_per_step", "lookahead"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a positive integer")
        if isinstance(self.merge_to, bool) or self.merge_to not in (1, 2, 4):
            raise ConfigError(f"merge_to={self.merge_to!r} must be a degree: 1, 2 or 4")
        try:
            self.make_policy()
        except UnknownPolicyError as error:
            raise ConfigError(str(error)) from None

    def make_policy(self, name: str | None = None) -> Policy:
        """A new policy: the one of these settings, or another by name. Raises `UnknownPolicyError`."""
        config = AmoebaConfig(
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
        order = QueueOrder(self.patience_s, self.level_s, self.starving_s)
        return make_policy(self.policy if name is None else name, Admission(order), config)


OnReport = Callable[[TransformReport], None]


class Scheduling:
    """A scheduler that places the requests of an `LLM` from now on, until `close`. Methods may be called from any
    thread.

    Args:
        on_report: called, in the dispatcher thread, with what each transformation did that has ended well.
    """

    def __init__(
        self,
        llm: LLM,
        config: SchedulingConfig,
        metrics: ServerMetrics,
        on_report: OnReport = lambda report: None,
    ):
        self._llm, self._config, self._metrics, self._on_report = llm, config, metrics, on_report
        self._hook = llm.use_scheduler_hook(
            lambda engine: EngineScheduler(engine, config.make_policy(), config.layers_per_step, self._transformed)
        )
        metrics.scheduler = self.counters

    @property
    def policy_name(self) -> str:
        """Of the policy that decides."""
        return self._hook.policy.name

    @property
    def counters(self) -> SchedulerCounters:
        """What was decided since the start."""
        return self._hook.scheduler.counters

    def set_policy(self, name: str) -> str:
        """Let another policy decide from now on; returns the name of the one before. Raises `UnknownPolicyError`."""
        before = self.policy_name
        self._hook.policy = self._config.make_policy(name)
        return before

    def close(self) -> None:
        """Leave placing to the engine. For an `LLM` that has no requests."""
        self._llm.remove_scheduler_hook()

    def _transformed(self, action: ScaleUp | ScaleDown, future: "Future[TransformReport]") -> None:
        if future.exception() is None:
            self._metrics.transformed(future.result())
            self._on_report(future.result())
        else:
            kind = "scale_up" if isinstance(action, ScaleUp) else "scale_down"
            self._metrics.not_transformed(kind, str(TransformVariant.IN_PLACE_OVERLAPPED), "failed")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
