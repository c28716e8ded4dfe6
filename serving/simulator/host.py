"""Interface of a simulated host for the modules that merge, split and pause instances."""

from typing import Protocol

from serving.scheduler import DegreeLimits
from serving.simulator.host_config import HostConfig
from serving.simulator.instance import SimInstance
from serving.simulator.run import Run
from serving.simulator.sim_timing import SimTimings
from serving.simulator.tally import Ending, Tally


class Host(Protocol):
    """Part of `SimExecutor` that these modules use. Methods are described there."""

    config: HostConfig
    limits: dict[int, DegreeLimits]
    instances: list[SimInstance]
    tally: Tally
    timings: SimTimings
    now_s: float
    failing_transformations: int

    def new_instance(self, devices: tuple[int, ...], capacity_tokens: int | None = None) -> SimInstance: ...

    def replace(self, old: list[SimInstance], new: list[SimInstance]) -> None: ...

    def begin(self, instance: SimInstance) -> None: ...

    def finish(self, run: Run, ending: Ending) -> None: ...

    def preempt(self, instance: SimInstance, run: Run) -> None: ...


def drained_s(host: Host, instance: SimInstance) -> float:
    """Drop the steps of an instance that have not begun. Return the time at which the step that is running ends.

    Returns the present time if the instance is idle. The caller then calls `take_in`.
    """
    instance.cut(host.now_s)
    return host.now_s if instance.block is None else max(instance.block.end_s, host.now_s)


def take_in(host: Host, instance: SimInstance) -> None:
    """Process all steps of an instance's block at once, including finished requests, although the last step may still
    run. The instance is idle then, and the event for the end of the block is obsolete.
    """
    if instance.block is not None:
        for run in instance.end_block(instance.block.end_s):
            host.finish(run, Ending.COMPLETED)
        instance.version += 1
