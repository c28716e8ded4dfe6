"""The offline API: a model on this machine's devices, ready to generate."""

import asyncio
import contextlib
import queue
import time
import weakref
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from amoeba_jax.accumulate import OutputAccumulator, wait_for, wait_for_all
from amoeba_jax.engine.logits import sequence_logits
from amoeba_jax.engine_handle import EngineHandle
from amoeba_jax.errors import NotANumberError, RequestError, RequestFailedError
from amoeba_jax.outputs import RequestDelta, RequestOutput
from amoeba_jax.prompts import Prompt, as_prompts, check_tokens, failed_output, one_each
from amoeba_jax.request import Delivery, Request
from amoeba_jax.request_registry import RequestRegistry
from amoeba_jax.sampling_params import SamplingParams

Message = dict[str, Any]


class LLM(EngineHandle):
    """A language model on `num_devices` devices, as instances of `tensor_parallel_size` devices each.

    `LLM(model=..., num_devices=4, tensor_parallel_size=1, ...)`: every field of `EngineConfig` is accepted by name.
    Construction loads the weights onto every device; executables are compiled on first use, or all at once by
    `warmup()`, and kept in a cache across processes. `LLM(..., warmup=[1])` does what `LLM(...).warmup([1])` does in
    less time: it compiles while weights are loaded. Close it, or use it as a context manager, to free the memory.

    Methods may be called from several threads.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError, MemoryBudgetError: on construction, naming the value
            and the limit.
    """

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        request_ids: list[str] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete one or many prompts (texts or token ids), and return when all are done, in the same order.

        Args:
            prompts: one prompt, or a list of them.
            params: settings of all prompts, or a list with those of each.
            request_ids: names for `cancel`, one for each prompt; by default they are numbered.
            cache_salt: prompts share cached prefixes only with requests of the same salt.

        Raises `RequestError` if a single prompt cannot be served, `NotANumberError` if the model's logits for it are
        not numbers. One of several fails alone: its output has the message in `error`, and the others are served.
        `KeyboardInterrupt` ends the requests and leaves the engine usable.
        """
        prompt_list, alone = as_prompts(prompts)
        return self._generate(prompt_list, alone, params, request_ids, cache_salt)

    def _generate(
        self,
        prompt_list: Sequence[Prompt | RequestError],
        alone: bool,
        params: SamplingParams | list[SamplingParams] | None,
        request_ids: list[str] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """`generate` for a list of prompts, some of which may have failed already. Raises for one that is `alone`."""
        settings = one_each("params", params, SamplingParams, len(prompt_list))
        ids = one_each("request_ids", request_ids, str, len(prompt_list))
        deliveries: list[tuple[Request, queue.SimpleQueue[Delivery]] | RequestOutput] = []
        requests: list[Request] = []
        try:
            for prompt, prompt_params, request_id in zip(prompt_list, settings, ids, strict=True):
                arrived: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
                try:
                    if isinstance(prompt, RequestError):
                        raise prompt
                    request = self._registry.make(
                        prompt, prompt_params, arrived.put, request_id, cache_salt, every_token=False
                    )
                    self._registry.register(request)
                    requests.append(request)
                    deliveries.append((request, arrived))
                except RequestError as error:
                    if alone:
                        raise
                    deliveries.append(failed_output(prompt, request_id, error))
            with self._bar("generating", len(prompt_list)) as advance:
                self._registry.submit(requests)
                outputs = []
                for prompt, request_id, delivery in zip(prompt_list, ids, deliveries, strict=True):
                    try:
                        outputs.append(delivery if isinstance(delivery, RequestOutput) else wait_for(*delivery))
                    except (RequestError, NotANumberError, RequestFailedError) as error:  # it failed alone
                        if alone:
                            raise
                        outputs.append(failed_output(prompt, request_id, error))
                    advance()
        finally:
            self._registry.end(requests)
        return outputs

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Outputs as they grow: each holds everything so far and, in `new_text`, what was added.

        A bad prompt raises `RequestError` here; the request starts with the loop, and leaving the loop early ends it.
        """
        deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        request = self._registry.make(prompt, params, deliveries.put, request_id, cache_salt)
        self._registry.register(request)
        outputs = self._stream(request, deliveries)
        # A generator that is dropped before its loop starts runs no `finally`.
        weakref.finalize(outputs, _end_request, weakref.ref(self._registry), request).atexit = False
        return outputs

    def _stream(self, request: Request, deliveries: "queue.SimpleQueue[Delivery]") -> Iterator[RequestOutput]:
        try:
            self._registry.submit([request])
            yield from wait_for_all(request, deliveries)
        finally:
            self._registry.end([request])

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        deadline: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`stream` for `async for`. Leaving the loop, or cancelling the task, ends the request.

        Raises `DeadlineError` if no instance had room for it before `deadline`, a time of `time.monotonic()`.
        """
        deltas = self.astream_deltas(prompt, params, request_id=request_id, cache_salt=cache_salt, deadline=deadline)
        async with contextlib.aclosing(deltas):
            accumulator: OutputAccumulator | None = None
            async for request, delta in deltas:
                accumulator = accumulator or OutputAccumulator(request)
                output = accumulator.add(delta)
                if delta.completions:
                    yield output

    async def astream_deltas(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        deadline: float | None = None,
        client: str = "",
        arrival: float | None = None,
    ) -> AsyncGenerator[tuple[Request, RequestDelta], None]:
        """`astream` with what was added alone, and the request: for servers, whose work for a token must not grow with
        what came before it. Arguments and errors are those of `astream`.

        While several clients have requests, each has an equal share of slots and of the KV cache: `client` names whom
        this request is counted for. Times are counted from `arrival`, a time of `time.monotonic()`; None: from now.
        """
        arrival = time.monotonic() if arrival is None else arrival
        deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        deliver = self._outputs.in_loop(loop, deliveries.put_nowait)
        make = partial(
            self._registry.make,
            prompt,
            params,
            deliver,
            request_id,
            cache_salt,
            deadline=deadline,
            client=client,
            arrival=arrival,
        )
        # Long lists take a while to check, and words to tokenize.
        request = await loop.run_in_executor(None, make)
        self._registry.register(request)
        try:
            await asyncio.wrap_future(self._registry.submit_soon([request]))
            finished = False
            while not finished:
                delivery = await deliveries.get()
                if isinstance(delivery, BaseException):
                    raise delivery
                finished = delivery.finished
                yield request, delivery
        finally:
            self._registry.end([request])

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Complete one prompt; many at once by `asyncio.gather`. Cancelling the task ends the request."""
        stream = self.astream(prompt, params, request_id=request_id, cache_salt=cache_salt)
        async with contextlib.aclosing(stream):
            async for output in stream:
                if output.finished:
                    return output
        raise AssertionError("a stream ends with a finished output")

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's own chat template.

        Errors are those of `generate`: one of several fails alone. Raises `RequestError` if there is no template.
        """
        tokenizer = self._registry.need_tokenizer("chat")
        conversations: list[Any] = messages if messages and isinstance(messages[0], list) else [messages]
        prompts: list[Prompt | RequestError] = []
        for conversation in conversations:
            try:
                prompts.append(tokenizer.apply_chat_template(conversation))
            except RequestError as error:
                if not tokenizer.has_chat_template:
                    raise
                prompts.append(error)
        return self._generate(prompts, len(prompts) == 1, params)

    def cancel(self, request_id: str) -> bool:
        """End a request of any thread; what it has generated is returned to its caller, with reason `abort`.

        Returns False if no such request is waiting or running.
        """
        return self._registry.cancel(request_id)

    def logits(self, token_ids: list[int], decode_from: int | None = None) -> np.ndarray:
        """f32 logits `[len, vocabulary]` at every position, computed through the paged cache.

        Args:
            token_ids: the sequence.
            decode_from: positions from here on are computed one at a time, as decoding does; by default all are
                computed as chunks of prefill.
        """
        tokens = check_tokens(token_ids, self.dims.config.vocab_size)
        start = len(tokens) if decode_from is None else decode_from
        if not 0 <= start <= len(tokens):
            raise RequestError(f"decode_from={decode_from} must be between 0 and the {len(tokens)} tokens given")
        return self._dispatcher.call(sequence_logits, self._engine, tokens, start).result()


def _end_request(registry: "weakref.ref[RequestRegistry]", request: Request) -> None:
    """A stream is dropped: its request ends with it. Keeps no engine alive."""
    if (owner := registry()) is not None:
        owner.end([request])
