"""Python API: a model on the devices of this machine."""

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
    """Language model on `num_devices` devices, in instances of `tensor_parallel_size` devices each.

    `LLM(model=..., num_devices=4, tensor_parallel_size=1, ...)` accepts every field of `EngineConfig` by name. The
    constructor loads the weights onto every device. Programs are compiled on first use, or all at once by `warmup()`. A
    cache on disk keeps compiled programs. With `LLM(..., warmup=[1])`, programs are compiled while the weights are
    loaded, which is faster than `LLM(...).warmup([1])`. To free the memory, call `close()` or use the `LLM` as a
    context manager.

    All methods are thread-safe. Errors of the constructor name the value and the limit.

    Raises:
        ConfigError: a setting is not supported.
        ModelNotFoundError: the name or path of the model does not exist.
        CheckpointError: the files of the model are damaged, incomplete or not supported.
        MemoryBudgetError: the model does not fit in the memory budget.
    """

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        request_ids: list[str] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete one or many prompts and return their outputs, in the same order, when all are finished.

        If one of several prompts fails, its output has the message in `error`, and the other prompts are served. After
        a `KeyboardInterrupt` the requests are aborted and the engine is still usable.

        Args:
            prompts: one prompt or a list of prompts, each a text or a list of token ids.
            params: settings for all prompts, or a list with the settings of each prompt. Default: `SamplingParams()`.
            request_ids: one id for each prompt, for `cancel`. Default: generated ids.
            cache_salt: name of a group of requests. Cached prefixes are shared only inside a group.

        Raises:
            RequestError: an argument is malformed, or the only prompt cannot be served.
            NotANumberError: the logits for the only prompt are infinite or NaN.
            RequestFailedError: a program for the only prompt failed, or a device had too little memory.
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
        """Complete a list of prompts and return their outputs.

        `prompt_list` has an error in place of each invalid prompt. A prompt that fails gets an output with the error
        message. If `alone` is true, the list has one prompt, and its error is raised.
        """
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
                    except (RequestError, NotANumberError, RequestFailedError) as error:
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
        """Complete one prompt and yield its growing output.

        Each output has all text so far, and in `new_text` the text since the previous output. The request starts when
        the loop over the outputs starts. Leaving the loop early aborts the request. Arguments are the same as for
        `generate`. If the prompt cannot be served, the call raises `RequestError` before the loop starts.
        """
        deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        request = self._registry.make(prompt, params, deliveries.put, request_id, cache_salt)
        self._registry.register(request)
        outputs = self._stream(request, deliveries)
        # A generator that is dropped before its loop starts does not run `finally`.
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
        """Complete one prompt and yield its growing output, for `async for`. Arguments are the same as for `stream`.

        Leaving the loop or cancelling the task aborts the request. Raises `DeadlineError` if the request has not
        started when `time.monotonic()` reaches `deadline`.
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
        """Complete one prompt and yield `(request, delta)` pairs. A delta has the output since the previous delta.

        Servers use this method. In contrast to `astream`, the work for a token does not grow with the length of the
        output. Other arguments and errors are the same as for `astream`.

        Args:
            client: name of the client that sent the request. Clients get equal shares of slots and of the KV cache.
                If too many grammars of a client are being compiled, `QueueFullError` is raised. "": no limit.
            arrival: time when the request arrived, as a value of `time.monotonic()`. Latencies are measured from
                this time. None: now.
        """
        arrival = time.monotonic() if arrival is None else arrival
        deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        deliver = self._dispatcher.outputs.in_loop(loop, deliveries.put_nowait)
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
        if params is not None and params.structured is not None:
            compilation = self._registry.grammars().compile_soon(params.structured, client)
            if compilation is not None:
                await asyncio.shield(asyncio.wrap_future(compilation))  # other requests may wait for it
        # Checks and tokenization of long prompts would block the event loop.
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

    def load_grammars(self) -> None:
        """Load the vocabulary that constrained decoding needs. Servers call this before they accept requests.

        Without this call, the first constrained request loads the vocabulary and blocks all threads for up to 1 s.
        """
        self._registry.load_grammars()

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Complete one prompt. Cancelling the task aborts the request. Use `asyncio.gather` for many prompts."""
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
        """Answer one conversation or several, with the chat template of the model.

        Failures are reported as in `generate`. Raises `RequestError` if the model has no chat template.
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
        """Abort a request, also from another thread. Return False if no unfinished request has this id.

        The caller that started the request gets the output so far, with `finish_reason="abort"`.
        """
        return self._registry.cancel(request_id)

    def logits(self, token_ids: list[int], decode_from: int | None = None) -> np.ndarray:
        """Return the logits of every position, f32 `[len(token_ids), vocabulary]`. Uses the paged KV cache.

        Args:
            token_ids: tokens of the sequence.
            decode_from: first position to compute by decoding, one token at a time. Earlier positions are computed in
                chunks, as in a prompt. Default: all positions are computed in chunks.
        """
        tokens = check_tokens(token_ids, self.dims.config.vocab_size)
        start = len(tokens) if decode_from is None else decode_from
        if not 0 <= start <= len(tokens):
            raise RequestError(f"decode_from={decode_from} must be between 0 and the {len(tokens)} tokens given")
        return self._dispatcher.call(sequence_logits, self._engine, tokens, start).result()


def _end_request(registry: "weakref.ref[RequestRegistry]", request: Request) -> None:
    """Abort a request whose stream is garbage-collected."""
    if (owner := registry()) is not None:
        owner.end([request])
