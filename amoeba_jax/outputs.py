"""Outputs of requests."""

from dataclasses import KW_ONLY, dataclass, field, fields
from reprlib import Repr
from typing import Any, Literal, cast

FinishReason = Literal["stop", "length", "abort"]


class _Values(Repr):
    """Formatter for short reprs: cuts long values and rounds floats to six digits."""

    def __init__(self) -> None:
        super().__init__()
        self.maxtuple = self.maxdict = 8
        self.maxstring = 200
        # Nested outputs shorten themselves.
        self.maxother = 100_000

    def repr_float(self, value: float, level: int) -> str:
        return f"{value:.6g}"


class _ShortRepr:
    """Base of dataclasses with a short repr for notebooks. The repr cuts long values and omits None."""

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        short = _Values()
        shown = ", ".join(f"{name}={short.repr(value)}" for name, value in values.items() if value is not None)
        return f"{type(self).__name__}({shown})"


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token under the model's logits, before temperature and other sampling settings."""

    logprob: float
    """Natural logarithm of the probability over the whole vocabulary."""
    rank: int
    """Rank among all tokens by probability. The most probable token has rank 1."""
    decoded_token: str | None = None
    """Text of the token, including a leading space; None without a tokenizer."""


@dataclass(frozen=True, repr=False)
class RequestMetrics(_ShortRepr):
    """Times of one request in seconds, defined as in vLLM. A time is None until it is known.

    If a request has several samples, "first token" means the earliest token of any sample, and "last token" means the
    latest token of any sample.
    """

    arrival: float
    """Time when the call began or the server received the message, as a value of `time.monotonic()`."""
    queue_s: float | None = None
    """Time from arrival until the request first started to run."""
    ttft_s: float | None = None
    """Time from arrival to the first token."""
    tpot_s: float | None = None
    """Mean time per output token after the first: `(e2e_s - ttft_s) / (tokens of the longest sample - 1)`.

    None if the output has a single token.
    """
    _: KW_ONLY
    e2e_s: float | None = None
    """Time from arrival to the last token."""
    num_preemptions: int = 0
    """Number of times that the request lost its pages to other requests and was computed again."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""


@dataclass(frozen=True, repr=False)
class CompletionOutput(_ShortRepr):
    """One sample of a request. `finish_reason` is None while the sample grows."""

    text: str
    """Text so far, without the stop string (except with `include_stop_str_in_output`).

    The text may lag behind `token_ids`, because text that may be the start of a stop string is held back.
    """
    token_ids: tuple[int, ...]
    """All generated tokens, including the tokens of a stop string and the end-of-sequence token."""
    finish_reason: FinishReason | None = None
    """Reason for the end of the sample. None while the sample grows.

    `stop`: an end-of-sequence token, a stop token or a stop string was generated. `length`: the sample has `max_tokens`
    tokens. `abort`: the request was cancelled.
    """
    _: KW_ONLY
    stop_reason: int | str | None = None
    """Stop string or id of the stop token that ended the sample. None if the sample ended for any other reason."""
    index: int = 0
    """Index among the `n` samples of the request."""
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    """One dict of log-probabilities, by token id, for each generated token. None if they were not requested.

    A dict has the generated token and the most probable tokens at its position.
    """
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of the generated tokens. None if they were not requested."""
    new_text: str = field(default="", compare=False)
    """Text added since the previous output of a stream."""


@dataclass(frozen=True, repr=False)
class RequestOutput(_ShortRepr):
    """Output of one request: its samples and metrics."""

    request_id: str
    """Id of the request, for `LLM.cancel`."""
    prompt: str | None
    """Text of the prompt; None if the prompt was given as token ids."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    """Samples of the request, by index."""
    metrics: RequestMetrics
    new_text: str = field(default="", compare=False)
    """Text added to the first sample since the previous output of a stream. Each sample has a `new_text` too."""
    _: KW_ONLY
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    """One dict of log-probabilities for each prompt token, as in `CompletionOutput.logprobs`. The first entry is None.

    The field is None if log-probabilities of the prompt were not requested.
    """
    error: str | None = None
    """Error message, if this prompt failed. `outputs` is then empty. None: the prompt did not fail.

    Only a call with several prompts returns an error message. A call with one prompt raises the error.
    """

    @property
    def finished(self) -> bool:
        """Whether every sample has ended. True for a failed prompt."""
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return self.metrics.num_cached_tokens


@dataclass(frozen=True)
class CompletionDelta:
    """Addition to one sample since the previous delta of its request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None
    """Log-probabilities of the added tokens, one dict for each. None if they were not requested."""
    cumulative_logprob: float | None
    """Sum of the log-probabilities of all tokens of the sample so far. None if they were not requested."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class RequestDelta:
    """Addition to the output of a request since the previous delta.

    The size of a delta does not grow with the length of the output.
    """

    request_id: str
    num_prompt_tokens: int
    completions: tuple[CompletionDelta, ...]
    """Additions to the samples that grew or ended, ordered by index. Empty if only `prompt_logprobs` has additions."""
    metrics: RequestMetrics
    finished: bool
    """Whether every sample has ended. If so, no further delta follows."""
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] = ()
    """Log-probabilities of the next positions of the prompt, as in `RequestOutput.prompt_logprobs`."""

    @property
    def num_tokens(self) -> int:
        """Number of added tokens of all samples."""
        return sum(len(completion.token_ids) for completion in self.completions)
