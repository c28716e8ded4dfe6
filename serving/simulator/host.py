"""What changes of degree need of the executor that they are made for."""

from typing import Protocol

from serving.scheduler import DegreeLimits
from serving.simulator.host_config import HostConfig
from serving.simulator.instance import SimInstance
from serving.simulator.run import Run
from serving.simulator.sim_timing import SimTimings
from serving.simulator.tally import Ending, Tally


class Host(Protocol):
    """See `SimExecutor`."""

    config: HostConfig
    limits: dict[int, DegreeLimits]
    instances: list[SimInstance]
    tally: Tally
    timings: SimTimings
    now_s: float
    failing_transformations: int

    def new_instance(self, devices: tuple[int, ...], capacity_tokens: int | None = None) -> SimInstance:
        """Make an instance without requests; `capacity_tokens` where it holds less than its degree can."""
        ...

    def replace(self, old: list[SimInstance], new: list[SimInstance]) -> None:
        """Put instances in the place of others."""
        ...

    def begin(self, instance: SimInstance) -> None:
        """Begin an instance's next steps."""
        ...

    def finish(self, run: Run, ending: Ending) -> None:
        """Take note that a request has ended."""
        ...

    def preempt(self, instance: SimInstance, run: Run) -> None:
        """Have a request wait again."""
        ...


def drained_s(host: Host, instance: SimInstance) -> float:
    """End the instance's block with the step that runs, and say when that is."""
    instance.cut(host.now_s)
    return host.now_s if instance.block is None else max(instance.block.end_s, host.now_s)


def take_in(host: Host, instance: SimInstance) -> None:
    """Take in the steps of an instance's block, whose end events are void from now on."""
    if instance.block is not None:
        for run in instance.end_block(instance.block.end_s):
            host.finish(run, Ending.COMPLETED)
        instance.version += 1
