"""The scheduler of a served model: the handle by which the server shows and changes it."""

from collections.abc import Callable
from concurrent.futures import Future

from amoeba_jax import LLM
from amoeba_jax.transform.report import TransformReport, TransformVariant
from serving.runtime.jax_executor import EngineScheduler
from serving.runtime.metrics import ServerMetrics
from serving.runtime.scheduling_config import SchedulingConfig
from serving.scheduler import ScaleDown, ScaleUp, SchedulerCounters

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
            lambda engine: EngineScheduler(
                engine, config.make_policy(), config.layers_per_step or "auto", self._transformed
            )
        )
        metrics.scheduler = self.counters

    @property
    def policy_name(self) -> str:
        """Name of the policy that decides."""
        return self._hook.policy.name

    @property
    def counters(self) -> SchedulerCounters:
        """Counts of decisions since the start."""
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
