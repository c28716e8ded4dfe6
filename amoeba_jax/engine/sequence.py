"""A request while it is being served."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from amoeba_jax.outputs import FinishReason
from amoeba_jax.sampling_params import SamplingParams
from kvcache.pages import SequencePages

OnToken = Callable[["Sequence"], None]


@dataclass(eq=False)
class Sequence:
    """Tokens, pages and times of one request. Owned by the dispatcher thread once submitted.

    Attributes:
        num_computed: leading tokens whose keys and values are in the cache.
        on_token: called in the dispatcher thread after each new token and at the end; must not block.
    """

    request_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    on_token: OnToken
    eos_token_ids: frozenset[int] = frozenset()
    arrival: float = field(default_factory=time.monotonic)
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    pages: SequencePages | None = None
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    started_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def max_tokens(self) -> int:
        """Most tokens that it can come to hold, prompt included."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def in_prefill(self) -> bool:
        """More than one token waits to be computed, or none was sampled yet."""
        return self.num_computed < len(self.prompt)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens `start .. stop` of prompt and output together."""
        prompt = self.prompt[start:stop]
        return [*prompt, *self.output[max(start - len(self.prompt), 0) : max(stop - len(self.prompt), 0)]]

    def append(self, token: int) -> None:
        """Take a sampled token and decide whether it is the last."""
        now = time.monotonic()
        if not self.output:
            self.first_token_at = now
        self.output.append(token)
        ends = (
            self.params.stop_token_ids if self.params.ignore_eos else (*self.eos_token_ids, *self.params.stop_token_ids)
        )
        if token in ends:
            self.finish_reason = "stop"
        elif len(self.output) >= self.params.max_tokens:
            self.finish_reason = "length"
        if self.finished:
            self.finished_at = now
