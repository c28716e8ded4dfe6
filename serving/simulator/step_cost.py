"""How long a step takes: linear operators, attention, collectives and the host."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from serving.simulator.device_spec import DeviceSpec
from serving.simulator.model_shape import Matrix, ModelShape
from serving.simulator.operator_profile import OperatorProfile

PROMPT_ATTENTION_SHARE = 0.6
"""Rate of a prompt's attention as a share of what matrix products reach: fused attention kernels reach 50% to 75% of
the peak on A100 and H100 (FlashAttention-2 and -3, their benchmarks of causal attention)."""


class StepShape(NamedTuple):
    """What a step computes, without padding."""

    decodes: int
    """Sequences that get one token each."""
    prompts: int = 0
    """Chunks of prompts."""
    prompt_tokens: int = 0
    """Tokens of these chunks together."""
    longest_chunk: int = 0


class StepCost(Protocol):
    """Seconds of a step of an instance: `fixed_s` plus the context's share, which is linear in both counts.

    A cost is asked for the same shapes again and again: simulations keep what `fixed_s` returned.
    """

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """All but attention over the context."""
        ...

    def context_s(self, degree: int) -> float:
        """Seconds for each token of context that a decoding sequence has."""
        ...

    def pair_s(self, degree: int) -> float:
        """Seconds for each pair of a prompt token and a token that it attends to."""
        ...


def prompt_pairs(start: int, length: int) -> float:
    """Pairs of tokens for a chunk of `length` tokens after `start` that were computed before."""
    return length * start + length * (length + 1) / 2


@dataclass(frozen=True)
class ModelStepCost:
    """The cost of a model's steps on a device, operator by operator.

    Matrix products are interpolated where `profile` has measured them, and follow the device's roofline otherwise.
    Experts: each runs the tokens routed to it, spread evenly; all that get any are read.
    """

    model: ModelShape
    device: DeviceSpec
    profile: OperatorProfile | None = None
    overhead_s: float | None = None
    """Host work of a step, in seconds. None: the device file's."""

    def product_s(self, matrix: Matrix, degree: int, tokens: float) -> float:
        """One product of `tokens` rows with one rank's part of a matrix."""
        inputs, outputs = matrix.at(degree)
        if self.profile is not None and float(tokens).is_integer():
            measured = self.profile.seconds(inputs, outputs, int(tokens))
            if measured is not None:
                return measured
        return roofline_s(self.device, inputs, outputs, tokens, self.model.item_bytes)

    def layer_s(self, degree: int, tokens: int) -> float:
        """Matrix products, norms and all-reduces of one layer."""
        model, device = self.model, self.device
        seconds = sum(self.product_s(matrix, degree, tokens) for matrix in model.attention_matrices)
        if model.num_experts == 1:
            seconds += sum(self.product_s(matrix, degree, tokens) for matrix in model.ffn_matrices)
        else:
            seconds += self._experts_s(degree, tokens)
        hidden_bytes = tokens * model.hidden_size * model.item_bytes
        # Two norms, the activation, rotary positions and two sums: read and written once each.
        seconds += 6 * (device.launch_s + 2 * hidden_bytes / (device.memory_bandwidth * device.memory_efficiency))
        return seconds + 2 * device.all_reduce_s(hidden_bytes, degree)

    def _experts_s(self, degree: int, tokens: int) -> float:
        model = self.model
        routed = tokens * model.experts_per_token
        active = model.num_experts * (1 - (1 - 1 / model.num_experts) ** routed)
        seconds = 0.0
        for matrix in model.ffn_matrices:
            inputs, outputs = matrix.at(degree)
            seconds += roofline_s(self.device, inputs, outputs, routed, model.item_bytes, copies=active)
        return seconds

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """See `StepCost.fixed_s`."""
        tokens = shape.decodes + shape.prompt_tokens
        overhead = self.device.step_overhead_s if self.overhead_s is None else self.overhead_s
        rows = max(shape.decodes + shape.prompts, 1)
        head = self.product_s(self.model.head_matrix, degree, rows)
        return self.model.num_layers * self.layer_s(degree, max(tokens, 1)) + head + overhead

    def context_s(self, degree: int) -> float:
        """See `StepCost.context_s`: the bytes of the token's keys and values, read once."""
        rate = self.device.memory_bandwidth * self.device.attention_efficiency
        return self.model.kv_token_bytes(degree) / rate

    def pair_s(self, degree: int) -> float:
        """See `StepCost.pair_s`: two products of `head_dim` elements for each query head."""
        model, device = self.model, self.device
        operations = 4 * model.num_layers * model.num_heads * model.head_dim / degree
        return operations / (device.flops * device.flops_efficiency * PROMPT_ATTENTION_SHARE)


