"""Full outputs of a request, added up from its deltas (`RequestDelta`)."""

import queue
from collections.abc import Iterator

from amoeba_jax.outputs import CompletionDelta, CompletionOutput, Logprob, RequestDelta, RequestOutput
from amoeba_jax.request import Delivery, Request


class OutputAccumulator:
    """Builder of the full outputs of one request from its deltas.

    Each full output repeats all earlier tokens, so its cost grows with the length of the request. For this reason the
    caller's thread builds it, and not the output thread, which serves all requests.
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
        """Add the next delta and return the output so far. Its fields `new_text` have only the text of this delta."""
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
    """Wait for the only delivery of a request that delivers at the end (`every_token=False` of `Request`).

    Return the finished output. `deliveries` is the queue to which the request delivers. Raises the error of a failed
    request.
    """
    (output,) = wait_for_all(request, deliveries)
    return output


def wait_for_all(request: Request, deliveries: "queue.SimpleQueue[Delivery]") -> Iterator[RequestOutput]:
    """Yield the output so far after each delivery in which a sample grew or ended, until all samples have ended.

    `deliveries` is the queue to which the request delivers. Raises the error of a failed request.
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
