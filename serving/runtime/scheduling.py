"""Scheduler of a server's `LLM`. The server can inspect the scheduler and replace its policy."""

from collections.abc import Callable
from concurrent.futures import Future

from amoeba_jax import LLM
from amoeba_jax.transform.report import PlacementReport, TransformReport, TransformVariant
from serving.runtime.jax_executor import PLACEMENT_KINDS, EngineScheduler
from serving.runtime.metrics import ServerMetrics
from serving.runtime.scheduling_config import SchedulingConfig
from serving.scheduler import PlacementChange, Record, ScaleDown, ScaleUp, SchedulerCounters
from serving.scheduler.cocoserve.monitor import Monitor

OnReport = Callable[[TransformReport], None]


class Scheduling:
    """Scheduler that decides where the requests of an `LLM` run. Any thread may call the methods.

    The constructor installs the scheduler in the `LLM`. The method `close` removes it.

    Args:
        llm: model to schedule.
        config: settings of the scheduler.
        metrics: metrics that count decisions, merges and splits.
        on_report: function that the engine's thread calls with the report of each successful merge or split.
    """

    def __init__(
        self,
        llm: LLM,
        config: SchedulingConfig,
        metrics: ServerMetrics,
        on_report: OnReport = lambda report: None,
    ):
        self._llm, self._config, self._metrics, self._on_report = llm, config, metrics, on_report
        monitor = Monitor(config.cocoserve, config.amoeba)
        self._hook = llm.use_scheduler_hook(
            lambda engine: EngineScheduler(
                engine,
                config.make_policy(),
                config.layers_per_step or "auto",
                self._transformed,
                self._placed,
                monitor,
            )
        )
        metrics.scheduler, metrics.monitor = self.counters, monitor

    @property
    def policy_name(self) -> str:
        """Name of the present policy."""
        return self._hook.policy.name

    @property
    def counters(self) -> SchedulerCounters:
        """Counters of the policy's actions since the start."""
        return self._hook.scheduler.counters

    @property
    def records(self) -> list[Record]:
        """Last actions that the scheduler tried, oldest first."""
        scheduler = self._hook.scheduler
        return sorted([*scheduler.records, *scheduler.dispatch_records], key=lambda record: record.number)

    def set_policy(self, name: str) -> str:
        """Replace the policy. Return the name of the previous policy.

        Raises `UnknownPolicyError` if there is no policy with this name.
        """
        before = self.policy_name
        self._hook.policy = self._config.make_policy(name)
        return before

    def close(self) -> None:
        """Remove the scheduler from the `LLM`. All requests must have ended.

        Afterwards, the engine itself assigns requests to instances.
        """
        self._llm.remove_scheduler_hook()

    def _transformed(self, action: ScaleUp | ScaleDown, future: "Future[TransformReport]") -> None:
        if future.exception() is None:
            self._metrics.transformed(future.result())
            self._on_report(future.result())
        else:
            kind = "scale_up" if isinstance(action, ScaleUp) else "scale_down"
            self._metrics.not_transformed(kind, str(TransformVariant.IN_PLACE_OVERLAPPED), "failed")

    def _placed(self, action: PlacementChange, future: "Future[PlacementReport]") -> None:
        if future.exception() is None:
            self._metrics.scaled(future.result())
        else:
            self._metrics.not_scaled(PLACEMENT_KINDS[type(action)], "failed")
