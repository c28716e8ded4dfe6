"""The offline API: a model on this machine's devices, ready to generate."""

import asyncio
import contextlib
import itertools
import queue
import secrets
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from amoeba_jax.accumulate import OutputAccumulator, wait_for, wait_for_all
from amoeba_jax.compile_cache import enable_compile_cache
from amoeba_jax.config import EngineConfig
from amoeba_jax.engine.dispatcher import Dispatcher
from amoeba_jax.engine.engine import Engine
from amoeba_jax.engine.logits import sequence_logits
from amoeba_jax.engine.reports import engine_stats, executable_infos, instance_views, memory_report
from amoeba_jax.engine.scheduler_hook import SchedulerHook
from amoeba_jax.engine.warmup import count_programs, warm_up
from amoeba_jax.errors import EngineClosedError, NotANumberError, RequestError, RequestFailedError
from amoeba_jax.instances.sequence import Sequence, Update
from amoeba_jax.model_source import ModelSource
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.decoder import model_specs
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.output_thread import OutputThread
from amoeba_jax.outputs import RequestDelta, RequestOutput
from amoeba_jax.platform import resolve_dtype, serving_devices
from amoeba_jax.prompts import Prompt, as_prompts, check_tokens, failed_output, one_each
from amoeba_jax.request import Delivery, Request
from amoeba_jax.sampling.rows import bad_word_ids, sample_seed, sampling_row
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.shorten import shorten
from amoeba_jax.stats import EngineStats
from amoeba_jax.tokenizer import Tokenizer
from amoeba_jax.transform.job import TransformOptions
from amoeba_jax.transform.report import TransformReport, TransformVariant
from amoeba_jax.views import ExecutableInfo, InstanceView, MemoryReport
from amoeba_jax.weights.saving import save

Message = dict[str, Any]
P = TypeVar("P", bound=SchedulerHook)
_BYTES = (DownloadColumn, TransferSpeedColumn, TimeRemainingColumn)


