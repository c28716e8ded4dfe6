"""Cost models: seconds of a step from its sequences, prompt chunks and degree."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from serving.simulator.device_spec import DeviceSpec
from serving.simulator.model_shape import Matrix, ModelShape
from serving.simulator.operator_profile import OperatorProfile

PROMPT_ATTENTION_SHARE = 0.6
"""Operations per second of prompt attention, relative to matrix products. Fused kernels of causal attention reach 50%
to 75% of the peak on A100 and H100 (benchmarks of FlashAttention-2 and -3)."""


class StepShape(NamedTuple):
    """Contents of a step of one instance, without padding."""

    decodes: int
    """Number of decoding sequences."""
    prompts: int = 0
    """Number of prompt chunks."""
    prompt_tokens: int = 0
    """Total tokens of the chunks."""
    longest_chunk: int = 0
    """Tokens of the longest chunk."""


class StepCost(Protocol):
    """Cost model of the steps of an instance.

    The time of a step is a sum of three times: `fixed_s`; `context_s` for each token of the decoding sequences; and
    `pair_s` for each pair. A pair is a prompt token of the step and a token that this prompt token attends to.
    """

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """Return the seconds of a step of this shape, without attention."""
        ...

    def context_s(self, degree: int) -> float:
        """Return the seconds of decode attention for each token in the contexts of the decoding sequences."""
        ...

    def pair_s(self, degree: int) -> float:
        """Return the seconds of prompt attention for each pair."""
        ...


def prompt_pairs(start: int, length: int) -> float:
    """Return the number of pairs (see `StepCost`) for a chunk of `length` tokens after `start` computed tokens."""
    return length * start + length * (length + 1) / 2


@dataclass(frozen=True)
class ModelStepCost:
    """Cost of a step as the sum of its operators, for a model on a device.

    If `profile` has a matrix, it gives the time of the matrix product. If not, `roofline_s` gives the time. Tokens are
    spread evenly over experts.
    """

    model: ModelShape
    device: DeviceSpec
    profile: OperatorProfile | None = None
    overhead_s: float | None = None
    """Seconds of host work in a step. None: `DeviceSpec.step_overhead_s`."""

    def product_s(self, matrix: Matrix, degree: int, tokens: float) -> float:
        """Return the seconds of one rank's part of a matrix product with `tokens` rows."""
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
        """See `StepCost.context_s`: a step reads the keys and values of each token once."""
        rate = self.device.memory_bandwidth * self.device.attention_efficiency
        return self.model.kv_token_bytes(degree) / rate

    def pair_s(self, degree: int) -> float:
        """See `StepCost.pair_s`: each query head computes two products of `head_dim` elements."""
        model, device = self.model, self.device
        operations = 4 * model.num_layers * model.num_heads * model.head_dim / degree
        return operations / (device.flops * device.flops_efficiency * PROMPT_ATTENTION_SHARE)


def roofline_s(
    device: DeviceSpec, inputs: int, outputs: int, tokens: float, item_bytes: int, copies: float = 1.0
) -> float:
    """Return the seconds of a matrix product with `tokens` rows: launch time plus the longer of compute and read time.

    `copies`: number of matrices (active experts) over which the rows are spread. Each matrix is read once.
    """
    compute_s = 2 * tokens * inputs * outputs / (device.flops * device.flops_efficiency)
    read = (copies * inputs * outputs + tokens * (inputs + outputs)) * item_bytes
    return device.launch_s + max(compute_s, read / (device.memory_bandwidth * device.memory_efficiency))


@dataclass(frozen=True)
class TableStepCost:
    """Measured cost of steps.

    A step costs as much as the smallest measured shape that it fits into, because the engine pads steps to compiled
    shapes. Above the largest measured shape, the cost grows in proportion.
    """

    decode_s: dict[int, dict[int, float]]
    """Seconds of a decode step, by degree and number of rows."""
    prompt_s: dict[int, dict[int, float]]
    """Seconds of a step with one chunk and `few_rows` rows, by degree and tokens of the chunk."""
    prompts_s: dict[int, dict[int, float]] = field(default_factory=dict)
    """Seconds of a step with several chunks and the maximum number of rows, by degree and tokens of each chunk."""
    few_rows: int = 1
    """Rows of the smaller compiled shape for a step with one chunk."""
    context: dict[int, float] = field(default_factory=dict)
    """Value of `StepCost.context_s` by degree; 0 for a missing degree."""
    pair: dict[int, float] = field(default_factory=dict)
    """Value of `StepCost.pair_s` by degree; 0 for a missing degree. Empty if `prompt_s` includes prompt attention."""

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """See `StepCost.fixed_s`. If a step with one chunk has more than `few_rows` sequences, the additional time for
        the maximum number of rows is added."""
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
    """Return the value of the smallest key that is at least `wanted`.

    If all keys are smaller, scale the value of the largest key in proportion.
    """
    larger = [key for key in table if key >= wanted]
    if larger:
        return table[min(larger)]
    largest = max(table)
    return table[largest] * wanted / largest


@dataclass(frozen=True)
class RateStepCost:
    """Cost of steps from given rates, in tokens per second by degree.

    The time of a step is the time of its prompts plus the time of its decodes. The length of contexts has no effect.
    """

    prefill: dict[int, float]
    """Prompt tokens per second of an instance."""
    decode: dict[int, float]
    """Maximum tokens per second that all requests of an instance generate together."""
    decode_each: dict[int, float]
    """Maximum tokens per second that one request generates."""

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """See `StepCost.fixed_s`."""
        decode_s = max(1 / self.decode_each[degree], shape.decodes / self.decode[degree]) if shape.decodes else 0.0
        return decode_s + shape.prompt_tokens / self.prefill[degree]

    def context_s(self, degree: int) -> float:
        return 0.0

    def pair_s(self, degree: int) -> float:
        return 0.0
