"""Interface of the executor for changes of degree."""

from typing import Protocol

from serving.scheduler import DegreeLimits
from serving.simulator.host_config import HostConfig
from serving.simulator.instance import SimInstance
from serving.simulator.run import Run
from serving.simulator.sim_timing import SimTimings
from serving.simulator.tally import Ending, Tally


class Host(Protocol):
    """Part of `SimExecutor` that changes of degree use."""

    config: HostConfig
    limits: dict[int, DegreeLimits]
    instances: list[SimInstance]
    tally: Tally
    timings: SimTimings
    now_s: float
    failing_transformations: int

    def new_instance(self, devices: tuple[int, ...], capacity_tokens: int | None = None) -> SimInstance:
        """Return an instance without requests. `capacity_tokens` lowers its capacity below that of its degree."""
        ...

    def replace(self, old: list[SimInstance], new: list[SimInstance]) -> None:
        """Replace instances by other instances on the same devices."""
        ...

    def begin(self, instance: SimInstance) -> None:
        """Start the next steps of an instance."""
        ...

    def finish(self, run: Run, ending: Ending) -> None:
        """Record the end of a request."""
        ...

    def preempt(self, instance: SimInstance, run: Run) -> None:
        """Preempt a request."""
        ...


def drained_s(host: Host, instance: SimInstance) -> float:
    """End the block of an instance with the running step, and return its end in seconds."""
    instance.cut(host.now_s)
    return host.now_s if instance.block is None else max(instance.block.end_s, host.now_s)


def take_in(host: Host, instance: SimInstance) -> None:
    """Account for all steps of an instance's block, and cancel its end event."""
    if instance.block is not None:
        for run in instance.end_block(instance.block.end_s):
            host.finish(run, Ending.COMPLETED)
        instance.version += 1
