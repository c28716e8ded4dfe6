"""The offline API: a model on this machine's devices, ready to generate."""

import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from amoeba_jax.checkpoint import Checkpoint, open_checkpoint, resolve_model
from amoeba_jax.checkpoint.config_only import RandomCheckpoint
from amoeba_jax.checkpoint.orbax_dir import OrbaxCheckpoint, save
from amoeba_jax.config import EngineConfig
from amoeba_jax.engine.dispatcher import Dispatcher
from amoeba_jax.engine.engine import Engine
from amoeba_jax.engine.sequence import Sequence
from amoeba_jax.engine.weights import LoadChunks, check_checkpoint, checkpoint_reader, random_reader
from amoeba_jax.errors import RequestError
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.decoder import model_specs
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from amoeba_jax.platform import enable_compile_cache, resolve_dtype, serving_devices
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.tokenizer import DetokenizeStream, Tokenizer
from amoeba_jax.views import InstanceView, MemoryEntry, MemoryReport

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
            source = open_checkpoint(self.config.model)
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
        self.tokenizer = _load_tokenizer(self._directory)
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
                self._dispatcher.call(lambda: [self._engine.submit(sequence) for sequence in sequences]).result()
                outputs = []
                for request in requests:
                    *_, last = request.updates()
                    outputs.append(last)
                    advance()
            except BaseException:
                self._abort(requests)
                raise
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Outputs as they grow: each holds everything so far and, in `new_text`, what was added.

        Leaving the loop early ends the request.
        """
        request = self._request(prompt, params or SamplingParams())
        self._dispatcher.call(self._engine.submit, request.sequence).result()
        return self._stream(request)

    def _stream(self, request: "_Request") -> Iterator[RequestOutput]:
        try:
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
        self._engine.check_request(len(tokens), 0)
        start = len(tokens) if decode_from is None else decode_from
        if not 0 <= start <= len(tokens):
            raise RequestError(f"decode_from={decode_from} must be between 0 and the {len(tokens)} tokens given")
        return self._dispatcher.call(self._engine.logits, tokens, start).result()

    # Layout, memory, life cycle

    @property
    def instances(self) -> tuple[InstanceView, ...]:
        """The serving replicas as they are now."""
        return self._dispatcher.call(self._instance_views).result()

    def memory(self) -> MemoryReport:
        """Who owns which bytes on each device."""
        return self._dispatcher.call(self._memory_report).result()

    def set_layout(self, tensor_parallel_size: int) -> float:
        """Regroup the devices into instances of another degree; returns the seconds it took.

        Weights stay where they are and are only viewed differently. No request may be waiting or running
        (`RequestError`).
        """
        return self._dispatcher.call(self._engine.set_layout, tensor_parallel_size).result()

    def warmup(self, tensor_parallel_sizes: list[int] | None = None) -> int:
        """Compile every executable that serving at the given degrees (default: the present one) can need.

        Returns how many programs were compiled or loaded from the compile cache. Raises `RequestError` if
        requests are running.
        """
        present = self._engine.tensor_parallel_size
        degrees = tensor_parallel_sizes or [present]
        count = 0
        try:
            for tp in degrees:
                if tp != self._engine.tensor_parallel_size:
                    self.set_layout(tp)
                shapes = self._engine.buckets()
                instances, segments = len(self._engine.instances), len({p.shape for p in self._engine.plans})
                with self._bar(f"compiling TP{tp}", len(shapes) * instances * segments) as advance:
                    programs: list[Any] = []

                    def done(program: Any, programs: list[Any] = programs, advance: Callable[[], None] = advance):
                        programs.append(program)
                        advance()

                    self._dispatcher.call(self._engine.compile, shapes, done).result()
                count += len(programs)
        finally:
            if self._engine.tensor_parallel_size != present:
                self.set_layout(present)
        return count

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
        if isinstance(prompt, str):
            tokens = tuple(self._need_tokenizer("a text prompt").encode(prompt))
            text: str | None = prompt
        else:
            tokens, text = self._check_tokens(prompt), None
        if not tokens:
            raise RequestError("the prompt is empty: give at least one token")
        self._engine.check_request(len(tokens), params.max_tokens)
        with self._ids_lock:
            request_id = next(self._ids)
        detokenizer = self.tokenizer.stream(params.skip_special_tokens) if self.tokenizer else None
        eos = self.tokenizer.eos_token_ids if self.tokenizer else frozenset()
        seed = params.seed if params.seed is not None else (self.config.seed + request_id) % 2**32
        return _Request(request_id, tokens, text, params, seed, eos, detokenizer)

    def _check_tokens(self, token_ids: list[int]) -> tuple[int, ...]:
        vocabulary = self.dims.config.vocab_size
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token")
        for position, token in enumerate(token_ids):
            if not isinstance(token, int | np.integer) or not 0 <= token < vocabulary:
                raise RequestError(
                    f"token id {token!r} at position {position} is outside the vocabulary: it must be an "
                    f"integer in [0, {vocabulary})"
                )
        return tuple(int(token) for token in token_ids)

    def _abort(self, requests: "list[_Request]") -> None:
        unfinished = {request.sequence.request_id for request in requests if not request.sequence.finished}
        if unfinished and self._finalizer.alive:
            self._dispatcher.call(self._engine.abort, unfinished).result()

    def _instance_views(self) -> tuple[InstanceView, ...]:
        waiting = len(self._engine.waiting)
        return tuple(
            InstanceView(
                id=instance.id,
                devices=instance.group.device_indices,
                tensor_parallel_size=instance.tp,
                running=len(instance.running),
                waiting=waiting,
                kv_used_pages=instance.pages.num_total_pages - instance.pages.num_free_pages,
                kv_total_pages=instance.pages.num_total_pages,
            )
            for instance in self._engine.instances
        )

    def _memory_report(self) -> MemoryReport:
        engine = self._engine
        entries = tuple(
            MemoryEntry(device, layer, owner, size)
            for device, ledger in enumerate(engine.ledgers)
            for (layer, owner), size in ledger.entries.items()
        )
        unit_bytes = engine.memory_plan.page_bytes // self.dims.max_tp * self.dims.config.num_layers
        used = tuple((a.total_units - a.free_units) * unit_bytes for a in engine.allocators)
        padding = {kind: padding.ratio for kind, padding in engine.weights.padding().items()}
        padding["kv cache"] = self.dims.heads.kv_padding
        ledger = engine.ledgers[0]
        return MemoryReport(ledger.budget_bytes, entries, used, sum(ledger.reserved.values()), padding)

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and the model has no tokenizer.json: give token ids")
        return self.tokenizer

    @contextmanager
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

    def updates(self) -> Iterator[RequestOutput]:
        """Outputs as tokens arrive; the last one is finished. Raises what ended the request, if it failed."""
        finished = False
        while not finished:
            count, finished = self._news.get()
            if self.sequence.error is not None:
                raise self.sequence.error
            yield self._output(count, finished)

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
