"""A model on its devices: start-up, what it shows of itself, changes of its layout, and its end."""

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

from rich.progress import ProgressColumn

from amoeba_jax.compile_cache import enable_compile_cache
from amoeba_jax.config import EngineConfig
from amoeba_jax.engine.dispatcher import Dispatcher
from amoeba_jax.engine.engine import Engine
from amoeba_jax.engine.reports import engine_stats, executable_infos, instance_views, memory_report
from amoeba_jax.engine.scheduler_hook import SchedulerHook
from amoeba_jax.engine.warmup import count_programs, warm_up
from amoeba_jax.errors import EngineClosedError, RequestError
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.model_source import ModelSource
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.decoder import model_specs
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.output_thread import OutputThread
from amoeba_jax.platform import resolve_dtype, serving_devices
from amoeba_jax.progress import BYTES, COUNT, progress_bar
from amoeba_jax.request_registry import RequestRegistry
from amoeba_jax.shorten import shorten
from amoeba_jax.stats import EngineStats
from amoeba_jax.tokenizer import Tokenizer, model_eos_ids
from amoeba_jax.transform.options import RunningRequests, TransformOptions
from amoeba_jax.transform.report import TransformReport, TransformVariant
from amoeba_jax.views import ExecutableInfo, InstanceStatus, MemoryReport
from amoeba_jax.weights.saving import save

P = TypeVar("P", bound=SchedulerHook)


class EngineHandle:
    """An engine with its threads, and everything that one can do with it besides generating. See `LLM`."""

    def __init__(
        self,
        model: str | Path = EngineConfig.model,
        *,
        progress: bool = True,
        warmup: tuple[int, ...] | list[int] = (),
        **settings: Any,
    ):
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
            ends = model_eos_ids(self._directory, source.hf_config)
            ends |= self.tokenizer.eos_token_ids if self.tokenizer else frozenset()
            self.eos_token_ids = frozenset(token for token in ends if token < model_config.vocab_size)
            """Ids that end a generation: the model's and the tokenizer's."""
            sizes = {name: spec.num_bytes(self.dims.dtype) for name, spec in model_specs(self.dims).items()}
            with self._bar("loading weights", sum(sizes.values()), BYTES) as advance:
                open_weights = partial(source.weights, self.dims)
                engine = Engine(
                    self.config, self.dims, devices, open_weights, lambda name: advance(sizes[name]), tuple(warmup)
                )
        finally:
            source.close()
        self._engine = engine
        self._dispatcher = Dispatcher(engine)
        self._outputs = OutputThread(partial(_end_sequence, self._dispatcher, engine), self._dispatcher.wake)
        self._dispatcher.hold = self._outputs
        self._finalizer = weakref.finalize(self, _close, self._dispatcher, self._outputs)
        self._registry = RequestRegistry(
            engine, self._dispatcher, self._outputs, self.tokenizer, self.eos_token_ids, self.config.seed
        )
        if warmup:
            try:
                self.warmup(list(warmup))
            except BaseException:
                self.close()
                raise

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
    def instances(self) -> tuple[InstanceStatus, ...]:
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
        layers_per_step: int | Literal["auto"] = "auto",
        wait_for_programs: bool = True,
        running: RunningRequests = "migrate",
    ) -> TransformReport:
        """Merge or split instances while requests run; returns when it is done.

        Running requests go on: nothing of them is lost, or computed again unless the variant is `restart` or a device
        runs out of pages, as it may at any time. Those whose prompt is computed generate tokens throughout, in turn
        with chunks of prompts. New requests start wherever there is room, also on the devices that change.

        Args:
            tensor_parallel_size: degree that instances have afterwards.
            devices: those of the instances that change: whole instances, and whole groups of the new degree. Default:
                all devices.
            variant: how; see `TransformVariant`.
            release_weights: whether merging instances give FFN weights that their ranks do not need to the KV cache.
                Without it, weights stay where they are, and the instance holds as many tokens as those it was made of.
                Splitting restores what the lower degree needs. An instance that has the degree already stays as it is,
                with the weights that it has: split and merge it to release or restore them.
            layers_per_step: layers that change between two steps, rounded up to whole segments
                (`EngineConfig.segment_layers`); `"auto"`: one segment. If no request runs, all layers change at once.
            wait_for_programs: whether to wait for a degree that `warmup(background=True)` has not come to yet. Requests
                run as before until its programs are there.
            running: what becomes of the requests that run on instances that merge. `"migrate"`: they go on in the
                merged one. `"pause"`, with `release_weights=False`: they keep their pages and do not run; the merged
                instance serves others from the free pages, at once, and transforming it back to the degree before lets
                them go on where they were. Where others lack pages, those of cached prefixes are taken first, then
                those of the paused request that is served last, of the same priority or a lower one, which is computed
                again later. `"wait"`, also of instances that split: the change begins when they have ended, and no
                others start there meanwhile.

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
        is_count = isinstance(layers_per_step, int) and not isinstance(layers_per_step, bool) and layers_per_step > 0
        if running not in get_args(RunningRequests):
            known = ", ".join(get_args(RunningRequests))
            raise RequestError(f"running={shorten(running)} is not known: it must be one of {known}")
        if layers_per_step != "auto" and not is_count:
            raise RequestError(f"layers_per_step={shorten(layers_per_step)} must be a positive integer, or 'auto'")
        chosen = tuple(range(self.config.num_devices)) if devices is None else tuple(devices)
        options = TransformOptions(tensor_parallel_size, chosen, how, release_weights, layers_per_step, running)
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

        With `background` it returns at once how many are missing. They are compiled at lower priority, with all threads
        while no request runs, else with half of them, and not run; `stats.degrees` tells which degrees are ready.
        """
        engine = self._engine
        degrees = tensor_parallel_sizes or sorted({instance.tp for instance in engine.instances})
        if background:
            return self._dispatcher.call(engine.background_warmup.begin, degrees).result()
        count = self._dispatcher.call(count_programs, engine, degrees).result()
        with self._bar("compiling and running programs", 2 * count) as advance:
            return self._dispatcher.call(warm_up, engine, degrees, advance).result()

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _bar(
        self, description: str, total: int, amount: tuple[type[ProgressColumn], ...] = COUNT
    ) -> AbstractContextManager[Callable[..., None]]:
        return progress_bar(description, total, amount=amount, shown=self._progress)


def _end_sequence(dispatcher: Dispatcher, engine: Engine, sequence: Sequence, stop: str | None) -> None:
    """A stop string has come, or the request failed (None): the engine need not go on. Not waited for."""
    with contextlib.suppress(EngineClosedError):
        dispatcher.call(engine.finish, [sequence], "abort" if stop is None else "stop", stop)


def _close(dispatcher: Dispatcher, outputs: OutputThread) -> None:
    dispatcher.close()
    outputs.close()


def _load_tokenizer(directory: Path | None) -> Tokenizer | None:
    """The model's tokenizer, or None where it has none: such a model takes token ids only."""
    if directory is None or not (directory / "tokenizer.json").exists():
        return None
    return Tokenizer.from_directory(directory)
