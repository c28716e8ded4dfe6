"""What requests return."""

from dataclasses import KW_ONLY, dataclass, field, fields
from reprlib import Repr
from typing import Any, Literal, cast

FinishReason = Literal["stop", "length", "abort"]


class _Values(Repr):
    """Cuts long values short, and numbers to six digits."""

    def __init__(self) -> None:
        super().__init__()
        self.maxtuple = self.maxdict = 8
        self.maxstring = 200
        # Outputs within outputs shorten themselves.
        self.maxother = 100_000

    def repr_float(self, value: float, level: int) -> str:
        return f"{value:.6g}"


class _ShortRepr:
    """A dataclass whose repr fits a notebook: long texts and lists cut short, what is not there left out."""

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        short = _Values()
        shown = ", ".join(f"{name}={short.repr(value)}" for name, value in values.items() if value is not None)
        return f"{type(self).__name__}({shown})"


@dataclass(frozen=True, slots=True)
class Logprob:
    """Probability of a token, before temperature and other changes that sampling makes to the logits."""

    logprob: float
    """Natural logarithm of its probability over the whole vocabulary."""
    rank: int
    """Rank among all tokens: 1 is the most probable."""
    decoded_token: str | None = None
    """What it adds to a text, with its space if it has one; None without a tokenizer."""


@dataclass(frozen=True, repr=False)
class RequestMetrics(_ShortRepr):
    """Times of one request. `arrival` is on the clock of `time.monotonic`; the rest are durations in seconds.

    They mean what vLLM's metrics of these names mean. None until the moment that they measure to has come. With
    several samples, first and last token are those of the whole request.
    """

    arrival: float
    """When the request came: its call began, or, at a server, its message was there."""
    queue_s: float | None = None
    """From arrival until an instance first took it up."""
    ttft_s: float | None = None
    """Time to first token: from arrival."""
    tpot_s: float | None = None
    """Time per output token: (end to end - TTFT) / (tokens - 1); None with fewer than two tokens."""
    _: KW_ONLY
    e2e_s: float | None = None
    """End to end: from arrival to the last token."""
    num_preemptions: int = 0
    """How often it lost its pages to other requests and was computed again."""
    num_cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were in the cache already, from earlier requests."""


@dataclass(frozen=True, repr=False)
class CompletionOutput(_ShortRepr):
    """One generated continuation. `finish_reason` is None while it grows."""

    text: str
    """Never shows part of a stop string; it may lag behind `token_ids` while one may be beginning."""
    token_ids: tuple[int, ...]
    """All tokens, those of a stop string or of the end of the sequence included."""
    finish_reason: FinishReason | None = None
    """`stop`: the model ended it, or something in the request's `stop` or `stop_token_ids` did. `length`: it came to
    `max_tokens`. `abort`: it was cancelled."""
    _: KW_ONLY
    stop_reason: int | str | None = None
    """The stop string or the stop token's id that ended it; None for the model's own end of sequence, or no stop."""
    index: int = 0
    """Which of the request's `n` samples this is."""
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    """For each token: itself and the most probable ones, by token id. None unless the request asked for it."""
    cumulative_logprob: float | None = None
    """Sum over the tokens' own log-probabilities. None unless the request asked for log-probabilities."""
    new_text: str = field(default="", compare=False)
    """Text added since the previous output of a stream."""


@dataclass(frozen=True, repr=False)
class RequestOutput(_ShortRepr):
    """A request with what has been generated for it."""

    request_id: str
    """The id that the caller gave, or else a generated one: names the request when it is to be cancelled."""
    prompt: str | None
    """None where the prompt was given as token ids."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    """The request's `n` samples, by index."""
    metrics: RequestMetrics
    new_text: str = field(default="", compare=False)
    """Text added to the first sample since the previous output of a stream. All samples have their own `new_text`."""
    _: KW_ONLY
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    """For each token of the prompt: itself and the most probable ones, by token id. The first is None: nothing comes
    before it. None altogether unless the request asked for it."""
    error: str | None = None
    """Why the request was refused or failed, if it was one of several; it has no `outputs` then."""

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that did not have to be computed."""
        return self.metrics.num_cached_tokens


@dataclass(frozen=True)
class CompletionDelta:
    """What was added to one of a request's samples since the request's delta before."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None
    """For each of `token_ids`. None unless the request asked for it."""
    cumulative_logprob: float | None
    """Sum over all tokens of the sample so far. None unless the request asked for log-probabilities."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class RequestDelta:
    """What was added to a request since the delta before. Its size is that of what is new, however long the request
    is and however many samples it has."""

    request_id: str
    num_prompt_tokens: int
    completions: tuple[CompletionDelta, ...]
    """Those that grew or ended, by index. None before the first token, where log-probabilities of the prompt come."""
    metrics: RequestMetrics
    finished: bool
    """Every sample has ended: this is the last."""
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] = ()
    """For the positions of the prompt that follow those of the deltas before."""

    @property
    def num_tokens(self) -> int:
        """Tokens that were added, of all samples."""
        return sum(len(completion.token_ids) for completion in self.completions)
