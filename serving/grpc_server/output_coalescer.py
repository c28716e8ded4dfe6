"""Buffer of limited size for generated output that the client has not received yet."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace

from amoeba_jax.outputs import CompletionDelta, FinishReason, Logprob, RequestDelta, RequestMetrics
from amoeba_jax.sampling_params import SamplingParams
from serving.grpc_server.statuses import SlowReaderError

Send = Callable[[RequestDelta], Awaitable[None]]
"""Function that sends a delta, the new output of a request since the last delta, to the client."""

CUT_OFF_S = 2.0
"""Seconds that a write may stay blocked after the unread output has exceeded its limit."""
LAST_READ_S = 60.0
"""Seconds that the last message of a request waits for a client that does not read it."""
# Seconds from the time limit of a write to its cancellation: if the event loop was late, the write may have ended.
_GRACE_S = 0.1
# Most tokens and log-probabilities of a prompt in one write. A client that reads one part after the other is not slow.
_PART_ENTRIES = 2048


@dataclass
class _Grown:
    """New output of one sample."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, delta: CompletionDelta) -> None:
        self.text.append(delta.text)
        self.tokens += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        self.cumulative_logprob = delta.cumulative_logprob
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class DeltaSum:
    """Sum of consecutive deltas (new outputs) of one request. Adding a delta does not copy the earlier deltas."""

    def __init__(self) -> None:
        self._latest: RequestDelta | None = None
        self._grown: dict[int, _Grown] = {}
        self._prompt_logprobs: list[dict[int, Logprob] | None] = []

    def add(self, delta: RequestDelta) -> None:
        """Add the next delta."""
        self._latest = delta
        self._prompt_logprobs += delta.prompt_logprobs
        for completion in delta.completions:
            self._grown.setdefault(completion.index, _Grown()).add(completion)

    def take(self) -> RequestDelta | None:
        """Return the sum of the deltas that were added since the last call, or None if no delta was added."""
        latest = self._latest
        if latest is None:
            return None
        completions = tuple(
            CompletionDelta(
                index,
                "".join(grown.text),
                tuple(grown.tokens),
                None if grown.logprobs is None else tuple(grown.logprobs),
                grown.cumulative_logprob,
                grown.finish_reason,
                grown.stop_reason,
            )
            for index, grown in sorted(self._grown.items())
        )
        metrics: RequestMetrics = latest.metrics
        added = RequestDelta(
            latest.request_id,
            latest.num_prompt_tokens,
            completions,
            metrics,
            latest.finished,
            tuple(self._prompt_logprobs),
        )
        self._latest, self._grown, self._prompt_logprobs = None, {}, []
        return added


class OutputCoalescer:
    """Buffer between a request and its client. Output that arrives during one write is sent together in the next write.

    A write blocks while the client does not read. If too many tokens arrive during one write, the write must end within
    the next `CUT_OFF_S` seconds. If it does not end, the client is cut off.

    Args:
        max_tokens: maximum number of tokens and log-probabilities that may arrive during one write, for each sample
            (`Limits.max_buffered_tokens`).
        params: sampling settings of the request.
    """

    def __init__(self, max_tokens: int, params: SamplingParams):
        self._per_token, self._per_position = 1 + (params.logprobs or 0), 1 + (params.prompt_logprobs or 0)
        self._max_unread = params.n * max(max_tokens, self._per_token)
        self._sum = DeltaSum()
        self._news = asyncio.Event()
        self._closed = self._ended = False
        self._write: asyncio.Timeout | None = None
        self._num_unread = 0
        self._give_up_at: float | None = None  # time of the event loop, set when the last message is being written

    def put(self, delta: RequestDelta) -> None:
        """Add new output. If too much output arrives during a write, set a time limit for the write."""
        self._sum.add(delta)
        self._ended = delta.finished
        self._news.set()
        if self._write is not None:
            too_many = self._num_unread > self._max_unread
            self._num_unread += delta.num_tokens * self._per_token + len(delta.prompt_logprobs) * self._per_position
            if self._ended:
                self._cut_off_after(LAST_READ_S)
            elif self._num_unread > self._max_unread and not too_many:
                self._cut_off_after(CUT_OFF_S)

    async def send_all(self, send: Send) -> None:
        """Send output until the request ends or `close` is called.

        Raises:
            SlowReaderError: the client is too slow.
        """
        finished = False
        while not finished:
            await self._news.wait()
            if self._closed:
                return
            self._news.clear()
            delta = self._sum.take()
            assert delta is not None, "there is news"
            for part in _parts(delta, max(1, _PART_ENTRIES // (1 + self._per_position))):
                if self._closed:
                    return
                await self._send(part, send)
            finished = delta.finished

    async def _send(self, delta: RequestDelta, send: Send) -> None:
        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(None) as self._write:
                self._num_unread = 0
                if self._ended:
                    self._give_up_at = self._give_up_at or now + LAST_READ_S
                    self._cut_off_after(max(0.0, self._give_up_at - now))
                await send(delta)
        except TimeoutError:
            if self._num_unread > self._max_unread:
                why = (
                    f"the client has not read for a while, and {self._num_unread} tokens and log-probabilities have "
                    f"come since, over the limit of {self._max_unread} (max_buffered_tokens)"
                )
            else:
                why = f"the client has not read the end of its request for {LAST_READ_S:g} s"
            raise SlowReaderError(f"{why}: read faster") from None
        finally:
            self._write = None

    def close(self) -> None:
        """Stop sending. A write that has started still completes."""
        self._closed = True
        self._news.set()

    def _cut_off_after(self, seconds: float) -> None:
        """Cancel the present write if it has not ended after `seconds` seconds."""
        loop, write = asyncio.get_running_loop(), self._write

        def suspect() -> None:
            if self._write is write:
                loop.call_later(_GRACE_S, cut_off)

        def cut_off() -> None:
            if write is not None and self._write is write:
                write.reschedule(loop.time())

        loop.call_later(seconds, suspect)


def _parts(delta: RequestDelta, num_positions: int) -> Iterator[RequestDelta]:
    """Split a delta with log-probabilities of many prompt positions into parts of at most `num_positions` positions.

    Only the last part has the generated tokens of the delta.
    """
    positions = delta.prompt_logprobs
    last = max(0, (len(positions) - 1) // num_positions * num_positions)
    for start in range(0, last, num_positions):
        part = positions[start : start + num_positions]
        yield replace(delta, completions=(), finished=False, prompt_logprobs=part)
    yield replace(delta, prompt_logprobs=positions[last:]) if last else delta
