"""The offline API: a model on this machine's devices, ready to generate."""

import contextlib
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from amoeba_jax.checkpoint import Checkpoint, open_resolved, resolve_model
from amoeba_jax.checkpoint.config_only import RandomCheckpoint
from amoeba_jax.checkpoint.orbax_dir import OrbaxCheckpoint, save
from amoeba_jax.config import EngineConfig
from amoeba_jax.engine.dispatcher import Dispatcher
from amoeba_jax.engine.engine import Engine
from amoeba_jax.engine.reports import instance_views, memory_report
from amoeba_jax.engine.sequence import Sequence
from amoeba_jax.engine.weights import LoadChunks, check_checkpoint, checkpoint_reader, random_reader
from amoeba_jax.errors import EngineClosedError, RequestError
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.decoder import model_specs
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from amoeba_jax.platform import enable_compile_cache, resolve_dtype, serving_devices
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.tokenizer import DetokenizeStream, Tokenizer
from amoeba_jax.views import InstanceView, MemoryReport

Prompt = str | list[int]
Message = dict[str, Any]


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
        resolved = resolve_model(self.config.model)
        self.name = resolved.name
        source: OrbaxCheckpoint | RandomCheckpoint | Checkpoint
        if self.config.load_format == "random":
            source = RandomCheckpoint(resolved.path)
        elif resolved.kind == "orbax":
            source = OrbaxCheckpoint(resolved.path)
        else:
            source = open_resolved(resolved)
        try:
            self._hf_config = source.config
            self._directory = source.directory
            model_config = ModelConfig.from_hf(source.config)
            devices = serving_devices(self.config.num_devices)
            enable_compile_cache(self.config.compile_cache)
            self.dims = ModelDims(
                config=model_config,
                max_tp=self.config.max_tp,
                page_size=self.config.page_size,
                dtype=resolve_dtype(self.config.dtype, model_config.dtype, devices[0].platform),
                transform_attention=self.config.transform_attention,
            )
            self.tokenizer = _load_tokenizer(self._directory)
            load: LoadChunks
            if isinstance(source, OrbaxCheckpoint):
                load = source.reader(self.dims)
            elif isinstance(source, RandomCheckpoint):
                load = random_reader(self.dims, self.config.seed)
            else:
                check_checkpoint(source, self.dims)
                load = checkpoint_reader(source, self.dims)
            with self._bar("loading weights", len(model_specs(self.dims))) as advance:
                engine = Engine(self.config, self.dims, devices, load, source.release, lambda _: advance())
        finally:
            source.close()
        self._engine = engine
        self._dispatcher = Dispatcher(engine)
        self._finalizer = weakref.finalize(self, self._dispatcher.close)
        self._ids = itertools.count()
        self._ids_lock = threading.Lock()

    # Generation

    def generate(
        self, prompts: Prompt | list[str] | list[list[int]], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Complete one or many prompts (texts or token ids), and return when all are done, in the same order.

        Raises `RequestError` before anything runs if a prompt cannot be served; `KeyboardInterrupt` ends the
        requests and leaves the engine usable.
        """
        params = params or SamplingParams()
        requests = [self._request(prompt, params) for prompt in _as_prompts(prompts)]
        with self._bar("generating", len(requests)) as advance:
            try:
                # All in one call: steps would run between several, with batches of chance sizes (and compile those).
                sequences = [request.sequence for request in requests]
                self._dispatcher.call(self._engine.submit, sequences).result()
                outputs = []
                for request in requests:
                    outputs.append(request.wait())
                    advance()
            except BaseException:
                self._abort(requests)
                raise
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Outputs as they grow: each holds everything so far and, in `new_text`, what was added.

        A bad prompt raises `RequestError` here; the request starts with the loop, and leaving the loop early ends it.
        """
        return self._stream(self._request(prompt, params or SamplingParams()))

    def _stream(self, request: "_Request") -> Iterator[RequestOutput]:
        try:
            self._dispatcher.call(self._engine.submit, [request.sequence]).result()
            yield from request.updates()
        finally:
            self._abort([request])

    def chat(
        self, messages: list[Message] | list[list[Message]], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's own chat template."""
        tokenizer = self._need_tokenizer("chat")
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        return self.generate([tokenizer.apply_chat_template(c) for c in conversations], params)  # type: ignore[arg-type]

    def logits(self, token_ids: list[int], decode_from: int | None = None) -> np.ndarray:
        """f32 logits `[len, vocabulary]` at every position, computed through the paged cache.

        Args:
            token_ids: the sequence.
            decode_from: positions from here on are computed one at a time, as decoding does; by default all are
                computed as chunks of prefill.
        """
        tokens = self._check_tokens(token_ids)
        start = len(tokens) if decode_from is None else decode_from
        if not 0 <= start <= len(tokens):
            raise RequestError(f"decode_from={decode_from} must be between 0 and the {len(tokens)} tokens given")
        return self._dispatcher.call(self._engine.logits, tokens, start).result()

    # Layout, memory, life cycle

    @property
    def instances(self) -> tuple[InstanceView, ...]:
        """The serving replicas as they are now."""
        return self._dispatcher.call(instance_views, self._engine).result()

    def memory(self) -> MemoryReport:
        """Who owns which bytes on each device."""
        return self._dispatcher.call(memory_report, self._engine).result()

    def set_layout(self, tensor_parallel_size: int) -> float:
        """Regroup the devices into instances of another degree; returns the seconds it took.

        Weights stay where they are and are only viewed differently. No request may be waiting or running
        (`RequestError`).
        """
        return self._dispatcher.call(self._engine.set_layout, tensor_parallel_size).result()

    def warmup(self, tensor_parallel_sizes: list[int] | None = None) -> int:
        """Compile every executable that serving at the given degrees (default: the present one) can need.

        Returns how many programs were compiled or loaded from the compile cache. The layout is the same afterwards.
        Raises `RequestError` if requests are waiting or running, `MemoryBudgetError` if the programs' temporaries
        do not fit the budget.
        """
        engine = self._engine
        degrees = tensor_parallel_sizes or [engine.tensor_parallel_size]
        with self._bar("compiling", engine.count_programs(degrees)) as advance:
            return self._dispatcher.call(engine.warmup, degrees, advance).result()

    def save(self, directory: str | Path) -> None:
        """Save the model in its loaded form; `LLM(directory)` loads it again, in this or another layout."""
        self._dispatcher.call(save, Path(directory), self._engine.weights, self._hf_config, self._directory).result()

    def close(self) -> None:
        """End running requests and free the device memory. May be called twice."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Internals

    def _request(self, prompt: Prompt, params: SamplingParams) -> "_Request":
        text = prompt if isinstance(prompt, str) else None
        token_ids = self._need_tokenizer("a text prompt").encode(prompt) if isinstance(prompt, str) else prompt
        tokens = self._check_tokens(token_ids)
        self._engine.check_request(len(tokens), params.max_tokens)
        with self._ids_lock:
            request_id = next(self._ids)
        detokenizer = self.tokenizer.stream(params.skip_special_tokens) if self.tokenizer else None
        eos = self.tokenizer.eos_token_ids if self.tokenizer else frozenset()
        seed = params.seed if params.seed is not None else (self.config.seed + request_id) % 2**32
        return _Request(request_id, tokens, text, params, seed, eos, detokenizer)

    def _check_tokens(self, token_ids: list[int]) -> tuple[int, ...]:
        vocabulary = self.dims.config.vocab_size
        if not isinstance(token_ids, list | tuple | np.ndarray):
            raise RequestError(f"a prompt must be a text or a list of token ids, got {type(token_ids).__name__}")
        if len(token_ids) == 0:
            raise RequestError("the prompt is empty: give at least one token")
        for position, token in enumerate(token_ids):
            is_integer = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if not is_integer or not 0 <= token < vocabulary:
                raise RequestError(
                    f"token id {token!r} at position {position} is outside the vocabulary: it must be an "
                    f"integer in [0, {vocabulary})"
                )
        return tuple(int(token) for token in token_ids)

    def _abort(self, requests: "list[_Request]") -> None:
        unfinished = {request.sequence.request_id for request in requests if not request.sequence.finished}
        if unfinished:
            # Not waited for: the garbage collector may run this in any thread, the dispatcher's own included. Calls
            # are served in order, so whatever is asked next sees the pages free.
            with contextlib.suppress(EngineClosedError):
                self._dispatcher.call(self._engine.abort, unfinished)

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and the model has no tokenizer.json: give token ids")
        return self.tokenizer

    @contextlib.contextmanager
    def _bar(self, description: str, total: int) -> Iterator[Callable[[], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, disable=not self._progress, transient=True) as bar:
            task = bar.add_task(description, total=total)
            yield lambda: bar.advance(task)


class _Request:
    """The caller's side of a request: turns what the dispatcher thread reports into outputs."""

    def __init__(
        self,
        request_id: int,
        tokens: tuple[int, ...],
        text: str | None,
        params: SamplingParams,
        seed: int,
        eos_token_ids: frozenset[int],
        detokenizer: DetokenizeStream | None,
    ):
        self._news: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self._prompt = text
        self._detokenizer = detokenizer
        self._text = ""
        self._taken = 0
        self.sequence = Sequence(request_id, tokens, params, seed, self._on_token, eos_token_ids)

    def _on_token(self, sequence: Sequence) -> None:
        self._news.put((len(sequence.output), sequence.finished))

    def wait(self) -> RequestOutput:
        """The finished output."""
        while True:
            count, finished = self._news.get()
            if finished:
                return self._finish(count)

    def _finish(self, count: int) -> RequestOutput:
        if self.sequence.error is not None:
            raise EngineClosedError(f"the engine failed: {self.sequence.error}") from self.sequence.error
        return self._output(count, True)

    def updates(self) -> Iterator[RequestOutput]:
        """Outputs as tokens arrive; the last one is finished. Raises what ended the request, if it failed."""
        finished = False
        while not finished:
            count, finished = self._news.get()
            yield self._finish(count) if finished else self._output(count, False)

    def _output(self, count: int, finished: bool) -> RequestOutput:
        sequence = self.sequence
        token_ids = tuple(sequence.output[:count])
        new_text = ""
        if self._detokenizer is not None:
            stopped = finished and sequence.finish_reason == "stop"
            shown = token_ids[self._taken : count - 1 if stopped else count]  # the stop token is not text
            new_text = "".join(self._detokenizer.push(token) for token in shown)
            self._taken = count
            if finished:
                new_text += self._detokenizer.flush()
            self._text += new_text
        completion = CompletionOutput(self._text, token_ids, sequence.finish_reason if finished else None)
        return RequestOutput(
            sequence.request_id, self._prompt, sequence.prompt, (completion,), self._metrics(), new_text
        )

    def _metrics(self) -> RequestMetrics:
        s = self.sequence
        tpot = None
        if s.finished_at is not None and s.first_token_at is not None and len(s.output) > 1:
            tpot = (s.finished_at - s.first_token_at) / (len(s.output) - 1)
        return RequestMetrics(
            arrival=s.arrival,
            queue_s=None if s.started_at is None else s.started_at - s.arrival,
            ttft_s=None if s.first_token_at is None else s.first_token_at - s.arrival,
            tpot_s=tpot,
        )


def _load_tokenizer(directory: Path | None) -> Tokenizer | None:
    """The model's tokenizer, or None where it has none: such a model takes token ids only."""
    if directory is None or not (directory / "tokenizer.json").exists():
        return None
    return Tokenizer.from_directory(directory)


def _as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise RequestError(f"prompts must be a text, token ids, or a list of either, got {type(prompts).__name__}")
    if prompts and isinstance(prompts[0], int | np.integer):
        return [list(prompts)]
    return list(prompts)
