"""Cost models of steps: how many seconds a step takes, by its sequences, prompt chunks and tensor-parallel degree."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from serving.simulator.device_spec import DeviceSpec
from serving.simulator.model_shape import Matrix, ModelShape
from serving.simulator.operator_profile import OperatorProfile

PROMPT_ATTENTION_SHARE = 0.53
"""Operations per second of prompt attention, relative to matrix products. Measured on an H100: 362 TFLOP/s
(docs/kernels.md)."""
PROMPT_EXTRA_KEYS = 875
"""Extra keys that each prompt token attends to in each layer: an estimate of the time in which tiles of queries start
and end. Measured on an H100: 176 us for 2,048 tokens without a context (docs/kernels.md)."""


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

    The time of a step is `fixed_s + context_s * tokens + pair_s * pairs`. Here, `tokens` is the number of cached tokens
    of all decoding sequences, and `pairs` is the number of attention pairs of all prompt chunks. A pair is a token of a
    chunk and a token that this token attends to.
    """

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """Return the seconds of a step with the contents `shape`, without the attention operator.

        The projections before and after this operator are included.
        """
        ...

    def context_s(self, degree: int) -> float:
        """Return the seconds of decode attention for one cached token of a decoding sequence."""
        ...

    def pair_s(self, degree: int) -> float:
        """Return the seconds of prompt attention for one pair of a prompt token and a token that it attends to."""
        ...


def prompt_pairs(start: int, length: int, window: int | None = None) -> float:
    """Return the number of attention pairs for a chunk of `length` prompt tokens after `start` computed tokens.

    A pair is a token of the chunk and a token that this token attends to. `window` is the maximum number of tokens that
    a token attends to. Without a window, a token attends to itself and to all tokens before it.
    """
    full = length * start + length * (length + 1) / 2
    if window is None or start + length <= window:
        return full
    short = min(max(window - start, 0), length)  # Tokens that attend to all tokens before them.
    return short * start + short * (short + 1) / 2 + (length - short) * window


@dataclass(frozen=True)
class ModelStepCost:
    """Cost of a step as the sum of the times of its operators, for a model on a device.

    The host prepares a step while the device computes, and the longer of both times counts. An operator takes
    `DeviceSpec.kernel_s` plus the time of its work. For matrix products, the time of the work was measured (`profile`),
    or is computed by `roofline_s`. Tokens are spread evenly over experts. Quantized weights are read faster, but all
    matrix products run at the rate of bf16.
    """

    model: ModelShape
    device: DeviceSpec
    profile: OperatorProfile | None = None

    def product_s(self, matrix: Matrix, degree: int, tokens: float, weight_bytes: float | None = None) -> float:
        """Return the seconds of one device's part of a matrix product with `tokens` rows.

        `weight_bytes` is the size of one weight in bytes. By default, a weight has the size of an activation.
        """
        (inputs, outputs), device = matrix.at(degree), self.device
        item_bytes = self.model.item_bytes
        plain = weight_bytes is None or weight_bytes == item_bytes
        if self.profile is not None and plain and float(tokens).is_integer():
            measured = self.profile.seconds(inputs, outputs, int(tokens))
            if measured is not None:
                return max(measured - device.launch_s, 0.0) + device.kernel_s
        return device.kernel_s + roofline_s(device, inputs, outputs, tokens, item_bytes, weight_bytes)

    @cached_property
    def _layers_s(self) -> dict[tuple[int, int], float]:
        """Cached results of `layer_s`, by degree and tokens."""
        return {}

    def layer_s(self, degree: int, tokens: int) -> float:
        """Return the seconds of a layer without its attention operator: matrix products, norms and all-reduces.

        If layers differ, the result is the mean over all layers.
        """
        if (seconds := self._layers_s.get((degree, tokens))) is None:
            seconds = self._layers_s[degree, tokens] = self._layer_s(degree, tokens)
        return seconds

    def _layer_s(self, degree: int, tokens: int) -> float:
        model, device = self.model, self.device
        attention_bytes, ffn_bytes = model.attention_item_bytes, model.ffn_item_bytes
        seconds = sum(self.product_s(matrix, degree, tokens, attention_bytes) for matrix in model.attention_matrices)
        if model.num_experts == 1:
            seconds += sum(self.product_s(matrix, degree, tokens, ffn_bytes) for matrix in model.ffn_matrices())
        else:
            dense = model.num_dense_layers / model.num_layers
            seconds += (1 - dense) * self._experts_s(degree, tokens)
            if dense:
                matrices = model.ffn_matrices(model.dense_ffn_size)
                seconds += dense * sum(self.product_s(matrix, degree, tokens, ffn_bytes) for matrix in matrices)
        hidden_bytes = tokens * model.hidden_size * model.item_bytes
        # Two norms, the activation, rotary positions and two sums; each reads and writes the hidden states once.
        seconds += 6 * (device.kernel_s + 2 * hidden_bytes / (device.memory_bandwidth * device.memory_efficiency))
        return seconds + device.kernel_s + 2 * device.all_reduce_s(hidden_bytes, degree)

    def _experts_s(self, degree: int, tokens: int) -> float:
        """Return the seconds of an FFN with experts for `tokens` tokens.

        The time includes the router, the experts that the tokens use, and the shared experts.
        """
        model, device = self.model, self.device
        active = model.num_experts * (1 - (1 - model.experts_per_token / model.num_experts) ** tokens)
        seconds = self.product_s(Matrix("router", model.hidden_size, model.num_experts, "none"), degree, tokens)
        for matrix in model.ffn_matrices():
            sizes, routed = matrix.at(degree), tokens * model.experts_per_token
            seconds += device.kernel_s
            seconds += roofline_s(device, *sizes, routed, model.item_bytes, model.ffn_item_bytes, copies=active)
        if model.shared_ffn_size:
            shared = model.ffn_matrices(model.shared_ffn_size)
            seconds += sum(self.product_s(matrix, degree, tokens, model.ffn_item_bytes) for matrix in shared)
        return seconds

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """Return the seconds of a step with the contents `shape`, without the attention operator."""
        model, device = self.model, self.device
        tokens, rows = max(shape.decodes + shape.prompt_tokens, 1), max(shape.decodes + shape.prompts, 1)
        device_s = model.num_layers * self.layer_s(degree, tokens) + self.product_s(model.head_matrix, degree, rows)
        extra_s = shape.prompt_tokens * PROMPT_EXTRA_KEYS * self.pair_s(degree)
        return max(device_s + extra_s, device.host_s) + device.step_overhead_s

    def context_s(self, degree: int) -> float:
        """Return the seconds of decode attention for one cached token of a decoding sequence.

        This is the time to read the keys and values of the token from device memory. With latent attention, the result
        is the longer of two times: the time to read the compressed vector, and the time to compute its products with
        all heads.
        """
        model, device = self.model, self.device
        read_s = model.kv_token_bytes(degree) / (device.memory_bandwidth * device.attention_efficiency)
        if model.latent is None:
            return read_s
        operations = 2 * model.num_layers * model.num_heads * (2 * model.latent.rank + model.latent.rope) / degree
        return max(read_s, operations / (device.flops * device.flops_efficiency * PROMPT_ATTENTION_SHARE))

    def pair_s(self, degree: int) -> float:
        """Return the seconds of prompt attention for one pair of a prompt token and a token that it attends to.

        For a pair, each query head computes one product with a key and one product with a value.
        """
        model, device = self.model, self.device
        operations = model.num_layers * model.pair_operations / degree
        return operations / (device.flops * device.flops_efficiency * PROMPT_ATTENTION_SHARE)


