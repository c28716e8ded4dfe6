"""Cost of a step: linear operators, attention, collectives and host work."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from serving.simulator.device_spec import DeviceSpec
from serving.simulator.model_shape import Matrix, ModelShape
from serving.simulator.operator_profile import OperatorProfile

PROMPT_ATTENTION_SHARE = 0.6
"""Rate of prompt attention, relative to the rate of matrix products. Fused kernels of causal attention reach 50% to 75%
of the peak on A100 and H100 (benchmarks of FlashAttention-2 and -3)."""


class StepShape(NamedTuple):
    """Work of a step, without padding."""

    decodes: int
    """Number of decoding sequences."""
    prompts: int = 0
    """Number of prompt chunks."""
    prompt_tokens: int = 0
    """Tokens of all chunks."""
    longest_chunk: int = 0


class StepCost(Protocol):
    """Cost model of the steps of an instance.

    The seconds of a step are `fixed_s`, plus `context_s` for each token of context, plus `pair_s` for each pair.
    """

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """Return the seconds of a step without attention over the context."""
        ...

    def context_s(self, degree: int) -> float:
        """Return the seconds for each token of context of a decoding sequence."""
        ...

    def pair_s(self, degree: int) -> float:
        """Return the seconds for each pair of a prompt token and a token that it attends to."""
        ...


def prompt_pairs(start: int, length: int) -> float:
    """Return the number of attention pairs of a chunk of `length` tokens after `start` computed tokens."""
    return length * start + length * (length + 1) / 2


@dataclass(frozen=True)
class ModelStepCost:
    """Cost of the steps of a model on a device, operator by operator.

    A matrix product is interpolated if `profile` has its matrix, else it takes the time of the roofline. Tokens are
    spread evenly over experts, and the weights of each expert with tokens are read.
    """

    model: ModelShape
    device: DeviceSpec
    profile: OperatorProfile | None = None
    overhead_s: float | None = None
    """Seconds of host work in a step. None: the value of the device."""

    def product_s(self, matrix: Matrix, degree: int, tokens: float) -> float:
        """Return the seconds of the product of `tokens` rows and the part of a matrix on one rank."""
        inputs, outputs = matrix.at(degree)
        if self.profile is not None and float(tokens).is_integer():
            measured = self.profile.seconds(inputs, outputs, int(tokens))
            if measured is not None:
                return measured
        return roofline_s(self.device, inputs, outputs, tokens, self.model.item_bytes)

    def layer_s(self, degree: int, tokens: int) -> float:
        """Return the seconds of matrix products, norms and all-reduces of one layer."""
        model, device = self.model, self.device
        seconds = sum(self.product_s(matrix, degree, tokens) for matrix in model.attention_matrices)
        if model.num_experts == 1:
            seconds += sum(self.product_s(matrix, degree, tokens) for matrix in model.ffn_matrices)
        else:
            seconds += self._experts_s(degree, tokens)
        hidden_bytes = tokens * model.hidden_size * model.item_bytes
        # Two norms, the activation, rotary positions and two sums; each reads and writes the hidden states once.
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
        """See `StepCost.context_s`: the keys and values of the token are read once."""
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
    """Return the seconds of a product of `tokens` rows: a launch, and the longer one of computing and reading.

    The rows are spread over `copies` matrices, which are all read.
    """
    compute_s = 2 * tokens * inputs * outputs / (device.flops * device.flops_efficiency)
    read = (copies * inputs * outputs + tokens * (inputs + outputs)) * item_bytes
    return device.launch_s + max(compute_s, read / (device.memory_bandwidth * device.memory_efficiency))


@dataclass(frozen=True)
class TableStepCost:
    """Measured cost of steps by degree, decoding rows and prompt tokens.

    A step costs as much as the smallest measured shape that holds it, because the engine pads to compiled shapes. Above
    the largest shape, the cost is proportional.
    """

    decode_s: dict[int, dict[int, float]]
    """Degree -> rows -> seconds of a decode step."""
    prompt_s: dict[int, dict[int, float]]
    """Degree -> tokens of one chunk -> seconds of a step with that chunk and `few_rows` rows."""
    prompts_s: dict[int, dict[int, float]] = field(default_factory=dict)
    """Degree -> tokens of each chunk -> seconds of a step with several chunks and all rows."""
    few_rows: int = 1
    context: dict[int, float] = field(default_factory=dict)
    """Degree -> seconds per token of context."""
    pair: dict[int, float] = field(default_factory=dict)
    """Degree -> seconds per pair; 0 if `prompt_s` includes them."""

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """See `StepCost.fixed_s`. A step with one chunk computes `few_rows` rows, or all rows."""
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
    """Return the value of the smallest key that is at least `wanted`; above the largest key it is proportional."""
    larger = [key for key in table if key >= wanted]
    if larger:
        return table[min(larger)]
    largest = max(table)
    return table[largest] * wanted / largest


@dataclass(frozen=True)
class RateStepCost:
    """Cost of steps from rates in tokens per second by degree."""

    prefill: dict[int, float]
    """Prompt tokens per second of a step's chunk."""
    decode: dict[int, float]
    """Maximum generated tokens per second of an instance."""
    decode_each: dict[int, float]
    """Maximum generated tokens per second of one request."""

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """See `StepCost.fixed_s`."""
        decode_s = max(1 / self.decode_each[degree], shape.decodes / self.decode[degree]) if shape.decodes else 0.0
        return decode_s + shape.prompt_tokens / self.prefill[degree]

    def context_s(self, degree: int) -> float:
        return 0.0

    def pair_s(self, degree: int) -> float:
        return 0.0