class LLM:
    """A language model on `num_devices` devices, as instances of `tensor_parallel_size` devices each.

    `LLM(model=..., num_devices=4, tensor_parallel_size=1, ...)`: every field of `EngineConfig` is accepted by name.
    Construction loads the weights onto every device; executables are compiled on first use, or all at once by
    `warmup()`, and kept in a cache across processes. Close it, or use it as a context manager, to free the memory.

    Methods may be called from several threads.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError, MemoryBudgetError: on construction, naming the value
            and the limit.
    """

    def __init__(self, model: str | Path = EngineConfig.model, *, progress: bool = True, **settings: Any):
        self.config = EngineConfig.from_fields({"model": model, **settings})
        self._progress = progress
        source = ModelSource(self.config)
        try:
            self.name = source.name
            self._hf_config, self._directory = source.hf_config, source.directory
            model_config = ModelConfig.from_hf(source.hf_config)
            devices = serving_devices(self.config.num_devices)
            enable_compile_cache(self.config.compile_cache, self.config.compile_cache_size)
            self.dims = ModelDims(
                config=model_config,
                max_tp=self.config.max_tp,
                page_size=self.config.page_size,
                dtype=resolve_dtype(self.config.dtype, model_config.dtype, devices[0].platform),
                transform_attention=self.config.transform_attention,
            )
            self.tokenizer = _load_tokenizer(self._directory)
            sizes = {name: spec.num_bytes(self.dims.dtype) for name, (_, spec) in model_specs(self.dims).items()}
            with self._bar("loading weights", sum(sizes.values()), _BYTES) as advance:
                open_weights = partial(source.weights, self.dims)
                engine = Engine(self.config, self.dims, devices, open_weights, lambda name: advance(sizes[name]))
        finally:
            source.close()
        self._engine = engine
        self._dispatcher = Dispatcher(engine)
        self._outputs = OutputThread(partial(_end_sequence, self._dispatcher, engine), self._dispatcher.wake)
        self._dispatcher.hold = self._outputs
        self._finalizer = weakref.finalize(self, _close, self._dispatcher, self._outputs)
        self._ids = itertools.count()
        # Makes the numbers different from ids that callers may choose, and from those of other processes.
        self._id_suffix = secrets.token_hex(4)
        self._requests: dict[str, Request] = {}
        # Reentrant: the garbage collector may end an abandoned stream in a thread that is in here.
        self._lock = threading.RLock()

    # Generation

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
        settings = one_each("params", params, SamplingParams, len(prompt_list))
        ids = one_each("request_ids", request_ids, str, len(prompt_list))
        deliveries: list[tuple[Request, queue.SimpleQueue[Delivery]] | RequestOutput] = []
        requests: list[Request] = []
        try:
            for prompt, prompt_params, request_id in zip(prompt_list, settings, ids, strict=True):
                arrived: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
                try:
                    request = self._request(
                        prompt, prompt_params, arrived.put, request_id, cache_salt, every_token=False
                    )
                    self._register(request)
                    requests.append(request)
                    deliveries.append((request, arrived))
                except RequestError as error:
                    if alone:
                        raise
                    deliveries.append(failed_output(prompt, request_id, error))
            with self._bar("generating", len(prompt_list)) as advance:
                self._submit(requests)
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
            self._end(requests)
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
        request = self._request(prompt, params, deliveries.put, request_id, cache_salt)
        self._register(request)
        outputs = self._stream(request, deliveries)
        # A generator that is dropped before its loop starts runs no `finally`.
        weakref.finalize(outputs, _end_request, weakref.ref(self), request).atexit = False
        return outputs

    def _stream(self, request: Request, deliveries: "queue.SimpleQueue[Delivery]") -> Iterator[RequestOutput]:
        try:
            self._submit([request])
            yield from wait_for_all(request, deliveries)
        finally:
            self._end([request])

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
                yield accumulator.add(delta)

    async def astream_deltas(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        deadline: float | None = None,
        client: str = "",
    ) -> AsyncGenerator[tuple[Request, RequestDelta], None]:
        """`astream` with what was added alone, and the request: for servers, whose work for a token must not grow with
        what came before it. Arguments and errors are those of `astream`.

        While several clients have requests, each has an equal share of slots and of the KV cache: `client` names whom
        this request is counted for.
        """
        deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        deliver = self._outputs.in_loop(loop, deliveries.put_nowait)
        make = partial(self._request, prompt, params, deliver, request_id, cache_salt, deadline=deadline, client=client)
        # Long lists take a while to check, and words to tokenize.
        request = await loop.run_in_executor(None, make)
        self._register(request)
        try:
            await asyncio.wrap_future(self._submit_soon([request]))
            finished = False
            while not finished:
                delivery = await deliveries.get()
                if isinstance(delivery, BaseException):
                    raise delivery
                finished = delivery.finished
                yield request, delivery
        finally:
            self._end([request])

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
        """Answer one conversation, or several, through the model's own chat template."""
        tokenizer = self._need_tokenizer("chat")
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        return self.generate([tokenizer.apply_chat_template(c) for c in conversations], params)  # type: ignore[arg-type]

    def cancel(self, request_id: str) -> bool:
        """End a request of any thread; what it has generated is returned to its caller, with reason `abort`.

        Returns False if no such request is waiting or running.
        """
        with self._lock:
            request = self._requests.get(request_id)
        if request is None:
            return False
        self._dispatcher.call(self._engine.finish, request.sequences, "abort").result()
        return True

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

    # Layout, memory, life cycle

    @property
    def num_devices(self) -> int:
        """Devices that it serves on."""
        return self.config.num_devices

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output in tokens: the model's context, or what the largest layout holds."""
        return self._engine.max_model_len

    @property
    def stats(self) -> EngineStats:
        """Running totals: steps, tokens computed, tokens found in the prefix cache, preemptions, compiled programs."""
        stats = self._dispatcher.call(engine_stats, self._engine).result()
        return replace(stats, output_backlog=self._outputs.backlog, output_stalls=self._dispatcher.num_held)

    @property
    def instances(self) -> tuple[InstanceView, ...]:
        """The serving replicas as they are now."""
        return self._dispatcher.call(instance_views, self._engine).result()

    def memory(self) -> MemoryReport:
        """Who owns which bytes on each device."""
        return self._dispatcher.call(memory_report, self._engine).result()

    def transform(
        self,
        tensor_parallel_size: int,
        devices: list[int] | None = None,
        variant: str = TransformVariant.IN_PLACE_OVERLAPPED,
        release_weights: bool = True,
        layers_per_step: int = 1,
        wait_for_programs: bool = True,
    ) -> TransformReport:
        """Merge or split instances while requests run; returns when it is done.

        Running requests go on: nothing of them is lost, or computed again unless the variant is `restart` or a device
        runs out of pages, as it may at any time. Those whose prompt is computed generate a token in every step of the
        transformation; others, and new ones, wait on the devices that change until it has ended.

        Args:
            tensor_parallel_size: degree that instances have afterwards.
            devices: those of the instances that change: whole instances, and whole groups of the new degree. Default:
                all devices.
            variant: how; see `TransformVariant`.
            release_weights: whether merging instances give FFN weights that their ranks do not need to the KV cache.
                Without it, weights stay where they are, and the instance holds as many tokens as those it was made of.
                Splitting restores what the lower degree needs.
            layers_per_step: layers that change between two steps.
            wait_for_programs: whether to wait for a degree that `warmup(background=True)` has not come to yet. Requests
                run as before until its programs are there.

        Raises:
            LayoutError: if such instances cannot be made of these devices.
            RequestError: if running or waiting requests would not fit, or the devices are being transformed already.
                Nothing has changed then.
            ProgramsNotReadyError: the same, for a degree that is not to be waited for.
            NotCompiledError: the same, for programs that were not compiled, with `strict_compile`.
            TransformError: if it failed part-way; the message says how it ended.
        """
        try:
            how = TransformVariant(variant)
        except ValueError:
            known = ", ".join(TransformVariant)
            raise RequestError(f"variant={shorten(variant)} is not known: it must be one of {known}") from None
        if isinstance(layers_per_step, bool) or not isinstance(layers_per_step, int) or layers_per_step < 1:
            raise RequestError(f"layers_per_step={shorten(layers_per_step)} must be a positive integer")
        chosen = tuple(range(self.config.num_devices)) if devices is None else tuple(devices)
        options = TransformOptions(tensor_parallel_size, chosen, how, release_weights, layers_per_step)
        return self._dispatcher.call(self._engine.transform, options, wait_for_programs).result().result()

    def set_layout(self, tensor_parallel_size: int) -> float:
        """`transform` on all devices of an engine without requests; returns the seconds it took.

        Raises `RequestError` while a request is waiting or running.
        """
        return self._dispatcher.call(self._engine.set_layout, tensor_parallel_size).result()

    def warmup(self, tensor_parallel_sizes: list[int] | None = None, *, background: bool = False) -> int:
        """Compile every program that serving at the given degrees (default: the present one) can need, and those of
        transformations between them, and run each once.

        Returns how many programs were compiled or loaded from the compile cache. The layout is the same afterwards.
        After all degrees of the engine, nothing is compiled any more while requests wait, or, with `strict_compile`,
        refused; `stats.late_programs` counts. Raises `RequestError` if requests are waiting or running,
        `MemoryBudgetError` if the programs' temporaries do not fit the budget.

        With `background` it returns at once how many are missing. They are compiled while requests run, with half of
        the threads and lower priority, and not run; `stats.degrees` tells which degrees are ready.
        """
        engine = self._engine
        degrees = tensor_parallel_sizes or sorted({instance.tp for instance in engine.instances})
        if background:
            return self._dispatcher.call(engine.warm_up_beside, degrees).result()
        count = self._dispatcher.call(count_programs, engine, degrees).result()
        with self._bar("compiling and running programs", 2 * count) as advance:
            return self._dispatcher.call(warm_up, engine, degrees, advance).result().made

    def executables(self) -> tuple[ExecutableInfo, ...]:
        """All programs that are compiled now, with their bytes and what they took to compile."""
        return self._dispatcher.call(executable_infos, self._engine).result()

    def save(self, directory: str | Path) -> None:
        """Save the model in its loaded form; `LLM(directory)` loads it again, in this or another layout."""
        weights = self._engine.cluster.weights
        self._dispatcher.call(save, Path(directory), weights, self._hf_config, self._directory).result()

    def use_scheduler_hook(self, make: Callable[[Engine], P]) -> P:
        """Let something else than the engine decide where requests go and when instances change, from now on.

        `make(engine)` is called in the dispatcher thread, and what it makes is returned too. Requests may then be
        longer than an instance of the present layout holds: the hook can change it.
        """

        def install() -> P:
            self._engine.scheduler_hook = hook = make(self._engine)
            return hook

        return self._dispatcher.call(install).result()

    def remove_scheduler_hook(self) -> None:
        """Take back `use_scheduler_hook`. For an engine without requests: one that waits could be too long for it."""

        def remove() -> None:
            self._engine.scheduler_hook = None

        self._dispatcher.call(remove).result()

    def close(self) -> None:
        """End running requests and free the device memory. May be called twice."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Internals

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        deliver: Callable[[Delivery], None],
        request_id: str | None,
        cache_salt: str | None,
        every_token: bool = True,
        deadline: float | None = None,
        client: str = "",
    ) -> Request:
        """A request that is checked, to be registered, submitted and ended by the caller. Changes nothing."""
        params = params or SamplingParams()
        text = prompt if isinstance(prompt, str) else None
        token_ids = prompt if text is None else self._need_tokenizer("a text prompt").encode(text)
        tokens = check_tokens(token_ids, self.dims.config.vocab_size)
        self._engine.check_request(len(tokens), params.max_tokens)
        vocabulary = self.dims.config.vocab_size
        params.check_vocabulary(vocabulary)
        bad_words = bad_word_ids(params.bad_words, self._need_tokenizer("bad_words")) if params.bad_words else ()
        if params.stop:
            self._need_tokenizer("stop")
        eos = self.tokenizer.eos_token_ids if self.tokenizer else frozenset()
        sampling = sampling_row(params, 0, vocabulary, eos, bad_words)
        number = next(self._ids)

        def sink(update: Update) -> None:
            self_outputs.put(request, update)

        self_outputs = self._outputs  # not `self`: a sequence must not keep an `LLM` alive
        sequences: list[Sequence] = []
        for index in range(params.n):
            if params.seed is None:
                seed = sample_seed(self.config.seed, number, index)
            else:
                seed = (params.seed + index) % 2**32
            sequences.append(
                Sequence(
                    request_id if request_id is not None else f"{number}-{self._id_suffix}",
                    tokens,
                    params,
                    sampling.with_seed(seed),
                    sink,
                    index=index,
                    eos_token_ids=eos,
                    cache_salt=cache_salt,
                    leader=sequences[0] if sequences else None,
                    deadline=deadline,
                    client=client,
                )
            )
        sequences[0].siblings = sequences[1:]
        request = Request(text, sequences, self.tokenizer, deliver, every_token)
        return request

    def _register(self, request: Request) -> None:
        """Let a request be known by its id. Raises `RequestError` if that is taken."""
        with self._lock:
            if request.id in self._requests:
                raise RequestError(f"request_id {shorten(request.id)} is taken by a request that is not finished yet")
            self._requests[request.id] = request

    def _submit_soon(self, requests: list[Request]) -> "Future[None]":
        # All in one call: steps would run between several, with batches of chance sizes (and compile those).
        return self._dispatcher.call(self._engine.submit, [request.sequences[0] for request in requests])

    def _submit(self, requests: list[Request]) -> None:
        self._submit_soon(requests).result()

    def _end(self, requests: list[Request]) -> None:
        """Forget requests; what has not finished is aborted."""
        with self._lock:
            for request in requests:
                if self._requests.get(request.id) is request:  # the id may be another's by now
                    del self._requests[request.id]
        unfinished = [s for request in requests for s in request.sequences if not s.finished]
        if unfinished:
            # Not waited for: the garbage collector may run this in any thread, the dispatcher's own included. Calls
            # are served in order, so whatever is asked next sees the pages free.
            with contextlib.suppress(EngineClosedError):
                self._dispatcher.call(self._engine.finish, unfinished, "abort")

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and the model has no tokenizer.json: give token ids")
        return self.tokenizer

    @contextlib.contextmanager
    def _bar(
        self, description: str, total: int, amount: tuple[type[ProgressColumn], ...] = (MofNCompleteColumn,)
    ) -> Iterator[Callable[..., None]]:
        """A progress bar, as a function that advances it by one or by that many."""
        columns = (TextColumn("{task.description}"), BarColumn(), *(column() for column in amount), TimeElapsedColumn())
        # Without ipywidgets rich can only warn in a notebook: plain text works there too.
        console = Console(stderr=True, force_jupyter=None if find_spec("ipywidgets") else False)
        with Progress(*columns, console=console, disable=not self._progress, transient=True) as bar:
            task = bar.add_task(description, total=total)
            yield partial(bar.advance, task)


def _end_sequence(dispatcher: Dispatcher, engine: Engine, sequence: Sequence, stop: str | None) -> None:
    """A stop string has come, or the request failed (None): the engine need not go on. Not waited for."""
    with contextlib.suppress(EngineClosedError):
        dispatcher.call(engine.finish, [sequence], "abort" if stop is None else "stop", stop)


def _end_request(llm: "weakref.ref[LLM]", request: Request) -> None:
    """A stream is dropped: its request ends with it. Keeps no `LLM` alive."""
    if (owner := llm()) is not None:
        owner._end([request])


def _close(dispatcher: Dispatcher, outputs: OutputThread) -> None:
    dispatcher.close()
    outputs.close()


def _load_tokenizer(directory: Path | None) -> Tokenizer | None:
    """The model's tokenizer, or None where it has none: such a model takes token ids only."""
    if directory is None or not (directory / "tokenizer.json").exists():
        return None
    return Tokenizer.from_directory(directory)