def roofline_s(
    device: DeviceSpec,
    inputs: int,
    outputs: int,
    tokens: float,
    item_bytes: int,
    weight_bytes: float | None = None,
    copies: float = 1.0,
) -> float:
    """Return the seconds of a matrix product with `tokens` rows, without the time of its launch.

    This is the longer of the time to compute and the time to access memory.

    Args:
        item_bytes: bytes of an activation.
        weight_bytes: bytes of a weight. None: `item_bytes`.
        copies: number of matrices (active experts) over which the rows are spread. Each matrix is read once.
    """
    compute_s = 2 * tokens * inputs * outputs / (device.flops * device.flops_efficiency)
    weights = copies * inputs * outputs * (item_bytes if weight_bytes is None else weight_bytes)
    read = weights + tokens * (inputs + outputs) * item_bytes
    return max(compute_s, read / (device.memory_bandwidth * device.memory_efficiency))


@dataclass(frozen=True)
class TableStepCost:
    """Cost of steps from a table of measured steps.

    The engine pads steps to compiled shapes. The cost of a step is therefore the cost of the smallest measured shape
    that holds the step. Above the largest measured shape, the cost grows in proportion to the size of the step.
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
    """Value of `StepCost.context_s` by degree. 0 for a missing degree."""
    pair: dict[int, float] = field(default_factory=dict)
    """Value of `StepCost.pair_s` by degree. 0 for a missing degree. Empty if `prompt_s` includes prompt attention."""

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """Return the seconds of a step with the contents `shape`, without the attention operator.

        Steps with one chunk were measured with `few_rows` rows. A step with more rows takes longer: by the time of a
        decode step with the maximum number of rows, less the time of a decode step with `few_rows` rows.
        """
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
    """Return the value of the smallest key in `table` that is at least `wanted`.

    If all keys are smaller, return the value of the largest key, multiplied by `wanted / key`.
    """
    larger = [key for key in table if key >= wanted]
    if larger:
        return table[min(larger)]
    largest = max(table)
    return table[largest] * wanted / largest


@dataclass(frozen=True)
class RateStepCost:
    """Cost of steps from given rates, in tokens per second at each tensor-parallel degree.

    The time of a step is the time of its prompt tokens plus the time of its decoded tokens. The length of contexts has
    no effect.
    """

    prefill: dict[int, float]
    """Prompt tokens per second of an instance."""
    decode: dict[int, float]
    """Maximum tokens per second that all requests of an instance generate together."""
    decode_each: dict[int, float]
    """Maximum tokens per second that one request generates."""

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """Return the seconds of a step with the contents `shape`. Attention is part of the given rates."""
        decode_s = max(1 / self.decode_each[degree], shape.decodes / self.decode[degree]) if shape.decodes else 0.0
        return decode_s + shape.prompt_tokens / self.prefill[degree]

    def context_s(self, degree: int) -> float:
        return 0.0

    def pair_s(self, degree: int) -> float:
        return 0.0