def roofline_s(
    device: DeviceSpec, inputs: int, outputs: int, tokens: float, item_bytes: int, copies: float = 1.0
) -> float:
    """Seconds of a product of `tokens` rows: a launch, and the longer of computing and reading. `copies` matrices are
    read, over which the rows are spread."""
    compute_s = 2 * tokens * inputs * outputs / (device.flops * device.flops_efficiency)
    read = (copies * inputs * outputs + tokens * (inputs + outputs)) * item_bytes
    return device.launch_s + max(compute_s, read / (device.memory_bandwidth * device.memory_efficiency))


@dataclass(frozen=True)
class TableStepCost:
    """The cost of steps that were measured: seconds by degree, rows that decode and prompt tokens.

    A step costs as much as the smallest measured shape that holds it, as an engine that pads to compiled shapes has it;
    beyond the largest it goes on in proportion.
    """

    decode_s: dict[int, dict[int, float]]
    """Degree -> rows -> seconds of a step that only decodes."""
    prompt_s: dict[int, dict[int, float]]
    """Degree -> tokens of one chunk -> seconds of a step with that chunk and `few_rows` rows."""
    prompts_s: dict[int, dict[int, float]] = field(default_factory=dict)
    """Degree -> tokens of each of several chunks -> seconds of a step with them and all rows."""
    few_rows: int = 1
    context: dict[int, float] = field(default_factory=dict)
    """Degree -> seconds per token of context."""
    pair: dict[int, float] = field(default_factory=dict)
    """Degree -> seconds per pair; 0 where `prompt_s` has it."""

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """See `StepCost.fixed_s`. A step with one chunk has few rows for decodes, or all."""
        if not shape.prompts:
            return at_least(self.decode_s[degree], shape.decodes)
        several = self.prompts_s.get(degree, {})
        if shape.prompts > 1 and several:
            return at_least(several, shape.longest_chunk)
        seconds = at_least(self.prompt_s[degree], shape.longest_chunk) * shape.prompts
        if shape.decodes + shape.prompts > self.few_rows:
            rows = self.decode_s[degree]
            seconds += max(rows[max(rows)] - at_least(rows, self.few_rows), 0.0)
        return seconds

    def context_s(self, degree: int) -> float:
        return self.context.get(degree, 0.0)

    def pair_s(self, degree: int) -> float:
        return self.pair.get(degree, 0.0)


def at_least(table: dict[int, float], wanted: int) -> float:
    """The value at the smallest key that is at least `wanted`; beyond the largest key in proportion to it."""
    larger = [key for key in table if key >= wanted]
    if larger:
        return table[min(larger)]
    largest = max(table)
    return table[largest] * wanted / largest


@dataclass(frozen=True)
class RateStepCost:
    """The cost of instances that are known by their rates alone, in tokens per second by degree."""

    prefill: dict[int, float]
    """Prompt tokens per second of a step's chunk."""
    decode: dict[int, float]
    """Generated tokens per second of all requests of an instance together, at most."""
    decode_each: dict[int, float]
    """Generated tokens per second of one request, at most."""

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """See `StepCost.fixed_s`."""
        decode_s = max(1 / self.decode_each[degree], shape.decodes / self.decode[degree]) if shape.decodes else 0.0
        return decode_s + shape.prompt_tokens / self.prefill[degree]

    def context_s(self, degree: int) -> float:
        return 0.0

    def pair_s(self, degree: int) -> float:
        return 0.0
