"""Engine with its threads: start-up, state, transformations, warm-up and shutdown."""

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
from amoeba_jax.engine.engine import Engine, SchedulerHook
from amoeba_jax.engine.reports import engine_stats, executable_infos, expert_load_report, instance_views, memory_report
from amoeba_jax.engine.warmup import count_programs, warm_up
from amoeba_jax.errors import RequestError
from amoeba_jax.expert_loads import ExpertLoadReport, read_order
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.model_source import ModelSource
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.decoder import model_specs
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.platform import resolve_dtype, serving_devices
from amoeba_jax.progress import BYTES, COUNT, progress_bar
from amoeba_jax.request_registry import RequestRegistry
from amoeba_jax.shorten import shorten
from amoeba_jax.stats import EngineStats
from amoeba_jax.tokenizer import Tokenizer, model_eos_ids
from amoeba_jax.transform.options import (
    ChangeOrder,
    PlacementKind,
    PlacementModules,
    PlacementOptions,
    RunningRequests,
    TransformOptions,
)
from amoeba_jax.transform.report import PlacementReport, TransformReport, TransformVariant
from amoeba_jax.views import ExecutableInfo, InstanceStatus, MemoryReport
from amoeba_jax.weights.saving import save
from sharding.mesh import is_lost
from sharding.placement import Placement

P = TypeVar("P", bound=SchedulerHook)


