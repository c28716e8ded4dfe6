"""Caller's side of a request: conversion of new tokens from the engine to text, outputs and metrics."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from amoeba_jax.errors import EngineClosedError, NotANumberError, RequestError, RequestFailedError
from amoeba_jax.instances.sequence import Entries, Sequence, Update
from amoeba_jax.outputs import CompletionDelta, FinishReason, Logprob, RequestDelta, RequestMetrics
from amoeba_jax.text_stream import TextStream
from amoeba_jax.tokenizer import Tokenizer

Delivery = RequestDelta | BaseException
EndEarly = Callable[[Sequence, str | None], None]


@dataclass(eq=False)
class _Completion:
    """One sample of a request: its output that is not delivered yet, and its finish reason."""

    sequence: Sequence
    text_stream: TextStream
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def take_delta(self) -> CompletionDelta:
        """Return the output since the last call. The cost does not grow with the length of the sample."""
        wanted = self.sequence.params.logprobs is not None
        delta = CompletionDelta(
            self.sequence.index,
            "".join(self.text),
            tuple(self.tokens),
            tuple(self.logprobs) if wanted else None,
            self.cumulative_logprob if wanted else None,
            self.finish_reason,
            self.stop_reason,
        )
        self.text, self.tokens, self.logprobs = [], [], []
        return delta


class Request:
    """Request with its samples. It converts updates from the engine (new tokens) to outputs.

    Only the output thread calls `take`. The cost of an update depends on its new tokens, not on the length or number of
    the samples.

    Args:
        prompt: text of the prompt. None: the caller gave token ids.
        sequences: sequences of the samples. The first sequence (the leader) computes the prompt for all samples.
        tokenizer: tokenizer. None: outputs have no text.
        deliver: function that receives each delta, or the error if the request fails.
        every_token: whether to deliver output after each step. If false, all output is delivered at the end.

    Attributes:
        inbox: queued updates. The `OutputThread` owns it.
    """

    def __init__(
        self,
        prompt: str | None,
        sequences: list[Sequence],
        tokenizer: Tokenizer | None,
        deliver: Callable[[Delivery], None],
        every_token: bool,
    ):
        self.id = sequences[0].request_id
        self.prompt = prompt
        self.sequences = sequences
        self.inbox: deque[Update] = deque()
        self._tokenizer = tokenizer
        self._deliver = deliver
        self._every_token = every_token
        params, tokens = sequences[0].params, sequences[0].prompt
        self._completions = [
            _Completion(
                sequence,
                TextStream(
                    tokenizer.stream(params.skip_special_tokens, tokens) if tokenizer else None,
                    tuple(params.stop),
                    params.include_stop_str_in_output,
                    params.min_tokens,
                ),
            )
            for sequence in sequences
        ]
        self._grown: dict[int, None] = {}  # indices of completions with something to deliver, in order of their updates
        self._prompt_logprobs: list[dict[int, Logprob] | None] = []
        self._metrics = RequestMetrics(arrival=sequences[0].arrival)
        self._most_tokens = 0
        self._num_unfinished = len(sequences)
        self._failed = self._began = False

    @property
    def finished(self) -> bool:
        return self._failed or not self._num_unfinished

    def take(self, updates: Iterable[Update], end_early: EndEarly) -> None:
        """Process updates (new tokens of the samples) and deliver the new output.

        If a stop string ends a sequence, call `end_early(sequence, stop_string)`. If the processing fails, deliver the
        exception as the error of the request, and call `end_early(sequence, None)` for all sequences.
        """
        try:
            for update in updates:
                if self._every_token and update.tokens and update.sequence.index in self._grown:
                    self._deliver(self._delta())  # the next token of a sequence belongs to the next step
                self._take(update, end_early)
            news = self._grown or self._prompt_logprobs
            if not self._failed and (self._every_token or self.finished) and news:
                self._deliver(self._delta())
        except Exception as error:
            self._fail(error, end_early)

    def _fail(self, error: BaseException, end_early: EndEarly) -> None:
        if not self._failed:
            self._deliver_grown()
            self._failed = True
            for sequence in self.sequences:
                end_early(sequence, None)
            self._deliver(error)

    def _deliver_grown(self) -> None:
        """Deliver the remaining output of a failed request, before its error. Do nothing if `every_token` is false."""
        if self._every_token and self._grown:
            with contextlib.suppress(Exception):  # this may be the error that the request fails with
                self._deliver(self._delta())

    def _take(self, update: Update, end_early: EndEarly) -> None:
        completion = self._completions[update.sequence.index]
        if self.finished or completion.finish_reason is not None:
            return  # tokens after a stop string
        if update.finished and (error := update.sequence.error) is not None:
            if isinstance(error, RequestError | NotANumberError | RequestFailedError):
                self._fail(error, end_early)
                return
            failure = EngineClosedError(f"the engine failed: {error}")
            failure.__cause__ = error
            self._deliver_grown()
            self._failed = True
            self._deliver(failure)
            return
        if update.prompt_logprobs is not None:
            self._prompt_logprobs += self._decoded(update.prompt_logprobs)
        if update.tokens or update.finished:
            self._grown[update.sequence.index] = None
            self._add_tokens(completion, update)
            if completion.text_stream.stopped is not None and completion.finish_reason is None:
                self._finish(completion, "stop", completion.text_stream.stopped)
                end_early(update.sequence, completion.text_stream.stopped)
            self._measure(completion)

    def _add_tokens(self, completion: _Completion, update: Update) -> None:
        sequence = update.sequence
        stopped = update.finished and sequence.finish_reason == "stop"
        completion.num_tokens += len(update.tokens)
        completion.tokens += update.tokens
        for token in update.tokens:
            if stopped and sequence.is_stop_token(token) and not sequence.params.include_stop_str_in_output:
                continue  # a stop token is not text
            completion.text.append(completion.text_stream.push(token))
        if update.logprobs is not None:
            entries = self._decoded(update.logprobs)
            completion.logprobs += entries
            for entry, token in zip(entries, update.tokens, strict=True):
                completion.cumulative_logprob += entry[token].logprob
        if update.finished:
            completion.text.append(completion.text_stream.finish())
            if completion.text_stream.stopped is None:
                assert sequence.finish_reason is not None
                self._finish(completion, sequence.finish_reason, sequence.stop_reason)

    def _finish(self, completion: _Completion, reason: FinishReason, stop_reason: int | str | None) -> None:
        completion.finish_reason, completion.stop_reason = reason, stop_reason
        self._num_unfinished -= 1

    def _decoded(self, entries: Entries) -> list[dict[int, Logprob]]:
        built = entries.build()
        if self._tokenizer is None:
            return built
        text = self._tokenizer.token_text
        return [{token: Logprob(it.logprob, it.rank, text(token)) for token, it in entry.items()} for entry in built]

    def _measure(self, completion: _Completion) -> None:
        sequence, before = completion.sequence, self._metrics
        self._most_tokens = max(self._most_tokens, completion.num_tokens)
        queue_s, ttft_s = before.queue_s, before.ttft_s
        if queue_s is None and sequence.started_at is not None:
            queue_s = sequence.started_at - before.arrival
        if ttft_s is None and sequence.first_token_at is not None:
            ttft_s = sequence.first_token_at - before.arrival
        e2e_s = tpot_s = None
        if not self._num_unfinished:
            e2e_s = self._ended_at() - before.arrival
            if ttft_s is not None and self._most_tokens > 1:
                tpot_s = (e2e_s - ttft_s) / (self._most_tokens - 1)
        preempted = sequence.num_preemptions - completion.num_preemptions
        completion.num_preemptions = sequence.num_preemptions
        self._metrics = RequestMetrics(
            before.arrival,
            queue_s,
            ttft_s,
            tpot_s,
            e2e_s=e2e_s,
            num_preemptions=before.num_preemptions + preempted,
            num_cached_tokens=self.sequences[0].num_cached or 0,
        )

    def _ended_at(self) -> float:
        """Return the time when the last sample ended.

        If a stop string has ended a sample, the engine may not have recorded this end yet. The result is then the
        present time.
        """
        ended = [sequence.finished_at for sequence in self.sequences if sequence.finished_at is not None]
        return max(ended) if len(ended) == len(self.sequences) else time.monotonic()

    def _delta(self) -> RequestDelta:
        completions = tuple(self._completions[index].take_delta() for index in sorted(self._grown))
        self._grown.clear()
        prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        leader = self.sequences[0]
        if leader.params.prompt_logprobs is not None and not self._began:
            prompt_logprobs = (None, *prompt_logprobs)  # the first token has no log-probabilities
        self._began = True
        return RequestDelta(self.id, len(leader.prompt), completions, self._metrics, self.finished, prompt_logprobs)
