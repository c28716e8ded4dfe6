"""State of a sequence (one sample of a request), updates for the client, and copies of KV pages in host memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import jax
import numpy as np

from amoeba_jax.errors import RequestError
from amoeba_jax.outputs import FinishReason, Logprob
from amoeba_jax.sampling.rows import SamplingRow, TokenLogprobs, logprob_entry
from amoeba_jax.sampling.structured import Matcher
from amoeba_jax.sampling_params import SamplingParams
from kvcache.pages import SequencePages
from kvcache.prefix_cache import PageKeys


class SequenceState(StrEnum):
    """State of a sequence.

    WAITING: the sequence is in the queue and has no KV cache, or is a sibling that may not enter the queue yet.
    OFFLOADED: the sequence is in the queue, and its KV cache is in host memory.
    RUNNING: the sequence has a slot and pages on an instance, and this instance is not paused.
    PAUSED: the sequence has a slot and pages on an instance, and this instance is paused.
    FINISHED: the sequence has ended, either normally or with an error.
    """

    WAITING = "waiting"
    OFFLOADED = "offloaded"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


class Entries(NamedTuple):
    """Log-probabilities of consecutive tokens of a sequence, as arrays.

    `build` converts the arrays to dicts for the client. The output thread calls `build`, so that the conversion does
    not delay the dispatcher thread.

    Attributes:
        logprobs: arrays with the log-probabilities of all tokens of a step.
        place: index of the first token of `tokens` in the arrays. The other tokens follow in order.
        tokens: ids of the tokens.
        k: number of most likely tokens to report at the position of each token.
    """

    logprobs: TokenLogprobs
    place: int
    tokens: tuple[int, ...]
    k: int

    def build(self) -> list[dict[int, Logprob]]:
        """Return a list of dicts `{token id: log-probability}`, one dict for each token in `tokens`.

        Each dict starts with the token itself. The `k` most likely tokens at the position of this token follow.
        """
        return [logprob_entry(self.logprobs, self.place + i, token, self.k) for i, token in enumerate(self.tokens)]


class Update(NamedTuple):
    """Report about a sequence to its client: new tokens, log-probabilities, or the end of the sequence.

    Attributes:
        tokens: ids of new tokens.
        logprobs: log-probabilities of the new tokens. None: not requested, or there are no new tokens.
        finished: whether the sequence has ended. After the end, the fields of `sequence` no longer change.
        prompt_logprobs: log-probabilities of some prompt tokens. None: this update reports no prompt tokens. All
            updates of a sequence together report each prompt token once, in order. The first prompt token is left out.
    """

    sequence: "Sequence"
    tokens: tuple[int, ...] = ()
    logprobs: Entries | None = None
    finished: bool = False
    prompt_logprobs: Entries | None = None


@dataclass
class HostPages:
    """Copies of a sequence's KV pages in host memory. Instances of all degrees can load these copies.

    Attributes:
        num_computed: number of leading tokens of the sequence whose keys and values are in the copies.
        layers: for each layer, a list of pairs `(block, used)`. `block` is an array `[tp * pages, page_elems / tp]`
            with `pages` rows from each of `tp` devices, device by device. Of each device's rows, the first `used` rows
            have contents, and the others are padding. Blocks are in pinned host memory if possible.
    """

    num_computed: int
    layers: list[list[tuple[jax.Array, int]]]

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for layer in self.layers for block, _ in layer)

    def whole(self, layer: int, tp: int) -> np.ndarray:
        """Return the pages of one layer, without padding: `[pages, tp, page_elems / tp]`.

        Each page is cut into equal parts for `tp` ranks. The pages may have been copied from another number of ranks.
        """
        found = []
        for block, used in self.layers[layer]:
            ranks = len(block.sharding.device_set)
            pages = np.asarray(block).reshape(ranks, len(block) // ranks, -1).transpose(1, 0, 2)
            found.append(pages.reshape(len(pages), -1)[:used])
        pages = np.concatenate(found)
        return pages.reshape(len(pages), tp, -1)


@dataclass(eq=False)
class Sequence:
    """One sample of a request. After the submission of the request, only the dispatcher thread uses this object.

    All points in time are values of `time.monotonic()`, in seconds.

    Attributes:
        sink: function that gets every `Update` of the sequence, in the dispatcher thread. The function must not block.
        number: number of the request in the order of arrival. All samples of a request have the same number.
        index: index of the sample in its request. 0: the leader.
        siblings: list of later samples of the request that wait until the prompt of this sample is computed.
        leader: first sample of the request. None: this sample is the first.
        deadline: time after which the sequence is rejected if it is in the queue. None: no deadline.
        client: name of the client that sent the request. Clients have equal shares of the engine (`mark_beyond_share`).
        matcher: state of the grammar after the output that the host knows. None: no grammar constrains the output.
        arrival: time at which the request arrived, before the tokenization of its prompt.
        waiting_since: start of the latest wait, minus the total duration of all earlier waits. For a sequence that
            waits now, the total wait so far is therefore `time.monotonic() - waiting_since`.
        queued_s: total duration of all waits that have ended, in seconds.
        num_prompt_logprobs: number of leading prompt tokens whose log-probabilities have been reported. The first token
            has no log-probability, and counts as reported from the beginning.
        num_failures: number of failed steps of this sequence since its latest successful step (`Steps.recover`).
        num_computed: number of leading tokens whose keys and values are in `pages` after all launched steps.
        num_in_flight: number of output tokens that launched steps sample and that the host has not read yet.
        beyond_share: whether the sequence exceeds the share of its client (`mark_beyond_share`).
        slot: index of the sequence in the sampling state of its instance. -1: the sequence waits or has ended.
        paused: whether the instance of the sequence is paused.
        host_pages: KV cache in host memory, if the sequence is offloaded (`Admission.offload`). None: not offloaded.
        page_keys: prefix cache keys of the sequence's pages. None until the sequence first enters the queue.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    sampling: SamplingRow
    sink: Callable[[Update], None]
    number: int = 0
    index: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    cache_salt: str | None = None
    siblings: list["Sequence"] = field(default_factory=list)
    leader: "Sequence | None" = None
    deadline: float | None = None
    client: str = ""
    matcher: Matcher | None = None

    arrival: float = field(default_factory=time.monotonic)
    waiting_since: float = field(init=False)
    queued_s: float = field(default=0.0, init=False)
    output: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 1
    num_failures: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    num_cached: int | None = None
    num_preemptions: int = 0
    beyond_share: bool = False
    slot: int = -1
    paused: bool = False
    pages: SequencePages | None = None
    host_pages: HostPages | None = None
    page_keys: PageKeys | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: BaseException | None = None
    started_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        self.waiting_since = self.arrival

    @property
    def state(self) -> SequenceState:
        if self.finished:
            return SequenceState.FINISHED
        if self.slot < 0:
            return SequenceState.WAITING if self.host_pages is None else SequenceState.OFFLOADED
        return SequenceState.PAUSED if self.paused else SequenceState.RUNNING

    def start(self) -> None:
        """Record that the sequence starts now: set `queued_s`, and at the first start also `started_at`."""
        now = time.monotonic()
        self.queued_s = now - self.waiting_since
        if self.started_at is None:
            self.started_at = now

    def wait_again(self) -> None:
        """Record that a further wait begins now. Call this method when the sequence is preempted."""
        self.waiting_since = time.monotonic() - self.queued_s

    @property
    def order(self) -> tuple[int, ...]:
        """Sort key of sequences. Sequences with smaller keys start first, and are preempted last."""
        return (*self.rank, self.number, self.index)

    @property
    def rank(self) -> tuple[int, int]:
        """Priority for scheduling: the tuple `(beyond_share, priority)`. A smaller tuple is a higher priority.

        A sequence may be preempted so that a sequence of a higher priority can start. This priority is unrelated to the
        ranks of an instance.
        """
        return (self.beyond_share, self.params.priority)

    @property
    def order_of_client(self) -> tuple[int, ...]:
        """Sort key for the sequences of one client. Unlike `order`, this key does not depend on `beyond_share`."""
        return (self.params.priority, self.number, self.index)

    @property
    def max_total_tokens(self) -> int:
        """Number of prompt tokens plus the maximum number of output tokens."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def num_known(self) -> int:
        """Number of prompt tokens, plus the number of output tokens that the host has read."""
        return len(self.prompt) + len(self.output)

    @property
    def num_tokens(self) -> int:
        """Number of all tokens so far: `num_known`, plus the output tokens in flight (`num_in_flight`)."""
        return self.num_known + self.num_in_flight

    @property
    def num_generated(self) -> int:
        return len(self.output) + self.num_in_flight

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens that steps must compute before the next output token can be sampled.

        0 if no further output token is needed: the output, including tokens in flight, has `max_tokens` tokens.
        """
        if self.num_generated >= self.params.max_tokens:
            return 0
        return self.num_tokens - self.num_computed

    @property
    def awaits_token(self) -> bool:
        """Whether the host must read the token in flight before the next token can be sampled.

        True only with structured output: the grammar needs the token in flight to tell which tokens may follow.
        """
        return self.matcher is not None and self.num_in_flight > 0

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether this sequence must still compute some of the requested log-probabilities of its prompt."""
        wanted = self.params.prompt_logprobs is not None and self.index == 0
        return wanted and self.num_computed < len(self.prompt) and self.num_prompt_logprobs < len(self.prompt)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return the tokens at positions `start` to `stop - 1`. Tokens that the host does not know yet are left out.

        Position 0 is the first token of the prompt. The output follows the prompt.
        """
        prompt = self.prompt[start:stop]
        return [*prompt, *self.output[max(start - len(self.prompt), 0) : max(stop - len(self.prompt), 0)]]

    def append(self, token: int) -> None:
        """Append an output token that the host has read. If the token ends the sequence, mark the sequence as finished.

        If the matcher (state of the grammar) raises an error, mark the sequence as failed.
        """
        if not self.output:
            self.first_token_at = time.monotonic()
        self.output.append(token)
        self.num_in_flight -= 1
        ends_at_eos = self.matcher is not None or not self.params.ignore_eos
        if token in self.sampling.stop_ids:
            self.finish("stop", token)
        elif (token in self.eos_token_ids and ends_at_eos) or self._completes_text(token):
            self.finish("stop")
        elif self.error is None and len(self.output) >= self.params.max_tokens:
            self.finish("length")

    def _completes_text(self, token: int) -> bool:
        """Pass a token to the matcher (state of the grammar). Return whether the grammar allows no further text.

        Without a matcher, return False. If the matcher raises an error, mark the sequence as failed, and return False.
        """
        if self.matcher is None:
            return False
        try:
            self.matcher.advance(token)
        except RequestError as error:
            self.fail(error)
        return self.error is None and self.matcher.is_complete

    def is_stop_token(self, token: int) -> bool:
        """Return whether a token is a stop token of the request or an end-of-sequence token of the model."""
        return token in self.sampling.stop_ids or token in self.eos_token_ids

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Mark the sequence as ended without an error. The caller must report the end to the client.

        `stop_reason` is the stop token or the stop string that ended the output. None: the end has another reason.
        """
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.finished_at = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """Mark the sequence as ended with an error. The caller must report the end to the client."""
        self.error = error
        self.finished_at = time.monotonic()
