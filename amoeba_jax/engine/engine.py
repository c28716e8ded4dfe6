"""Instances, their requests, and the step that moves all of them forward."""

import time
from collections import deque
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from amoeba_jax.config import EngineConfig
from amoeba_jax.engine.batch import BatchShape
from amoeba_jax.engine.executables import Executables
from amoeba_jax.engine.instance import Instance
from amoeba_jax.engine.memory import plan_memory
from amoeba_jax.engine.sequence import Sequence
from amoeba_jax.engine.weights import LoadChunks, WeightStore
from amoeba_jax.errors import RequestError
from amoeba_jax.models.decoder import plan_segments
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.sampling_params import SamplingParams
from kvcache.allocator import BuddyAllocator
from kvcache.pages import PagePool, SequencePages
from sharding.ledger import Ledger
from sharding.mesh import SubMeshPool, assemble, disassemble

# Prompts shorter than this are padded up to it: fewer executables, and a step this small costs the same anyway.
MIN_PREFILL_BUCKET = 16


class Engine:
    """Everything behind the API, driven by one thread: `step` and all other methods run in the dispatcher thread.

    Construction loads the weights. `on_load(name)` is called after each parameter.
    """

    def __init__(
        self,
        config: EngineConfig,
        dims: ModelDims,
        devices: tuple[jax.Device, ...],
        load_chunks: LoadChunks,
        after_layer: Callable[[], None],
        on_load: Callable[[str], None],
    ):
        self.config = config
        self.dims = dims
        self.sub_meshes = SubMeshPool(devices, config.max_tp)
        self.weights = WeightStore(dims, devices)
        self.memory_plan = plan_memory(dims, config, self.weights.num_bytes, devices[0])
        self.ledgers = [Ledger(self.memory_plan.budget_bytes) for _ in devices]
        for name in self.weights.load(load_chunks, self.ledgers, after_layer):
            on_load(name)
        self.allocators = [BuddyAllocator(dims.max_tp) for _ in devices]
        self.plans = plan_segments(dims, config.segment_layers)
        self.executables = Executables(dims)
        self.waiting: deque[Sequence] = deque()
        self.instances: tuple[Instance, ...] = ()
        kv = self._allocate_kv()
        self._build_instances(config.tensor_parallel_size, kv)
        capacity = max(self.capacity_tokens(tp) for tp in self.sub_meshes.degrees())
        self.max_model_len = min(config.max_model_len or dims.config.max_position, capacity)
        self.table_width = dims.pages.pages_for(self.max_model_len)
        for ledger in self.ledgers:
            ledger.reserve("activations", self.memory_plan.activation_bytes)

    def _allocate_kv(self) -> list[list[list[jax.Array]]]:
        """Zeroed base extents, `kv[device][layer]` a list of extents."""
        plan, dims = self.memory_plan, self.dims
        kv = []
        for device, allocator, ledger in zip(self.sub_meshes.devices, self.allocators, self.ledgers, strict=True):
            layers = []
            for layer in range(dims.config.num_layers):
                ledger.add("kv cache", plan.num_pages * plan.page_bytes, layer)
                shape = (plan.num_pages, dims.pages.page_elems)
                layers.append([jnp.zeros(shape, dims.dtype, device=device)])
            allocator.add_extent(plan.num_pages)
            kv.append(layers)
        return kv

    def _build_instances(self, tp: int, kv: list[list[list[jax.Array]]]) -> None:
        """Instances of degree `tp` over all devices. `kv[device][layer]` are single-device extents."""
        instances = []
        for group in self.sub_meshes.groups(tp):
            buffers = [kv[device] for device in group.device_indices]
            layers = [
                [assemble(group, extents) for extents in zip(*per_rank, strict=True)]
                for per_rank in zip(*buffers, strict=True)
            ]
            pool = PagePool(self.dims.pages, [self.allocators[device] for device in group.device_indices], tp)
            instances.append(Instance(group, pool, layers, self.plans, self.weights, self.executables))
        self.instances = tuple(instances)
        self.tensor_parallel_size = tp

    def set_layout(self, tp: int) -> float:
        """Rebuild all instances at degree `tp` over the same buffers; returns the seconds it took.

        Nothing is copied or loaded. Raises `RequestError` while requests are waiting or running.
        """
        self.sub_meshes.check_degree(tp)
        if self.has_work:
            running = sum(len(instance.running) for instance in self.instances)
            raise RequestError(
                f"the layout cannot change with {running} running and {len(self.waiting)} waiting requests: "
                "wait for them to finish"
            )
        start = time.perf_counter()
        kv: list[list[list[jax.Array]]] = [[] for _ in self.sub_meshes.devices]
        for instance in self.instances:
            for extents in instance.kv:
                split = [disassemble(instance.group, extent) for extent in extents]
                for rank, device in enumerate(instance.group.device_indices):
                    kv[device].append([buffers[rank] for buffers in split])
        self._build_instances(tp, kv)
        return time.perf_counter() - start

    def capacity_tokens(self, tp: int) -> int:
        """Tokens that the KV cache of one instance of degree `tp` holds when empty."""
        return self.memory_plan.num_pages * tp * self.dims.page_size

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or any(instance.running for instance in self.instances)

    # Executables

    def prefill_shape(self, length: int) -> BatchShape:
        """Bucket for the next chunk of a prompt with `length` tokens left."""
        length = min(length, self.config.max_num_batched_tokens)
        minimum = min(MIN_PREFILL_BUCKET, self.config.max_num_batched_tokens)
        return BatchShape(((1, max(_next_power_of_two(length), minimum)),), self.table_width)

    def decode_shape(self, num_sequences: int) -> BatchShape:
        """Bucket for a decode step of so many sequences."""
        return BatchShape(((_next_power_of_two(num_sequences), 1),), self.table_width)

    def buckets(self) -> list[BatchShape]:
        """Every step shape that serving can need."""
        top = self.config.max_num_batched_tokens
        prefill = {self.prefill_shape(1 << power) for power in range(top.bit_length())}
        decode = {self.decode_shape(1 << power) for power in range(self.config.max_num_seqs.bit_length())}
        return sorted(prefill | decode, key=lambda shape: shape.groups)

    def count_programs(self, degrees: list[int]) -> int:
        """Programs that `warmup` of these degrees goes through."""
        segments = len({plan.shape for plan in self.plans})
        groups = sum(len(self.sub_meshes.groups(tp)) for tp in degrees)
        return groups * (len(self.buckets()) * segments + len(self._sampler_rows()))

    def warmup(self, degrees: list[int], on_program: Callable[[], None]) -> int:
        """Compile what serving at these degrees can need, ahead of time; returns how many programs were missing.

        Raises `RequestError` while requests are waiting or running, `MemoryBudgetError` if the programs' temporaries
        do not fit the device's budget.
        """
        present, before = self.tensor_parallel_size, len(self.executables)
        try:
            for tp in degrees:
                self.set_layout(tp)
                self._compile_layout(on_program)
        finally:
            if self.tensor_parallel_size != present:
                self.set_layout(present)
        return len(self.executables) - before

    def _compile_layout(self, on_program: Callable[[], None]) -> None:
        requests = [
            (key, plan, instance.group)
            for instance in self.instances
            for shape in self.buckets()
            for key, plan in zip(instance.step_keys(shape), self.plans, strict=True)
        ]
        self.executables.prepare(requests, on_program)
        for instance in self.instances:
            for rows in self._sampler_rows():
                self.executables.sampler(instance.group.devices[0], (rows, self.dims.config.vocab_size))
                on_program()
        self._reserve_activations()

    def _sampler_rows(self) -> list[int]:
        return sorted({shape.num_rows for shape in self.buckets()})

    def _reserve_activations(self) -> None:
        measured = max((program.temp_bytes for program in self.executables.programs), default=0)
        for ledger in self.ledgers:
            ledger.reserve("activations", max(measured, self.memory_plan.activation_bytes))

    # Requests

    def check_request(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise `RequestError` for a request that no instance of the present layout can hold."""
        total = num_prompt_tokens + max_tokens
        limit = min(self.max_model_len, self.capacity_tokens(self.tensor_parallel_size))
        if total > limit:
            raise RequestError(
                f"prompt of {num_prompt_tokens} tokens plus max_tokens={max_tokens} is {total} tokens, over the "
                f"limit of {limit}: the model's context is {self.max_model_len} and the KV cache of a "
                f"TP{self.tensor_parallel_size} instance holds {self.capacity_tokens(self.tensor_parallel_size)}"
            )

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue requests, all or none: raises `RequestError` as `check_request` does."""
        for sequence in sequences:
            self.check_request(len(sequence.prompt), sequence.params.max_tokens)
        self.waiting.extend(sequences)

    def abort(self, request_ids: set[int]) -> None:
        """End requests early; their pages are free afterwards. Unknown or finished ids are ignored."""
        for sequence in [s for s in self.waiting if s.request_id in request_ids]:
            self.waiting.remove(sequence)
            self._finish_early(sequence)
        for instance in self.instances:
            for sequence in [s for s in instance.running if s.request_id in request_ids]:
                self._finish_early(sequence)
                self._retire(instance, sequence)

    def _finish_early(self, sequence: Sequence) -> None:
        sequence.finish_reason = "abort"
        sequence.finished_at = time.monotonic()
        sequence.on_token(sequence)

    def step(self) -> None:
        """Admit what fits, launch one step on every instance that has work, then take in the tokens."""
        self._admit()
        launched = [(instance, *self._launch(instance)) for instance in self.instances if instance.running]
        for instance, sequences, tokens in launched:
            for sequence, token in zip(sequences, np.asarray(tokens)[: len(sequences)].tolist(), strict=True):
                if sequence.in_prefill:
                    continue  # a chunk in mid-prompt: what its last position predicts is known already
                sequence.append(token)
                sequence.on_token(sequence)
                if sequence.finished:
                    self._retire(instance, sequence)

    def _admit(self) -> None:
        """Give waiting requests, in order, to the instance with most free pages; all their pages at once."""
        while self.waiting:
            sequence = self.waiting[0]
            need = self.dims.pages.pages_for(sequence.max_tokens)
            open_instances = [i for i in self.instances if len(i.running) < self.config.max_num_seqs]
            best = max(open_instances, key=lambda i: (i.pages.num_free_pages, -i.id), default=None)
            if best is None or best.pages.num_free_pages < need:
                return
            self.waiting.popleft()
            sequence.pages = SequencePages(best.pages)
            sequence.pages.reserve(sequence.max_tokens)
            sequence.started_at = time.monotonic()
            best.running.append(sequence)

    def _launch(self, instance: Instance) -> tuple[list[Sequence], jax.Array]:
        """A chunk of the first unfinished prompt if there is one, else a decode step of all running sequences."""
        for sequence in instance.running:
            if sequence.in_prefill:
                left = len(sequence.prompt) - sequence.num_computed
                shape = self.prefill_shape(left)
                length = min(left, shape.num_tokens)
                result = instance.launch(instance.prefill_batch(shape, sequence, length))
                sequence.num_computed += length
                return [sequence], instance.next_tokens(result, [sequence])
        sequences = list(instance.running)
        result = instance.launch(instance.decode_batch(self.decode_shape(len(sequences)), sequences))
        for sequence in sequences:
            sequence.num_computed += 1
        return sequences, instance.next_tokens(result, sequences)

    def _retire(self, instance: Instance, sequence: Sequence) -> None:
        instance.running.remove(sequence)
        if sequence.pages is not None:
            sequence.pages.release()
            sequence.pages = None

    def fail(self, error: BaseException) -> None:
        """End every request with an error: a step failed, and the donated cache with it."""
        sequences = [*self.waiting, *(s for instance in self.instances for s in instance.running)]
        self.waiting.clear()
        for instance in self.instances:
            instance.running.clear()
        for sequence in sequences:
            sequence.error = error
            sequence.finished_at = time.monotonic()
            sequence.on_token(sequence)

    def logits(self, tokens: tuple[int, ...], decode_from: int) -> np.ndarray:
        """f32 logits `[len, V]` at every position: chunked prefill up to `decode_from`, then token by token.

        Raises `RequestError` if the sequence is too long, or running requests leave too few pages.
        """
        self.check_request(len(tokens), 0)
        instance = max(self.instances, key=lambda i: (i.pages.num_free_pages, -i.id))
        if (need := self.dims.pages.pages_for(len(tokens))) > instance.pages.num_free_pages:
            raise RequestError(
                f"logits of {len(tokens)} tokens need {need} KV pages, and running requests leave "
                f"{instance.pages.num_free_pages}: wait for them to finish"
            )
        sequence = Sequence(-1, tokens, SamplingParams(max_tokens=1), 0, lambda _: None)
        sequence.pages = SequencePages(instance.pages)
        sequence.pages.reserve(len(tokens))
        rows = []
        try:
            while sequence.num_computed < len(tokens):
                start = sequence.num_computed
                shape = self.prefill_shape(decode_from - start) if start < decode_from else self.decode_shape(1)
                length = min(shape.num_tokens, decode_from - start) if start < decode_from else 1
                batch = instance.prefill_batch(shape, sequence, length)
                rows.append(np.asarray(instance.launch(batch, "all").logits)[:length])
                sequence.num_computed += length
        finally:
            sequence.pages.release()
        return np.concatenate(rows)

    def close(self) -> None:
        """Drop every device buffer."""
        for instance in self.instances:
            instance.release()
        self.instances = ()
        self.weights.release()


def _next_power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()
