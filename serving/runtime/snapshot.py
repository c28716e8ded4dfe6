"""State of an engine at one moment."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amoeba_jax.stats import EngineStats
from amoeba_jax.views import InstanceStatus, MemoryReport
from serving.runtime.placements import estimated_speedup, layers_by_device
from sharding.degrees import degrees_up_to
from sharding.owners import Owner

if TYPE_CHECKING:
    from amoeba_jax import LLM


@dataclass(frozen=True)
class Snapshot:
    """Instances, memory and totals of an engine at one moment."""

    instances: tuple[InstanceStatus, ...]
    memory: MemoryReport
    stats: EngineStats

    @property
    def running(self) -> int:
        """Number of running sequences."""
        return sum(view.running for view in self.instances)

    @property
    def paused(self) -> int:
        """Number of paused sequences. A paused sequence keeps its KV pages while other sequences use its devices."""
        return sum(view.paused for view in self.instances)

    @property
    def waiting(self) -> int:
        """Number of sequences in the queue, which all instances share."""
        return max((view.waiting for view in self.instances), default=0)

    @property
    def kv_usage(self) -> float:
        """Share of the KV pages that are in use, from 0 to 1."""
        total = sum(view.kv_total_pages for view in self.instances)
        return sum(view.kv_used_pages for view in self.instances) / total if total else 0.0

    def instances_by_degree(self) -> dict[int, int]:
        """Return the number of instances of each possible tensor-parallel degree, such as `{1: 2, 2: 1, 4: 0}`."""
        num_devices = sum(len(view.devices) for view in self.instances)
        degrees = dict.fromkeys(degrees_up_to(num_devices), 0)
        for view in self.instances:
            degrees[view.tensor_parallel_size] += 1
        return degrees

    def layer_replicas(self) -> dict[tuple[int, int], int]:
        """Return, by (instance id, device), how many layers of the instance the device computes.

        A layer counts if the device computes the attention or the FFN of the layer.
        """
        return {
            (view.id, device): count
            for view in self.instances
            if view.placement is not None
            for device, count in layers_by_device(view.placement).items()
        }

    def placement_speedups(self) -> dict[int, float]:
        """Return the result of `estimated_speedup` for each instance, by instance id."""
        return {view.id: estimated_speedup(view.placement) for view in self.instances if view.placement is not None}

    def weight_bytes(self) -> dict[int, int]:
        """Return the bytes of weights on each device."""
        sizes = {}
        for device in self.memory.devices:
            owners = self.memory.by_owner(device)
            sizes[device] = sum(size for owner, size in owners.items() if Owner(owner).is_weights)
        return sizes

    def kv_bytes(self) -> dict[int, int]:
        """Return the bytes of KV cache on each device."""
        return {device: self.memory.by_owner(device).get(Owner.KV_CACHE, 0) for device in self.memory.devices}


def take_snapshot(backend: "LLM") -> Snapshot:
    """Wait until the present step has ended, and return the state of the engine.

    Raises `EngineClosedError` if the engine has failed.
    """
    return Snapshot(*backend.snapshot())
