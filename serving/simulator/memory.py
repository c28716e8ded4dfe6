"""Capacity of instances: the number of tokens whose keys and values fit into memory.

Weights and the temporaries of a step use the rest of the memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serving.scheduler import DegreeLimits
from serving.simulator.device_spec import DeviceSpec
from serving.simulator.errors import DoesNotFitError, SimulationError
from serving.simulator.model_shape import ModelShape

SLOT_TOKENS, MIN_SLOTS, MAX_SLOTS = 1024, 8, 256
"""Default maximum number of running requests on a device: cache tokens for each request, lower and upper bound."""


@dataclass(frozen=True)
class MemoryPlan:
    """Division of a device's memory into weights, temporaries and KV cache."""

    model: ModelShape
    device: DeviceSpec
    utilization: float = 0.9
    """Share of the device's memory that may be used."""
    activation_bytes: float | None = None
    """Bytes of temporaries on each device. None: an estimate for a step of 8,192 tokens and logits of 256 rows."""
    page_size: int = 16
    changes_degree: bool = True
    """Whether instances merge and split. If so, only FFN weights are divided over the devices of an instance, and each
    device stores all other weights (AMOEBA 3.2). If not, all weights are divided."""

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise SimulationError(f"memory_utilization={self.utilization!r} must be in (0, 1]")

    @property
    def activations(self) -> float:
        """Bytes of temporaries on each device: `activation_bytes`, or an estimate if it is None."""
        if self.activation_bytes is not None:
            return self.activation_bytes
        model = self.model
        tokens = 8192 * (4 * model.hidden_size + 3 * model.ffn_size * model.experts_per_token) * model.item_bytes
        return tokens + 256 * model.vocab_size * 4

    def weight_bytes(self, degree: int) -> float:
        """Return the bytes of weights on each device of an instance of tensor-parallel degree `degree`."""
        if self.changes_degree:
            return self.model.other_bytes + self.model.ffn_bytes / degree
        return self.model.weight_bytes / degree

    def capacity_tokens(self, degree: int) -> int:
        """Return the number of tokens that fit into the KV cache of an instance, rounded down to whole pages.

        The result is 0 or negative if weights and temporaries leave no room.
        """
        free = self.device.memory_bytes * self.utilization - self.weight_bytes(degree) - self.activations
        return int(free / self.model.kv_token_bytes(degree)) // self.page_size * self.page_size

    def limits(
        self, degrees: Sequence[int], max_num_seqs: int | None, capacity: Callable[[int], int] | None = None
    ) -> tuple[DegreeLimits, ...]:
        """Return maximum tokens and running requests of an instance, for each degree at which the model fits.

        Raises `DoesNotFitError` if the model fits at no degree.

        Args:
            degrees: possible tensor-parallel degrees.
            max_num_seqs: maximum number of running requests for each device. None: the capacity in tokens of
                a device divided by `SLOT_TOKENS`, rounded down to a power of two, from `MIN_SLOTS` to `MAX_SLOTS`.
            capacity: function that returns the capacity in tokens of an instance of a given degree. None:
                `capacity_tokens`.
        """
        found = {degree: (capacity or self.capacity_tokens)(degree) for degree in degrees}
        fitting = {degree: tokens for degree, tokens in found.items() if tokens >= self.page_size}
        if not fitting:
            most = max(degrees)
            raise DoesNotFitError(
                f"{self.model.name} fits at no degree: at TP{most} the weights on a device ({self.device.name}) and "
                f"{self.activations / 1e9:.1f} GB of activations leave no room in "
                f"{self.device.memory_bytes * self.utilization / 1e9:.1f} GB: use a device with more memory or a "
                "higher degree"
            )
        slots = max_num_seqs
        if slots is None:
            most = max(max(tokens // degree for degree, tokens in fitting.items()) // SLOT_TOKENS, 1)
            slots = min(max(1 << (most.bit_length() - 1), MIN_SLOTS), MAX_SLOTS)
        return tuple(DegreeLimits(degree, tokens, slots * degree) for degree, tokens in fitting.items())

    def tokens_beside(self, weight_bytes: float, degree: int) -> int:
        """Return the capacity in tokens of `degree` devices, each of which stores `weight_bytes` bytes of weights.

        The KV cache is divided evenly over the devices. The result is rounded down to whole pages.
        """
        free = self.device.memory_bytes * self.utilization - self.activations - weight_bytes
        return int(free * degree / self.model.kv_token_bytes()) // self.page_size * self.page_size
