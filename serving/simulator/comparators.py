"""Cost models of other systems, as their papers describe them."""

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
    """Changes of Seesaw (arXiv 2503.06433): weights are loaded from host memory, and the KV cache goes there and back.

    No step runs meanwhile. Each device transfers at the rate of its host link.
    """

    model: ModelShape
    device: DeviceSpec

    @property
    def layers(self) -> int:
        return self.model.num_layers

    def change(self, from_degree: int, to_degree: int, tokens: int, kept: bool = False) -> Change:
        """See `TransformationCost.change`. All devices transfer at the same time."""
        devices = max(from_degree, to_degree)
        kv_device = self.model.kv_token_bytes() * tokens / devices
        weights_device = self.model.other_bytes / to_degree + self.model.ffn_bytes / to_degree
        pause_s = (2 * kv_device + weights_device) / self.device.host_bandwidth
        return Change(0.0, pause_s, 2 * kv_device * devices, weights_device * devices)


@dataclass(frozen=True)
class LayerExchangeCost:
    """Changes of KunServe (sections 4.2 and 4.4).

    Devices drop parameters of layers at no cost, and exchange the keys and values of these layers. Later they copy the
    parameters back from each other. Requests wait while their pages move.
    """

    model: ModelShape
    device: DeviceSpec

    @property
    def layers(self) -> int:
        return self.model.num_layers

    def change(self, from_degree: int, to_degree: int, tokens: int, kept: bool = False) -> Change:
        """See `TransformationCost.change`."""
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
    """Steps of KunServe (arXiv 2412.18169): devices that dropped parameters form a pipeline of whole layers.

    A step has one micro-batch for each stage, so that all stages are busy. Each token passes all stages.
    """

    base: ModelStepCost

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """See `StepCost.fixed_s`: one micro-batch through all stages, and the transfers between stages."""
        if degree == 1:
            return self.base.fixed_s(1, shape)
        part = _part(shape, degree)
        hop_bytes = max(part.decodes + part.prompt_tokens, 1) * self.base.model.hidden_size * self.base.model.item_bytes
        device = self.base.device
        hop_s = device.launch_s + hop_bytes / (device.link_bandwidth * device.link_efficiency)
        return self.base.fixed_s(1, part) + degree * hop_s

    def context_s(self, degree: int) -> float:
        """See `StepCost.context_s`. Each stage reads the cache of its layers, for one micro-batch."""
        return self.base.context_s(1) / degree

    def pair_s(self, degree: int) -> float:
        return self.base.pair_s(1) / degree


@dataclass(frozen=True)
class SequenceParallelCost:
    """Steps of LoongServe (arXiv 2404.09526): parts with whole models share sequences.

    Prompts are striped over the parts. In decodes each part is the master of some sequences, and attention runs on the
    part that stores the keys and values. A part may have several devices with tensor parallelism.
    """

    base: ModelStepCost
    tensor_degree: int = 1
    """Devices of each part. The degree of a step counts parts."""
    masters: int | None = None
    """Parts that compute everything but attention in decodes. None: all."""

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """See `StepCost.fixed_s`: each part computes some of the tokens.

        In each layer, prompts send keys and values around the ring; decodes send queries and receive partial results.
        """
        tensor = self.tensor_degree
        if degree == 1:
            return self.base.fixed_s(tensor, shape)
        model, device = self.base.model, self.base.device
        part = _part(shape, degree)._replace(decodes=-(-shape.decodes // (self.masters or degree)))
        rate = device.link_bandwidth * device.link_efficiency * tensor
        latency_s = device.all_reduce_s(0.0, degree)
        ring_bytes = part.prompt_tokens * (degree - 1) * 2 * model.num_kv_heads * model.head_dim * model.item_bytes
        query_bytes = 2 * part.decodes * (degree - 1) * model.num_heads * model.head_dim * model.item_bytes
        layer_s = latency_s + (ring_bytes + query_bytes) / rate
        return self.base.fixed_s(tensor, part) + model.num_layers * layer_s

    def context_s(self, degree: int) -> float:
        return self.base.context_s(self.tensor_degree) / degree

    def pair_s(self, degree: int) -> float:
        return self.base.pair_s(self.tensor_degree) / degree


@dataclass(frozen=True)
class UlyssesCost:
    """Steps with Ulysses' sequence parallelism, as in Shift Parallelism (arXiv 2509.16495).

    Each device computes some of the tokens with all weights. Two all-to-alls in each layer exchange tokens for heads.
    """

    base: ModelStepCost

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """See `StepCost.fixed_s`."""
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
    """Steps of Shift Parallelism: each step uses the faster one of tensor and sequence parallelism.

    Both have the same layout of the cache, so no page moves between steps.
    """

    base: ModelStepCost

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """See `StepCost.fixed_s`."""
        return min(self.base.fixed_s(degree, shape), UlyssesCost(self.base).fixed_s(degree, shape))

    def context_s(self, degree: int) -> float:
        return self.base.context_s(degree)

    def pair_s(self, degree: int) -> float:
        return self.base.pair_s(degree)


def _part(shape: StepShape, degree: int) -> StepShape:
    """Return the share of one device in a step."""
    return StepShape(
        -(-shape.decodes // degree), shape.prompts, -(-shape.prompt_tokens // degree), -(-shape.longest_chunk // degree)
    )


def drop_limits(memory: MemoryPlan, degrees: Sequence[int], max_num_seqs: int) -> tuple[DegreeLimits, ...]:
    """Return the limits of pipelines, in which each stage keeps the parameters and the cache of some layers."""
    model, found = memory.model, []
    budget = memory.device.memory_bytes * memory.utilization - memory.activations
    for degree in degrees:
        free = budget - model.weight_bytes / degree
        tokens = int(free * degree / model.kv_token_bytes()) // memory.page_size * memory.page_size
        if tokens >= memory.page_size:
            found.append(DegreeLimits(degree, tokens, max_num_seqs * degree))
    return tuple(found) or memory.limits(degrees, max_num_seqs)


def sequence_limits(memory: MemoryPlan, degrees: Sequence[int], max_num_seqs: int) -> tuple[DegreeLimits, ...]:
    """Return the limits of sequence parallelism, in which each device keeps all weights."""
    one = memory.limits((1,), max_num_seqs)[0].capacity_tokens
    return tuple(DegreeLimits(degree, one * degree, max_num_seqs * degree) for degree in degrees)


def shift_limits(memory: MemoryPlan, degrees: Sequence[int], max_num_seqs: int) -> tuple[DegreeLimits, ...]:
    """Return the limits of Shift Parallelism, in which each device keeps all weights and a shard of them."""
    model, found = memory.model, []
    budget = memory.device.memory_bytes * memory.utilization - memory.activations
    for degree in degrees:
        free = budget - model.weight_bytes * (1 + (1 / degree if degree > 1 else 0))
        tokens = int(free * degree / model.kv_token_bytes()) // memory.page_size * memory.page_size
        if tokens >= memory.page_size:
            found.append(DegreeLimits(degree, tokens, max_num_seqs * degree))
    return tuple(found) or memory.limits(degrees, max_num_seqs)
