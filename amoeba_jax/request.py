"""The caller's side of a request: what the engine reports becomes text, outputs and metrics."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from amoeba_jax.engine.sequence import Sequence, Update
from amoeba_jax.errors import EngineClosedError, NotANumberError, RequestError
from amoeba_jax.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from amoeba_jax.text_stream import TextStream
from amoeba_jax.tokenizer import Tokenizer

Delivery = RequestOutput | BaseException
EndEarly = Callable[[Sequence, str | None], None]
# Updates after which event loops are woken up, even if there are more of them already.
_MOST_TAKEN = 256


@dataclass(eq=False)
class _Completion:
    """One of a request's continuations as far as the caller is to see it."""

    sequence: Sequence
    text_stream: TextStream
    text: str = ""
    new_text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    finished_at: float | None = None

    def show(self, text: str) -> None:
        self.text += text
        self.new_text += text


class Request:
    """A request's continuations and their outputs. `take` and `output` run in one thread, the outputs' own.

    Args:
        sequences: the leader first.
        deliver: gets every output (or only the last one, unless `every_token`), or what the request failed with.
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
        self.sequences = sequences
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._deliver = deliver
        self._every_token = every_token
        params = sequences[0].params
        self._completions = [
            _Completion(
                sequence,
                TextStream(
                    tokenizer.stream(params.skip_special_tokens) if tokenizer else None,
                    tuple(params.stop),
                    params.include_stop_str_in_output,
                    params.min_tokens,
                ),
            )
            for sequence in sequences
        ]
        self._failed = False

    @property
    def finished(self) -> bool:
        return self._failed or all(c.finish_reason is not None for c in self._completions)

    def take(self, update: Update, end_early: EndEarly) -> None:
        """Take in news of one sequence; `end_early(sequence, stop string)` where a stop string ends it.

        Where that fails, the request fails, and `end_early(sequence, None)` ends its sequences.
        """
        try:
            self._take(update, end_early)
        except Exception as error:
            self._failed = True
            for sequence in self.sequences:
                end_early(sequence, None)
            self._deliver(error)

    def _take(self, update: Update, end_early: EndEarly) -> None:
        completion = self._completions[update.sequence.index]
        if self.finished or completion.finish_reason is not None:
            return  # tokens sampled behind a stop string
        if update.finished and update.sequence.error is not None:  # what came before it is delivered
            self._failed = True
            error = update.sequence.error
            if isinstance(error, RequestError | NotANumberError):
                for sequence in self.sequences:
                    end_early(sequence, None)
                self._deliver(error)
                return
            failure = EngineClosedError(f"the engine failed: {error}")
            failure.__cause__ = error
            self._deliver(failure)
            return
        self._add_tokens(completion, update)
        if completion.text_stream.stopped is not None and completion.finish_reason is None:
            self._finish(completion, "stop", completion.text_stream.stopped)
            end_early(update.sequence, completion.text_stream.stopped)
        if self._every_token or self.finished:
            self._deliver(self._output())

    def _add_tokens(self, completion: _Completion, update: Update) -> None:
        sequence = update.sequence
        ended_by_token = update.finished and sequence.finish_reason == "stop"
        for token in update.tokens:
            completion.tokens.append(token)
            if ended_by_token and not sequence.params.include_stop_str_in_output:
                continue  # a stop token is not text
            completion.show(completion.text_stream.push(token))
        if update.logprobs is not None:
            completion.logprobs.append(self._decoded(update.logprobs))
        if update.finished:
            completion.show(completion.text_stream.finish())
            if completion.text_stream.stopped is None:
                assert sequence.finish_reason is not None
                self._finish(completion, sequence.finish_reason, sequence.stop_reason)

    def _finish(self, completion: _Completion, reason: FinishReason, stop_reason: int | str | None) -> None:
        completion.finish_reason, completion.stop_reason = reason, stop_reason
        completion.finished_at = time.monotonic()

    def _decoded(self, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        if self._tokenizer is None:
            return entry
        decode = self._tokenizer.decode
        return {
            token: replace(logprob, decoded_token=decode([token], skip_special_tokens=False))
            for token, logprob in entry.items()
        }

    def _output(self) -> RequestOutput:
        leader = self.sequences[0]
        prompt_logprobs = None
        if leader.params.prompt_logprobs is not None:
            prompt_logprobs = tuple(e if e is None else self._decoded(e) for e in leader.prompt_logprobs)
        outputs = tuple(self._completion_output(c) for c in self._completions)
        for completion in self._completions:
            completion.new_text = ""
        return RequestOutput(
            self.id,
            self._prompt,
            leader.prompt,
            outputs,
            self._metrics(),
            outputs[0].new_text,
            prompt_logprobs=prompt_logprobs,
        )

    def _completion_output(self, c: _Completion) -> CompletionOutput:
        logprobs = cumulative = None
        if c.sequence.params.logprobs is not None:
            logprobs = tuple(c.logprobs)
            cumulative = sum(entry[token].logprob for entry, token in zip(c.logprobs, c.tokens, strict=True))
        return CompletionOutput(
            c.text,
            tuple(c.tokens),
            c.finish_reason,
            stop_reason=c.stop_reason,
            index=c.sequence.index,
            logprobs=logprobs,
            cumulative_logprob=cumulative,
            new_text=c.new_text,
        )

    def _metrics(self) -> RequestMetrics:
        arrival = self.sequences[0].arrival
        started = min((s.started_at for s in self.sequences if s.started_at is not None), default=None)
        first = min((s.first_token_at for s in self.sequences if s.first_token_at is not None), default=None)
        ends = [c.finished_at for c in self._completions if c.finished_at is not None]
        last = max(ends) if ends and self.finished else None
        most = max(len(c.tokens) for c in self._completions)
        tpot = None if last is None or first is None or most < 2 else (last - first) / (most - 1)
        return RequestMetrics(
            arrival=arrival,
            queue_s=None if started is None else started - arrival,
            ttft_s=None if first is None else first - arrival,
            tpot_s=tpot,
            e2e_s=None if last is None else last - arrival,
            num_preemptions=sum(s.num_preemptions for s in self.sequences),
            num_cached_tokens=self.sequences[0].num_cached or 0,
        )


class OutputThread:
    """Turns updates into outputs beside the dispatcher, so that text costs no step any time."""

    def __init__(self, end_early: EndEarly):
        self._updates: queue.SimpleQueue[tuple[Request, Update] | None] = queue.SimpleQueue()
        self._for_loops: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self._thread = threading.Thread(target=self._run, args=(end_early,), name="amoeba-outputs", daemon=True)
        self._thread.start()

    def put(self, request: Request, update: Update) -> None:
        """Queue an update; never blocks."""
        self._updates.put((request, update))

    def in_loop(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Delivery], None]
    ) -> Callable[[Delivery], None]:
        """`deliver` for a `Request`, called in an event loop, which is woken up once for all requests of a step."""

        def deliver_later(delivery: Delivery) -> None:
            self._for_loops.setdefault(loop, []).append(partial(deliver, delivery))

        return deliver_later

    def close(self) -> None:
        """Deliver what is queued and stop."""
        self._updates.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, end_early: EndEarly) -> None:
        num_taken = 0
        while (item := self._updates.get()) is not None:
            request, update = item
            request.take(update, end_early)
            item = request = update = None  # what nobody waits for any more must not live on here
            num_taken += 1
            if num_taken == _MOST_TAKEN or self._updates.empty():
                self._wake_loops()
                num_taken = 0
        self._wake_loops()

    def _wake_loops(self) -> None:
        waiting, self._for_loops = self._for_loops, {}
        for loop, calls in waiting.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_call_all, calls)


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


def wait_for(deliveries: "queue.SimpleQueue[Delivery]") -> RequestOutput:
    """The next output. Raises what the request failed with."""
    delivery = deliveries.get()
    if isinstance(delivery, BaseException):
        raise delivery
    return delivery


def wait_for_all(deliveries: "queue.SimpleQueue[Delivery]") -> Iterator[RequestOutput]:
    """Outputs up to the finished one. Raises what the request failed with."""
    finished = False
    while not finished:
        output = wait_for(deliveries)
        finished = output.finished
        yield output