class EngineHandle:
    """Base of `LLM`: all methods that do not generate text."""

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
            model_config = ModelConfig.from_hf(source.hf_config).for_context(self.config.max_model_len)
            devices = serving_devices(self.config.num_devices)
            enable_compile_cache(self.config.compile_cache, self.config.compile_cache_size)
            self.dims = ModelDims(
                config=model_config,
                max_tp=self.config.max_tp,
                page_size=self.config.page_size,
                dtype=resolve_dtype(self.config.dtype, model_config.dtype, devices[0].platform),
                transform_attention=self.config.transform_attention,
                expert_order=read_order(self.config.expert_loads, model_config, self.config.max_tp),
            )
            self.tokenizer = _load_tokenizer(self._directory)
            ends = model_eos_ids(self._directory, source.hf_config)
            ends |= self.tokenizer.eos_token_ids if self.tokenizer else frozenset()
            self.eos_token_ids = frozenset(token for token in ends if token < model_config.vocab_size)
            """End-of-sequence token ids of the model and the tokenizer."""
            sizes = {name: spec.num_bytes(self.dims.dtype) for name, spec in model_specs(self.dims).items()}
            with self._bar("loading weights", sum(sizes.values()), BYTES) as advance:
                open_weights = partial(source.weights, self.dims)
                cluster = Cluster(
                    self.config, self.dims, devices, open_weights, lambda name: advance(sizes[name]), tuple(warmup)
                )
                engine = Engine(cluster)
        finally:
            source.close()
        self._engine = engine
        self._dispatcher = Dispatcher(engine)
        self._finalizer = weakref.finalize(self, self._dispatcher.close)
        self._registry = RequestRegistry(engine, self._dispatcher, self.tokenizer, self.eos_token_ids, self.config.seed)
        if warmup:
            try:
                self.warmup(list(warmup))
            except BaseException:
                self.close()
                raise

    @property
    def num_devices(self) -> int:
        """Number of devices of the engine, including devices that serve no requests at present."""
        return self.config.num_devices

    @property
    def max_model_len(self) -> int:
        """Limit for prompt plus output of a request, in tokens. See `EngineConfig.max_model_len`."""
        return self._engine.max_model_len

    def default_max_tokens(self, num_prompt_tokens: int) -> int:
        """Return the number of tokens that a request may generate if its caller sets no limit.

        The output fills the smallest instance that can hold at least 512 tokens after the prompt. If no instance can
        hold that many, the output fills the largest instance. For example, if three instances can hold 300, 900 and
        4,000 tokens after the prompt, the result is 900.
        """
        return self._engine.default_max_tokens(num_prompt_tokens)

    @property
    def stats(self) -> EngineStats:
        """Totals since the start, such as numbers of steps, tokens, preemptions and compiled programs."""
        return self._with_outputs(self._dispatcher.call(engine_stats, self._engine).result())

    def _with_outputs(self, stats: EngineStats) -> EngineStats:
        return replace(stats, output_backlog=self._dispatcher.outputs.backlog, output_stalls=self._dispatcher.num_held)

    @property
    def instances(self) -> tuple[InstanceStatus, ...]:
        """Current state of all instances."""
        return self._dispatcher.call(instance_views, self._engine).result()

    def placement(self, instance: int = 0) -> Placement:
        """Return the placement of an instance: the devices that compute each layer (docs/placement.md).

        `to_dict()` of the result is a valid `EngineConfig.placement`. Raises `RequestError` if the instance does not
        exist.
        """
        return self._dispatcher.call(lambda: self._engine.cluster.instance(instance).runner.placement).result()

    def memory(self) -> MemoryReport:
        """Return the bytes of weights, KV cache and other buffers on each device.

        A notebook shows the report as a picture.
        """
        return self._dispatcher.call(memory_report, self._engine).result()

    def snapshot(self) -> tuple[tuple[InstanceStatus, ...], MemoryReport, EngineStats]:
        """Return `instances`, `memory()` and `stats`, all read at the same moment between two steps."""

        def read() -> tuple[tuple[InstanceStatus, ...], MemoryReport, EngineStats]:
            return instance_views(self._engine), memory_report(self._engine), engine_stats(self._engine)

        instances, memory, stats = self._dispatcher.call(read).result()
        return instances, memory, self._with_outputs(stats)

    def expert_loads(self) -> ExpertLoadReport:
        """Return the number of tokens that each expert has computed, and how unevenly the ranks are loaded.

        Waits for the steps in flight. Raises `RequestError` if the model has no experts.
        """
        loads = self._engine.cluster.factory.hidden.loads
        if loads is None:
            raise RequestError(f"{self.name} has no experts")
        for _ in range(2):  # the first round may find buffers that an earlier call has replaced
            while waiting := self._dispatcher.call(loads.collect).result():
                for array in waiting:
                    is_lost(array)  # waits for its step
        return self._dispatcher.call(expert_load_report, self._engine).result()

    def transform(
        self,
        tensor_parallel_size: int,
        devices: list[int] | None = None,
        variant: str = TransformVariant.IN_PLACE_OVERLAPPED,
        release_weights: bool = True,
        layers_per_step: int | Literal["auto"] = "auto",
        wait_for_programs: bool = True,
        running: RunningRequests = "migrate",
        order: ChangeOrder = "layer",
        attention_degree: int | None = None,
    ) -> TransformReport:
        """Merge or split instances while requests run. Return a report when the transformation is done.

        No running request is lost. Requests generate tokens during the transformation, and new requests start on any
        instance that has room. If a device runs out of pages, some requests lose their pages and are computed again.

        With `running="pause"`, the requests of the merging instances stop after the steps in flight, and keep their
        pages. The merged instance serves other requests with the free pages. A transformation back to the earlier
        degree resumes the paused requests on the devices that hold their pages. If a request needs more pages than are
        free, the merged instance first evicts cached prefixes. After that, it evicts paused requests with the same or a
        lower priority than this request. The evicted requests are computed again later.

        Args:
            tensor_parallel_size: degree of the instances afterwards.
            devices: indices of the devices to change. The devices must form whole instances, and whole aligned groups
                of the new degree. Default: all devices.
            variant: name of the method, a `TransformVariant`.
            release_weights: whether the FFN weights that a rank no longer needs after a merge become KV cache. If
                False, all weights stay, and the merged instance can cache as many tokens as the merging instances
                together. A split always restores the weights. An instance that already has the degree does not change.
                To release or restore the weights of this instance, split and merge it.
            layers_per_step: number of layers to switch between two steps, rounded up to whole segments
                (`EngineConfig.segment_layers`). `"auto"`: one segment. If no request runs, all layers switch at once.
            wait_for_programs: whether to wait for programs that `warmup(background=True)` is still compiling. Requests
                run as before during the wait. False: raise `ProgramsNotReadyError` instead of waiting.
            running: treatment of running requests. `"migrate"`: the requests continue on the new instances. `"pause"`:
                the requests pause until the merged instance splits, as explained above. `"pause"` requires
                `release_weights=False`. `"wait"`: the transformation starts when the running requests have ended. Until
                then, no other request starts on the devices that change.
            order: `"layer"`: each layer changes as a whole. `"memory_first"`: in a merge, the FFN weights of all layers
                become KV cache before the first page moves, so requests get more pages earlier. In a split, the FFN
                weights return after the last page has moved. During a `"memory_first"` change, steps take longer,
                because every layer exchanges hidden states twice. A warm-up does not compile the programs of
                `"memory_first"`. If no weights are released or restored, both orders have the same effect.
            attention_degree: degree of the attention, a power of two. Default: `tensor_parallel_size`. A smaller degree
                gives the instances data-parallel attention: each part of `attention_degree` devices computes the
                attention of its own requests, and all devices together compute the FFNs or experts.

        Raises:
            LayoutError: the devices cannot form instances of this degree.
            RequestError: requests would not fit, or the devices are being transformed. Nothing was changed.
            MemoryBudgetError: a device has too little memory. Nothing was changed.
            ProgramsNotReadyError: programs are still being compiled, and `wait_for_programs` is False. Nothing was
                changed.
            NotCompiledError: programs are missing, and `strict_compile` is set. Nothing was changed.
            TransformError: the transformation failed after it started. The message describes the result.
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
        if order not in get_args(ChangeOrder):
            known = ", ".join(get_args(ChangeOrder))
            raise RequestError(f"order={shorten(order)} is not known: it must be one of {known}")
        if layers_per_step != "auto" and not is_count:
            raise RequestError(f"layers_per_step={shorten(layers_per_step)} must be a positive integer, or 'auto'")
        chosen = tuple(range(self.config.num_devices)) if devices is None else tuple(devices)
        options = TransformOptions(
            tensor_parallel_size, chosen, how, release_weights, layers_per_step, running, order, attention_degree
        )
        return self._dispatcher.call(self._engine.transform, options, wait_for_programs).result().result()

    def replicate(
        self, layers: range, device: int, instance: int = 0, modules: PlacementModules = "layer"
    ) -> PlacementReport:
        """Let a further device compute layers of an instance while requests run.

        Return a report when the change is done. The sequences of the instance are divided into microbatches (shares),
        one for each device that computes the replicated layers. No request is lost or computed again.

        If the device serves another instance, the device already has the weights of these layers. The replicated layers
        then use KV pages of the other instance. Any other device gets a copy of the weights.

        Only layers at tensor-parallel degree 1 can be replicated. Split an instance of a higher degree first. An
        instance with replicas cannot merge. Call `evict` before a merge. docs/placement.md has examples.

        Args:
            layers: layers to replicate, such as `range(5, 15)`.
            device: index of the device.
            instance: id of the instance.
            modules: modules of these layers: `"layer"`, `"attention"` (with the KV cache) or `"ffn"`.

        Raises:
            LayoutError: the layers or devices are not possible.
            RequestError: another change is in progress, or requests do not fit. Nothing was changed.
            MemoryBudgetError: the device has too little memory. Nothing was changed.
            NotCompiledError: programs are missing, and `strict_compile` is set. Nothing was changed.
            TransformError: the change failed after it began. Layers that had switched stay on their new devices.
        """
        return self._change_placement("replicate", device, instance, layers, modules)

    def evict(
        self, layers: range, device: int, instance: int = 0, modules: PlacementModules = "layer"
    ) -> PlacementReport:
        """Remove copies of layers from a device while requests run. Return a report when the change is done.

        This is the reverse of `replicate`, with the same arguments and errors. The memory of the copies is free
        afterwards. Weights that another instance uses stay on the device.
        """
        return self._change_placement("evict", device, instance, layers, modules)

    def migrate(
        self,
        layers: range,
        device: int,
        instance: int = 0,
        modules: PlacementModules = "layer",
        move_kv: bool = True,
    ) -> PlacementReport:
        """Move layers of an instance to another device while requests run. Return a report when the change is done.

        The old device drops the weights and KV cache of these layers. The freed memory becomes KV cache of the layers
        that stay on the old device. The embedding and the output projection stay on the old device.

        Errors and all arguments except `modules` and `move_kv` are the same as for `replicate`.

        Args:
            modules: modules to move: `"layer"`, `"attention"` (with its KV cache), `"ffn"` or `"kv"`. `"kv"` moves the
                same modules as `"attention"`, but the old device keeps a copy of the attention weights. A later move
                back then copies no weights.
            move_kv: whether attention and KV cache move. False: only the FFNs move, and `modules` must be `"layer"`.
        """
        return self._change_placement("migrate", device, instance, layers, modules, move_kv)

    def scale_out(self, device: int, instance: int = 0) -> PlacementReport:
        """Replicate all layers of an instance on an empty device. The copy then becomes a separate instance.

        As soon as the device has a layer, it computes this layer for a share of the requests. When the device has all
        layers, the requests of this share move to the new instance. The errors are the same as for `replicate`.
        """
        return self._change_placement("scale_out", device, instance)

    def scale_in(self, device: int, instance: int = 0) -> PlacementReport:
        """End the instance on a device. Another instance takes over its sequences, and the device is empty afterwards.

        The errors are the same as for `replicate`.

        Args:
            device: device of the instance that ends.
            instance: id of the instance that takes over the sequences.
        """
        return self._change_placement("scale_in", device, instance)

    def _change_placement(
        self,
        kind: PlacementKind,
        device: int,
        instance: int,
        layers: range | None = None,
        modules: PlacementModules = "layer",
        move_kv: bool = True,
    ) -> PlacementReport:
        if modules not in get_args(PlacementModules):
            known = ", ".join(get_args(PlacementModules))
            raise RequestError(f"modules={shorten(modules)} is not known: it must be one of {known}")
        if layers is not None and not isinstance(layers, range):
            raise RequestError(f"layers={shorten(layers)} must be a range, such as range(5, 15)")
        for name, value in (("device", device), ("instance", instance)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise RequestError(f"{name}={shorten(value)} must be an integer")
        options = PlacementOptions(kind, device, instance, layers, modules, move_kv)
        return self._dispatcher.call(self._engine.changes.request, options).result().result()

    def set_layout(self, tensor_parallel_size: int) -> float:
        """Regroup all devices into instances of one tensor-parallel degree while no request runs.

        Return the duration of the change in seconds. Raises `RequestError` if a request is waiting or running.
        """
        return self._dispatcher.call(self._engine.set_layout, tensor_parallel_size).result()

    def warmup(self, tensor_parallel_sizes: list[int] | None = None, *, background: bool = False) -> int:
        """Compile the programs of the given tensor-parallel degrees and of transformations between these degrees.

        Missing programs are compiled, or loaded from the cache on disk. Without `background`, each program then runs
        once. Return the number of missing programs. No instance changes its degree. After a warm-up of all degrees,
        requests do not wait for compilations. `stats.late_programs` counts the programs that a warm-up has missed.

        Args:
            tensor_parallel_sizes: degrees to prepare. Default: the current degrees.
            background: whether to return at once and compile at a low priority while requests run. `stats.degrees`
                shows the progress.

        Raises:
            RequestError: requests are waiting or running, and `background` is False.
            MemoryBudgetError: temporaries of the programs do not fit in the memory budget.
        """
        engine = self._engine
        degrees = tensor_parallel_sizes or sorted({instance.tp for instance in engine.instances})
        if background:
            return self._dispatcher.call(engine.background_warmup.begin, degrees).result()
        count = self._dispatcher.call(count_programs, engine, degrees).result()
        with self._bar("compiling and running programs", 2 * count) as advance:
            return self._dispatcher.call(warm_up, engine, degrees, advance).result()

    def executables(self) -> tuple[ExecutableInfo, ...]:
        """Return a description of each compiled program, with its memory and compile time."""
        return self._dispatcher.call(executable_infos, self._engine).result()

    def save(self, directory: str | Path) -> None:
        """Save the model to a directory. `LLM(directory)` loads it again, with any degrees."""
        weights = self._engine.cluster.weights
        self._dispatcher.call(save, Path(directory), weights, self._hf_config, self._directory).result()

    def use_scheduler_hook(self, make: Callable[[Engine], P]) -> P:
        """Install a scheduler and return it. A scheduler decides where requests run and when instances change.

        The engine's own thread calls `make(engine)` to create the scheduler. After that, the engine also accepts
        requests that are too large for every current instance, because the scheduler can merge instances.
        """

        def install() -> P:
            self._engine.scheduler_hook = hook = make(self._engine)
            return hook

        return self._dispatcher.call(install).result()

    def remove_scheduler_hook(self) -> None:
        """Remove the scheduler that `use_scheduler_hook` installed.

        Call this only while no request is waiting. A waiting request that needs a merge of instances would wait
        forever.
        """

        def remove() -> None:
            self._engine.scheduler_hook = None

        self._dispatcher.call(remove).result()

    def close(self) -> None:
        """Abort all requests and free the device memory. Further calls of `close` do nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _bar(
        self, description: str, total: int, amount: tuple[type[ProgressColumn], ...] = COUNT
    ) -> AbstractContextManager[Callable[..., None]]:
        return progress_bar(description, total, amount=amount, shown=self._progress)


def _load_tokenizer(directory: Path | None) -> Tokenizer | None:
    """Return the tokenizer of a model directory.

    Return None if the directory has no tokenizer.json. Prompts must then be token ids.
    """
    if directory is None or not (directory / "tokenizer.json").exists():
        return None
    return Tokenizer.from_directory(directory)
