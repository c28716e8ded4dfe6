"""Time of the steps of an instance, from a cost model and the slowdown by other busy instances."""

from collections.abc import Mapping

from serving.simulator.batching import Batching
from serving.simulator.model_shape import Window
from serving.simulator.step_cost import StepCost, StepShape, prompt_pairs


class Pricing:
    """Time of steps on a host: cached results of a cost model (`StepCost`), and the slowdown by other busy instances.

    All times in seconds are without this slowdown. The caller multiplies the time of a step by `slowdown`.
    """

    def __init__(
        self,
        cost: StepCost,
        batching: Batching,
        crowding: Mapping[int, float] | None = None,
        latency_s: float = 0.0,
        prompt_crowding: Mapping[int, float] | None = None,
        window: Window | None = None,
    ):
        self.cost, self.batching = cost, batching
        self.crowding = dict(crowding or {})
        """Time of a step by number of busy instances, relative to one busy instance. Empty: no slowdown."""
        self.prompt_crowding = dict(prompt_crowding or self.crowding)
        """Like `crowding`, for a step with a prompt while the other busy instances decode. Default: `crowding`."""
        self.latency_s = latency_s
        """Seconds from the end of a step until the client sees its tokens."""
        self.window = window
        """Sliding windows of the model. None: the model has none."""
        self._fixed: dict[tuple[int, StepShape], float] = {}
        self._context: dict[int, float] = {}
        self._pair: dict[int, float] = {}

    def slowdown(self, busy: int, prompts: bool = False) -> float:
        """Return the factor by which a step takes longer if `busy` instances run steps at the same time.

        If this factor was not measured for `busy` instances, return the factor for the next smaller measured number.
        If there is no smaller measured number, return 1.

        Args:
            busy: number of instances that run steps, including the instance of this step.
            prompts: whether the step has prompts.
        """
        table = self.prompt_crowding if prompts else self.crowding
        measured = [count for count in table if count <= busy]
        return table[max(measured)] if measured else 1.0

    def fixed_s(self, degree: int, shape: StepShape) -> float:
        """Return the seconds of a step with the contents `shape`, without the attention operator."""
        key = (degree, shape)
        if (seconds := self._fixed.get(key)) is None:
            seconds = self._fixed[key] = self.cost.fixed_s(degree, shape)
        return seconds

    def attention_s(self, degree: int, sequences: float, context: float) -> float:
        """Return the seconds that a step spends in the attention operator for its decoding sequences.

        Args:
            degree: tensor-parallel degree of the instance.
            sequences: number of decoding sequences.
            context: total number of cached tokens of these sequences. With sliding windows, the sequences are assumed
                to be equally long.
        """
        if (window := self.window) is None:
            return self.context_s(degree) * context
        seen = min(context, window.tokens * sequences)
        return self.context_s(degree) * ((1 - window.share) * context + window.share * seen)

    def attention_slope_s(self, degree: int, sequences: float, context: float) -> float:
        """Return the seconds by which `attention_s` grows if each sequence grows by one token."""
        window, share = self.window, 1.0
        if window is not None and context >= window.tokens * sequences:
            share -= window.share
        return self.context_s(degree) * share * sequences

    def pairs(self, start: int, length: int) -> float:
        """Return the number of attention pairs of a prompt chunk. If layers differ, it is the mean over the layers.

        A pair is a token of the chunk and a token that this token attends to. The chunk has `length` tokens, and
        `start` tokens of the prompt were computed before.
        """
        full = prompt_pairs(start, length)
        if (window := self.window) is None:
            return full
        return (1 - window.share) * full + window.share * prompt_pairs(start, length, window.tokens)

    def context_s(self, degree: int) -> float:
        """Return the seconds of decode attention for one cached token of a decoding sequence."""
        if (seconds := self._context.get(degree)) is None:
            seconds = self._context[degree] = self.cost.context_s(degree)
        return seconds

    def pair_s(self, degree: int) -> float:
        """Return the seconds of prompt attention for one pair of a prompt token and a token that it attends to."""
        if (seconds := self._pair.get(degree)) is None:
            seconds = self._pair[degree] = self.cost.pair_s(degree)
        return seconds
