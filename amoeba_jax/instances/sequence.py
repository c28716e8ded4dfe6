"""One continuation of a request while it is being served."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from amoeba_jax.outputs import FinishReason, Logprob
from amoeba_jax.sampling.rows import SamplingRow, TokenLogprobs, logprob_entry
from amoeba_jax.sampling_params import SamplingParams
from kvcache.pages import SequencePages
from kvcache.prefix_cache import PageKeys


class Entries(NamedTuple):
    """Log-probabilities of tokens that follow each other, as the device returned them.

    The thread that wants them builds them, token by token: not the dispatcher, whose time is that of all requests.
    """

    logprobs: TokenLogprobs
    place: int
    """Row of `logprobs` of the first token."""
    tokens: tuple[int, ...]
    k: int
    """Most likely tokens of each place to tell besides."""

    def build(self) -> list[dict[int, Logprob]]:
        """An entry for each token: itself, then the `k` most likely."""
        return [logprob_entry(self.logprobs, self.place + i, token, self.k) for i, token in enumerate(self.tokens)]


class Update(NamedTuple):
    """News of one sequence: tokens that were added, log-probabilities of its prompt, or its end."""

    sequence: "Sequence"
    tokens: tuple[int, ...] = ()
    logprobs: Entries | None = None
    """Log-probabilities of the tokens added, if asked for."""
    finished: bool = False
    """There will be no more of this sequence, and its fields do not change any more."""
    prompt_logprobs: Entries | None = None
    """Log-probabilities of the prompt's tokens that follow those of the updates before."""


@dataclass(eq=False)
class Sequence:
    """Tokens, pages and times of one continuation. Owned by the dispatcher thread once submitted.

    Tokens are known to the host one step late: `num_in_flight` have been sampled on the device and not read yet.

    Attributes:
        index: which of the request's `n` continuations.
        number: order of arrival; continuations of one request share it.
        sink: called in the dispatcher thread with every `Update`; must not block.
        siblings: the request's other continuations, which wait until this one's prompt is computed.
        leader: the continuation whose prompt this one shares.
        num_computed: leading tokens whose keys and values are in the cache, by steps that have been launched.
        num_prompt_logprobs: leading tokens of the prompt whose log-probabilities were reported; the first has none.
        num_failures: steps of its own that have failed since one succeeded; see `Recovery.recover`.
        slot: its place in the instance's device-side arrays while it runs.
        page_keys: of its known tokens, once it is queued.
        deadline: by `time.monotonic()`; it is not started after that.
        waiting_since: now less the seconds that it has waited in all, by `time.monotonic()`; of one that runs, as when
            it was started.
        queued_s: seconds that it waited in all before it was started.
        client: whom its slot and pages are counted for; see `shares.py`.
        arrival: when its request came, by `time.monotonic()`: before its prompt was tokenized and checked.
        beyond_share: its client has its share of slots or pages without it, and other clients have requests.
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
    pages: SequencePages | None = None
    page_keys: PageKeys | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: BaseException | None = None
    started_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        self.waiting_since = self.arrival

    def start(self) -> None:
        """It waits no longer."""
        now = time.monotonic()
        self.queued_s = now - self.waiting_since
        if self.started_at is None:
            self.started_at = now

    def wait_again(self) -> None:
        """It was preempted."""
        self.waiting_since = time.monotonic() - self.queued_s

    @property
    def order(self) -> tuple[int, ...]:
        """Who is served first, and preempted last: within its client's share, by priority, then arrival."""
        return (*self.rank, self.number, self.index)

    @property
    def rank(self) -> tuple[int, int]:
        """Sequences may be preempted for those of a lower rank."""
        return (self.beyond_share, self.params.priority)

    @property
    def order_of_client(self) -> tuple[int, ...]:
        """`order` among the sequences of one client."""
        return (self.params.priority, self.number, self.index)

    @property
    def max_total_tokens(self) -> int:
        """What it may grow to."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def num_known(self) -> int:
        """Tokens that the host knows, prompt included."""
        return len(self.prompt) + len(self.output)

    @property
    def num_tokens(self) -> int:
        """Tokens that there are, prompt included."""
        return self.num_known + self.num_in_flight

    @property
    def num_generated(self) -> int:
        return len(self.output) + self.num_in_flight

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to compute before the next can be sampled; 0 when all that were asked for have been sampled."""
        if self.num_generated >= self.params.max_tokens:
            return 0
        return self.num_tokens - self.num_computed

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether log-probabilities of the prompt were asked for, and not all steps that give them were launched."""
        wanted = self.params.prompt_logprobs is not None and self.index == 0
        return wanted and self.num_computed < len(self.prompt) and self.num_prompt_logprobs < len(self.prompt)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens `start .. stop` of prompt and output together, as far as the host knows them."""
        prompt = self.prompt[start:stop]
        return [*prompt, *self.output[max(start - len(self.prompt), 0) : max(stop - len(self.prompt), 0)]]

    def append(self, token: int) -> None:
        """Take a token that was in flight, and decide whether it is the last."""
        if not self.output:
            self.first_token_at = time.monotonic()
        self.output.append(token)
        self.num_in_flight -= 1
        if token in self.sampling.stop_ids:
            self.finish("stop", token)
        elif token in self.eos_token_ids and not self.params.ignore_eos:
            self.finish("stop")
        elif len(self.output) >= self.params.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End it. Nothing is reported: that is for the caller."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.finished_at = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """End it with an error. Nothing is reported: that is for the caller."""
        self.error = error
        self.finished_at = time.monotonic()
