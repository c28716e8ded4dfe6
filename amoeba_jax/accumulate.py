"""Build the full outputs of a request from its deltas. A delta has the new tokens and text of one step."""

import queue
from collections.abc import Iterator

from amoeba_jax.outputs import CompletionDelta, CompletionOutput, Logprob, RequestDelta, RequestOutput
from amoeba_jax.request import Delivery, Request


class OutputAccumulator:
    """Builder of the full outputs of one request from its deltas.

    A full output contains all tokens so far, so a long output is slow to build. The caller's thread builds the full
    outputs. The output thread stays free for other requests.
    """

    def __init__(self, request: Request):
        leader = request.sequences[0]
        self._request_id, self._prompt, self._prompt_token_ids = request.id, request.prompt, leader.prompt
        wanted = leader.params.logprobs is not None
        self._outputs = [
            CompletionOutput(
                "", (), index=s.index, logprobs=() if wanted else None, cumulative_logprob=0.0 if wanted else None
            )
            for s in request.sequences
        ]
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if leader.params.prompt_logprobs is not None:
            self._prompt_logprobs = []
        self._grown: list[int] = []

    def add(self, delta: RequestDelta) -> RequestOutput:
        """Add the next delta and return the output so far. `new_text` of the result has only the text of this delta."""
        for index in self._grown:  # clear the old `new_text`
            self._outputs[index] = _with_delta(self._outputs[index], None)
        self._grown = [completion.index for completion in delta.completions]
        for completion in delta.completions:
            self._outputs[completion.index] = _with_delta(self._outputs[completion.index], completion)
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += delta.prompt_logprobs
        return RequestOutput(
            self._request_id,
            self._prompt,
            self._prompt_token_ids,
            tuple(self._outputs),
            delta.metrics,
            self._outputs[0].new_text,
            prompt_logprobs=None if self._prompt_logprobs is None else tuple(self._prompt_logprobs),
        )


def _with_delta(output: CompletionOutput, delta: CompletionDelta | None) -> CompletionOutput:
    if delta is None:
        return CompletionOutput(
            output.text,
            output.token_ids,
            output.finish_reason,
            stop_reason=output.stop_reason,
            index=output.index,
            logprobs=output.logprobs,
            cumulative_logprob=output.cumulative_logprob,
        )
    return CompletionOutput(
        output.text + delta.text,
        output.token_ids + delta.token_ids,
        delta.finish_reason,
        stop_reason=delta.stop_reason,
        index=output.index,
        logprobs=None if output.logprobs is None else output.logprobs + (delta.logprobs or ()),
        cumulative_logprob=delta.cumulative_logprob,
        new_text=delta.text,
    )


def wait_for(request: Request, deliveries: "queue.SimpleQueue[Delivery]") -> RequestOutput:
    """Wait until a request with `every_token=False` has ended, and return its complete output.

    The request puts its complete output into the queue `deliveries` as one item. If the request fails, raise its error.
    """
    (output,) = wait_for_all(request, deliveries)
    return output


def wait_for_all(request: Request, deliveries: "queue.SimpleQueue[Delivery]") -> Iterator[RequestOutput]:
    """Yield the output so far each time a sample has grown or ended. Stop when all samples have ended.

    The request puts its deltas into the queue `deliveries`. If the request fails, raise its error.
    """
    accumulator = OutputAccumulator(request)
    finished = False
    while not finished:
        delivery = deliveries.get()
        if isinstance(delivery, BaseException):
            raise delivery
        finished = delivery.finished
        output = accumulator.add(delivery)
        if delivery.completions:
            yield output
