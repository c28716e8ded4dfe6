"""Interface of a simulated host, for the modules that merge, split, pause and spread instances."""

from typing import Protocol

from serving.scheduler import DegreeLimits
from serving.simulator.host_config import HostConfig
from serving.simulator.instance import SimInstance
from serving.simulator.run import Run
from serving.simulator.sim_timing import SimTimings
from serving.simulator.tally import Ending, Tally


class Host(Protocol):
    """Simulated host, as the modules that merge, split, pause and spread instances use it.

    `SimExecutor` implements and documents the methods.
    """

    config: HostConfig
    limits: dict[int, DegreeLimits]
    instances: list[SimInstance]
    tally: Tally
    timings: SimTimings
    now_s: float
    failing_transformations: int

    def new_instance(self, devices: tuple[int, ...], capacity_tokens: int | None = None) -> SimInstance: ...

    def replace(self, old: list[SimInstance], new: list[SimInstance]) -> None: ...

    def rehome(self, instance: SimInstance) -> None: ...

    def begin(self, instance: SimInstance) -> None: ...

    def disturb(self, instance: SimInstance) -> None: ...

    def forget(self, run: Run) -> None: ...

    def finish(self, run: Run, ending: Ending) -> None: ...

    def preempt(self, instance: SimInstance, run: Run) -> None: ...


def drained_s(host: Host, instance: SimInstance) -> float:
    """Return the virtual time in seconds at which the running step of an instance ends.

    If no step is running, return the present time. Also drop all steps that have not begun. The caller must call
    `take_in` next.
    """
    instance.cut(host.now_s)
    return host.now_s if instance.block is None else max(instance.block.end_s, host.now_s)


def take_in(host: Host, instance: SimInstance) -> None:
    """Process all planned steps of an instance as if they had ended. Record finished requests.

    The last planned step may still be running. Afterwards the instance is idle, and the event for the end of the
    steps is obsolete.
    """
    if instance.block is not None:
        for run in instance.end_block(instance.block.end_s):
            host.finish(run, Ending.COMPLETED)
        instance.version += 1
