"""Mechanisms of other systems, each as its own paper describes it."""

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
    """Seesaw (arXiv 2503.06433): the model is re-sharded from host memory, where the KV cache waits meanwhile. No step
    runs: pages go out and come back, and weights are loaded, at the rate of each device's host link."""

    model: ModelShape
    device: DeviceSpec

    @property
    def layers(self) -> int:
        return self.model.num_layers

    def change(self, from_degree: int, to_degree: int, tokens: int, kept: bool = False) -> Change:
        """See `TransformationCost.change`. Devices transfer side by side."""
        devices = max(from_degree, to_degree)
        kv_device = self.model.kv_token_bytes() * tokens / devices
        weights_device = self.model.other_bytes / to_degree + self.model.ffn_bytes / to_degree
        pause_s = (2 * kv_device + weights_device) / self.device.host_bandwidth
        return Change(0.0, pause_s, 2 * kv_device * devices, weights_device * devices)


@dataclass(frozen=True)
class LayerExchangeCost:
    """KunServe's changes (its 4.2 and 4.4): devices that drop layers exchange the keys and values of the others'
    layers, and take the parameters back from each other afterwards. Requests whose pages move wait for it; dropping
    takes no time."""

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
    """KunServe (arXiv 2412.18169): devices that dropped parameters form a pipeline of whole layers. A step has as many
    micro-batches as stages, so that all stages are busy; each token passes all stages."""

    base: ModelStepCost

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """See `StepCost.fixed_s`: a micro-batch through all stages, and a transfer between two of them."""
        if degree == 1:
            return self.base.fixed_s(1, shape)
        part = _part(shape, degree)
        hop_bytes = max(part.decodes + part.prompt_tokens, 1) * self.base.model.hidden_size * self.base.model.item_bytes
        device = self.base.device
        hop_s = device.launch_s + hop_bytes / (device.link_bandwidth * device.link_efficiency)
        return self.base.fixed_s(1, part) + degree * hop_s

    def context_s(self, degree: int) -> float:
        """Each stage reads its layers' part of the cache, of one micro-batch."""
        return self.base.context_s(1) / degree

    def pair_s(self, degree: int) -> float:
        return self.base.pair_s(1) / degree


@dataclass(frozen=True)
class SequenceParallelCost:
    """LoongServe (arXiv 2404.09526): devices keep whole models and share sequences. Prompts are striped over devices;
    in decodes each device is master of a part of the batch, and attention runs where keys and values lie. What shares
    sequences may itself be several devices at tensor parallelism."""

    base: ModelStepCost
    tensor_degree: int = 1
    """Devices of each part: a step's degree counts parts."""
    masters: int | None = None
    """Parts that compute a decode step's other layers. None: all."""

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """See `StepCost.fixed_s`: a part of the tokens on each device. In each layer prompts send keys and values
        round the ring, and decodes send queries out and partial results back."""
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
    """Sequence parallelism of Ulysses, as Shift Parallelism (arXiv 2509.16495) serves with it: each device computes a
    part of the tokens with all weights; two all-to-alls a layer change between parts of tokens and parts of heads."""

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
    """Shift Parallelism: each step runs at tensor or sequence parallelism, whichever is faster for its size. Both have
    the same layout of the cache, so that nothing moves."""

    base: ModelStepCost

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """See `StepCost.fixed_s`."""
        return min(self.base.fixed_s(degree, shape), UlyssesCost(self.base).fixed_s(degree, shape))

    def context_s(self, degree: int) -> float:
        return self.base.context_s(degree)

    def pair_s(self, degree: int) -> float:
        return self.base.pair_s(degree)


def _part(shape: StepShape, degree: int) -> StepShape:
    """One device's part of a step's tokens."""
    return StepShape(
        -(-shape.decodes // degree), shape.prompts, -(-shape.prompt_tokens // degree), -(-shape.longest_chunk // degree)
    )


def drop_limits(memory: MemoryPlan, degrees: Sequence[int], max_num_seqs: int) -> tuple[DegreeLimits, ...]:
    """Sizes of pipelines: each stage keeps a part of all layers' parameters, and their part of the cache."""
    model, found = memory.model, []
    budget = memory.device.memory_bytes * memory.utilization - memory.activations
    for degree in degrees:
        free = budget - model.weight_bytes / degree
        tokens = int(free * degree / model.kv_token_bytes()) // memory.page_size * memory.page_size
        if tokens >= memory.page_size:
            found.append(DegreeLimits(degree, tokens, max_num_seqs * degree))
    return tuple(found) or memory.limits(degrees, max_num_seqs)


def sequence_limits(memory: MemoryPlan, degrees: Sequence[int], max_num_seqs: int) -> tuple[DegreeLimits, ...]:
    """Sizes of sequence parallelism: each device keeps all weights, so that `p` of them hold `p` times as much."""
    one = memory.limits((1,), max_num_seqs)[0].capacity_tokens
    return tuple(DegreeLimits(degree, one * degree, max_num_seqs * degree) for degree in degrees)


def shift_limits(memory: MemoryPlan, degrees: Sequence[int], max_num_seqs: int) -> tuple[DegreeLimits, ...]:
    """Sizes of Shift Parallelism: each device keeps all weights for sequence parallelism, and its shard for tensor
    parallelism."""
    model, found = memory.model, []
    budget = memory.device.memory_bytes * memory.utilization - memory.activations
    for degree in degrees:
        free = budget - model.weight_bytes * (1 + (1 / degree if degree > 1 else 0))
        tokens = int(free * degree / model.kv_token_bytes()) // memory.page_size * memory.page_size
        if tokens >= memory.page_size:
            found.append(DegreeLimits(degree, tokens, max_num_seqs * degree))
    return tuple(found) or memory.limits(degrees, max_num_seqs)
