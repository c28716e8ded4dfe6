"""Cost models of other serving systems, according to their papers.

This module has the costs of steps, the costs of merges and splits, and the capacities of instances.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from serving.scheduler import DegreeLimits
from serving.simulator.device_spec import DeviceSpec
from serving.simulator.memory import MemoryPlan
from serving.simulator.model_shape import ModelShape
from serving.simulator.step_cost import ModelStepCost, StepShape
from serving.simulator.transformation_cost import Change


@dataclass(frozen=True)
class HostMemoryCost:
    """Cost of a change of the tensor-parallel degree in Seesaw (arXiv 2503.06433).

    Devices load weights from host memory, and copy the KV cache to host memory and back. Meanwhile no step runs. Each
    device transfers at the rate of its own host link.
    """

    model: ModelShape
    device: DeviceSpec

    @property
    def layers(self) -> int:
        return self.model.num_layers

    def change(self, from_degree: int, to_degree: int, tokens: int, kept: bool = False) -> Change:
        """Return the cost of a change of the tensor-parallel degree. All devices transfer at the same time.

        Arguments are as in `TransformationCost.change`. `kept` has no effect.
        """
        devices = max(from_degree, to_degree)
        kv_device = self.model.kv_token_bytes() * tokens / devices
        weights_device = self.model.other_bytes / to_degree + self.model.ffn_bytes / to_degree
        pause_s = (2 * kv_device + weights_device) / self.device.host_bandwidth
        return Change(0.0, pause_s, 2 * kv_device * devices, weights_device * devices)


@dataclass(frozen=True)
class LayerExchangeCost:
    """Cost of merges and splits in KunServe (arXiv 2412.18169, sections 4.2 and 4.4).

    In a merge, each device drops the weights of some layers at no cost, and sends the keys and values of these layers
    to a device that keeps these weights. In a split, the devices copy weights, keys and values back.
    """

    model: ModelShape
    device: DeviceSpec

    @property
    def layers(self) -> int:
        return self.model.num_layers

    def change(self, from_degree: int, to_degree: int, tokens: int, kept: bool = False) -> Change:
        """Return the cost of a merge or split. Arguments are as in `TransformationCost.change`."""
        stages = max(from_degree, to_degree) // min(from_degree, to_degree)
        kv_device = self.model.kv_token_bytes() * tokens / stages * (stages - 1) / stages
        weights_device = 0.0
        if to_degree < from_degree and not kept:
            weights_device = self.model.weight_bytes * (stages - 1) / stages
        rate = self.device.link_bandwidth * self.device.link_efficiency
        layer_s = (kv_device + weights_device) / rate / self.layers + self.device.launch_s
        return Change(layer_s, 0.0, kv_device * stages, weights_device * stages)


@dataclass(frozen=True)
class PipelineCost:
    """Cost of steps in KunServe, whose instances use pipeline parallelism.

    Each device is a stage of the pipeline, and computes some of the layers. A step divides its tokens into as many
    micro-batches as there are stages, so that all stages are busy.
    """

    base: ModelStepCost

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """Return the seconds of a step with the contents `shape`, without the attention operator.

        All stages are always busy. A step takes as long as one micro-batch needs for all stages and its transfers.
        """
        if degree == 1:
            return self.base.fixed_s(1, shape)
        part = _part(shape, degree)
        hop_bytes = max(part.decodes + part.prompt_tokens, 1) * self.base.model.hidden_size * self.base.model.item_bytes
        device = self.base.device
        hop_s = device.launch_s + hop_bytes / (device.link_bandwidth * device.link_efficiency)
        return self.base.fixed_s(1, part) + degree * hop_s

    def context_s(self, degree: int) -> float:
        """Return the seconds of decode attention for one cached token of a decoding sequence.

        The time at degree 1 is divided by the degree, because all stages work at the same time.
        """
        return self.base.context_s(1) / degree

    def pair_s(self, degree: int) -> float:
        return self.base.pair_s(1) / degree


@dataclass(frozen=True)
class SequenceParallelCost:
    """Cost of steps in LoongServe (arXiv 2404.09526), with sequence parallelism over parts of an instance.

    A part is one device, or several devices with tensor parallelism. Each part has all weights, and computes some
    tokens of every prompt. In decode steps, each sequence has one part as its master. The master computes everything
    except attention. Attention runs on all parts that store keys and values of the sequence.
    """

    base: ModelStepCost
    tensor_degree: int = 1
    """Number of devices of each part. The argument `degree` of the methods is the number of parts."""
    masters: int | None = None
    """Number of parts that are masters. None: all parts."""

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """Return the seconds of a step with the contents `shape`, without the attention operator.

        The result is the time that one part computes, plus the time of transfers between parts. In each layer, keys and
        values of prompts pass through all parts. A part that is a master sends the queries of its decoding sequences to
        the other parts, and receives partial results.
        """
        tensor = self.tensor_degree
        if degree == 1:
            return self.base.fixed_s(tensor, shape)
        model, device = self.base.model, self.base.device
        part = _part(shape, degree)._replace(decodes=-(-shape.decodes // (self.masters or degree)))
        rate = device.link_bandwidth * device.link_efficiency * tensor
        latency_s = device.all_reduce_s(0.0, degree)
        ring_bytes = part.prompt_tokens * (degree - 1) * model.kv_token_bytes() / model.num_layers
        query_bytes = 2 * part.decodes * (degree - 1) * model.num_heads * model.head_dim * model.item_bytes
        layer_s = latency_s + (ring_bytes + query_bytes) / rate
        return self.base.fixed_s(tensor, part) + model.num_layers * layer_s

    def context_s(self, degree: int) -> float:
        return self.base.context_s(self.tensor_degree) / degree

    def pair_s(self, degree: int) -> float:
        return self.base.pair_s(self.tensor_degree) / degree


@dataclass(frozen=True)
class UlyssesCost:
    """Cost of steps with Ulysses sequence parallelism, which Shift Parallelism uses (arXiv 2509.16495).

    Each device has all weights and computes some of the tokens. In attention, each device computes some heads for all
    tokens. Each layer therefore needs two all-to-all exchanges.
    """

    base: ModelStepCost

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """Return the seconds of a step with the contents `shape`, without the attention operator."""
        if degree == 1:
            return self.base.fixed_s(1, shape)
        model, device = self.base.model, self.base.device
        part = _part(shape, degree)
        tokens = max(part.decodes + part.prompt_tokens, 1)
        heads = 2 * model.num_heads + 2 * model.num_kv_heads
        sent = tokens * heads * model.head_dim * model.item_bytes * (degree - 1) / degree
        layer_s = 2 * device.all_reduce_s(0.0, degree) + sent / (device.link_bandwidth * device.link_efficiency)
        return self.base.fixed_s(1, part) + model.num_layers * layer_s

    def context_s(self, degree: int) -> float:
        return self.base.context_s(degree)

    def pair_s(self, degree: int) -> float:
        return self.base.pair_s(degree)


@dataclass(frozen=True)
class ShiftCost:
    """Cost of steps with Shift Parallelism: each step uses the faster of tensor and sequence parallelism.

    Both kinds of parallelism store the KV cache in the same way, so no page moves between steps.
    """

    base: ModelStepCost

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """Return the seconds of a step with the contents `shape`, without the attention operator."""
        return min(self.base.fixed_s(degree, shape), UlyssesCost(self.base).fixed_s(degree, shape))

    def context_s(self, degree: int) -> float:
        return self.base.context_s(degree)

    def pair_s(self, degree: int) -> float:
        return self.base.pair_s(degree)


def _part(shape: StepShape, degree: int) -> StepShape:
    """Return one device's part of a step, if `degree` devices divide the tokens and decoding sequences of the step.

    Numbers are rounded up. The number of prompts stays the same, because every device computes a part of each prompt.
    """
    return StepShape(
        -(-shape.decodes // degree), shape.prompts, -(-shape.prompt_tokens // degree), -(-shape.longest_chunk // degree)
    )


def drop_limits(memory: MemoryPlan, degrees: Sequence[int], max_num_seqs: int | None) -> tuple[DegreeLimits, ...]:
    """Return maximum tokens and running requests of a KunServe instance, for each degree at which the model fits.

    Each layer is stored on one device of the instance. Raises `DoesNotFitError` if the model fits at no degree.
    """
    weights = memory.model.weight_bytes
    return memory.limits(degrees, max_num_seqs, lambda degree: memory.tokens_beside(weights / degree, degree))


def sequence_limits(memory: MemoryPlan, degrees: Sequence[int], max_num_seqs: int | None) -> tuple[DegreeLimits, ...]:
    """Return maximum tokens and running requests of a LoongServe instance, for each degree.

    Each device stores all weights. Raises `DoesNotFitError` if the model does not fit on one device.
    """
    one = memory.limits((1,), max_num_seqs)[0]
    return tuple(DegreeLimits(degree, one.capacity_tokens * degree, one.max_requests * degree) for degree in degrees)


def shift_limits(memory: MemoryPlan, degrees: Sequence[int], max_num_seqs: int | None) -> tuple[DegreeLimits, ...]:
    """Return maximum tokens and running requests of an instance, for each degree at which the model fits.

    In Shift Parallelism, each device stores all weights. At a degree above 1, it also stores its tensor-parallel shard.
    Raises `DoesNotFitError` if the model fits at no degree.
    """
    weights = memory.model.weight_bytes

    def capacity(degree: int) -> int:
        return memory.tokens_beside(weights * (1 + (1 / degree if degree > 1 else 0)), degree)

    return memory.limits(degrees, max_num_seqs, capacity)
