"""Sequence: one sample of a request, with its tokens, its pages and its times in the engine."""

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

    WAITING: the sequence is in the queue, or waits for the first sample of its request.
    OFFLOADED: the sequence is in the queue, and its KV cache is in host memory.
    RUNNING: the sequence has a slot and pages, and its instance serves.
    PAUSED: the sequence has a slot and pages, but its instance is paused.
    FINISHED: the sequence has ended, with or without an error.
    """

    WAITING = "waiting"
    OFFLOADED = "offloaded"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


class Entries(NamedTuple):
    """Log-probabilities of consecutive tokens, as arrays that are not yet converted for the client.

    `build` converts the arrays. The output thread calls `build`, because the conversion would delay the dispatcher.

    Attributes:
        logprobs: log-probabilities of a whole step, one row for each position.
        place: row of the first token in `logprobs`. The rows of the other tokens follow.
        tokens: the token ids.
        k: number of most likely tokens to report at each position.
    """

    logprobs: TokenLogprobs
    place: int
    tokens: tuple[int, ...]
    k: int

    def build(self) -> list[dict[int, Logprob]]:
        """Return a dict for each token, with log-probabilities by token id.

        Each dict has the token itself first, and then the `k` most likely tokens at the same position.
        """
        return [logprob_entry(self.logprobs, self.place + i, token, self.k) for i, token in enumerate(self.tokens)]


class Update(NamedTuple):
    """Report about a sequence: new output, or the end of the sequence.

    Attributes:
        tokens: new tokens.
        logprobs: log-probabilities of the new tokens, if they were requested.
        finished: whether the sequence has ended. After its end, the fields of the sequence no longer change.
        prompt_logprobs: log-probabilities of prompt tokens, if they were requested. The updates of a sequence have each
            prompt token once, in order.
    """

    sequence: "Sequence"
    tokens: tuple[int, ...] = ()
    logprobs: Entries | None = None
    finished: bool = False
    prompt_logprobs: Entries | None = None


@dataclass
class HostPages:
    """Copies of a sequence's pages in host memory. An instance of any degree can take the pages back.

    Attributes:
        num_computed: number of leading tokens whose keys and values are in the pages.
        layers: for each layer, a list of pairs `(block, used)`. `block` is an array of pages in the shape
            `[tp * pages, page_elems / tp]`, where `tp` is the degree at which the pages were copied. The first `used`
            pages of the block have contents. The other pages are padding. Blocks are in pinned host memory if the
            device supports it.
    """

    num_computed: int
    layers: list[list[tuple[jax.Array, int]]]

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for layer in self.layers for block, _ in layer)

    def whole(self, layer: int, tp: int) -> np.ndarray:
        """Return the pages of one layer, divided for a home of `tp` devices: `[pages, tp, page_elems / tp]`."""
        found = []
        for block, used in self.layers[layer]:
            ranks = len(block.sharding.device_set)
            pages = np.asarray(block).reshape(ranks, len(block) // ranks, -1).transpose(1, 0, 2)
            found.append(pages.reshape(len(pages), -1)[:used])
        pages = np.concatenate(found)
        return pages.reshape(len(pages), tp, -1)


@dataclass(eq=False)
class Sequence:
    """Sample of a request, with its tokens, pages and times. After submission, used by the dispatcher thread only.

    The host reads sampled tokens one step late: `num_in_flight` is the number of tokens that launched steps sample and
    that the host has not read. Times are values of `time.monotonic()`, in seconds.

    Attributes:
        sink: function that gets every `Update`, in the dispatcher thread. It must not block.
        number: order of arrival of the request, equal for all its samples.
        index: index of the sample in its request.
        siblings: other samples of the request that wait until the prompt of this sample is computed.
        leader: sample that computes the prompt for this sample. None: this sample computes its prompt itself.
        deadline: time by which the sequence must start. None: no deadline.
        client: client that sent the request. All sequences of a client use one share of the slots and KV caches
            (`mark_beyond_share`).
        matcher: state of the sequence's grammar after the known tokens. None: the text is not constrained.
        arrival: time at which the request arrived, before tokenization.
        waiting_since: start of the present wait, minus the seconds of all earlier waits. The time from `waiting_since`
            until now is the total wait so far.
        queued_s: total seconds in the queue, up to the latest start.
        num_prompt_logprobs: number of leading prompt tokens whose log-probabilities were reported. The number starts at
            1, because the first token has no log-probability.
        num_failures: number of steps of this sequence that have failed in a row (`Steps.recover`).
        num_computed: number of leading tokens whose keys and values launched steps have written or will write.
        beyond_share: whether the sequence exceeds the share of its client (`mark_beyond_share`).
        slot: index of the sequence in the sampling state of its instance. -1 while the sequence waits and after its
            end.
        paused: whether the sequence's instance is paused.
        host_pages: KV cache of an offloaded sequence, in host memory (`Admission.offload`).
        page_keys: prefix cache keys of the known tokens. Set when the sequence is queued.
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
        """Record that the wait of the sequence ends, and that the sequence starts."""
        now = time.monotonic()
        self.queued_s = now - self.waiting_since
        if self.started_at is None:
            self.started_at = now

    def wait_again(self) -> None:
        """Record that the sequence was preempted and waits again."""
        self.waiting_since = time.monotonic() - self.queued_s

    @property
    def order(self) -> tuple[int, ...]:
        """Sort key. Sequences start in this order. They are preempted in the reverse order."""
        return (*self.rank, self.number, self.index)

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key for scheduling: `(beyond_share, priority)`. The sequence with the smallest key is served first.

        `beyond_share` is True if the client of the sequence already has its share of the engine. A sequence may be
        preempted to start a sequence with a smaller key. Other docstrings call a smaller key a higher priority.
        """
        return (self.beyond_share, self.params.priority)

    @property
    def order_of_client(self) -> tuple[int, ...]:
        """Sort key among the sequences of one client. Unlike `order`, this key ignores `beyond_share`."""
        return (self.params.priority, self.number, self.index)

    @property
    def max_total_tokens(self) -> int:
        """Maximum number of tokens of the sequence, including the prompt."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def num_known(self) -> int:
        """Number of tokens that the host knows, including the prompt."""
        return len(self.prompt) + len(self.output)

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, including the prompt and the sampled tokens that the host has not read yet."""
        return self.num_known + self.num_in_flight

    @property
    def num_generated(self) -> int:
        return len(self.output) + self.num_in_flight

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens to compute before the next token can be sampled.

        The number is 0 if all requested tokens have been sampled.
        """
        if self.num_generated >= self.params.max_tokens:
            return 0
        return self.num_tokens - self.num_computed

    @property
    def awaits_token(self) -> bool:
        """Whether the host must read a sampled token before the next token can be sampled.

        Only sequences with structured output wait in this way, because their grammar needs every token.
        """
        return self.matcher is not None and self.num_in_flight > 0

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether requested log-probabilities of the prompt must still be computed."""
        wanted = self.params.prompt_logprobs is not None and self.index == 0
        return wanted and self.num_computed < len(self.prompt) and self.num_prompt_logprobs < len(self.prompt)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return the tokens at positions `start` to `stop - 1`, as far as the host knows them.

        Position 0 is the first token of the prompt. The output follows the prompt.
        """
        prompt = self.prompt[start:stop]
        return [*prompt, *self.output[max(start - len(self.prompt), 0) : max(stop - len(self.prompt), 0)]]

    def append(self, token: int) -> None:
        """Append a sampled token that the host has read. If this is the last token, mark the sequence as finished.

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
        """Advance the matcher (state of the grammar) by a token. Return whether the text is complete.

        The text is complete if the grammar allows no further text. Without a matcher, return False. If the matcher
        raises an error, mark the sequence as failed, and return False.
        """
        if self.matcher is None:
            return False
        try:
            self.matcher.advance(token)
        except RequestError as error:
            self.fail(error)
        return self.error is None and self.matcher.is_complete

    def is_stop_token(self, token: int) -> bool:
        """Return whether a token is a stop token or an end-of-sequence token of this sequence."""
        return token in self.sampling.stop_ids or token in self.eos_token_ids

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Mark the sequence as finished. The caller must report the end to the client."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.finished_at = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """Mark the sequence as failed. The caller must report the end to the client."""
        self.error = error
        self.finished_at = time.monotonic()
