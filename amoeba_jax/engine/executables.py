"""The registry of compiled programs."""

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from amoeba_jax.engine import sampler
from amoeba_jax.engine.page_copy import compile_page_copy
from amoeba_jax.engine.program import Program, StepKey, compile_step
from amoeba_jax.engine.program_store import ProgramStore
from amoeba_jax.engine.restore import compile_restore
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.models.dims import ModelDims
from kvcache.copying import compile_defragment, compile_migrate
from kvcache.exchange import compile_exchange
from sharding.mesh import SubMesh
from sharding.release import ReleasedChunk

Request = tuple[StepKey, SegmentPlan, SubMesh]
_I32, _F32 = jnp.int32, jnp.float32


class Executables:
    """Holds one program for each key, compiled on first use or ahead of time by `prepare`.

    Segments of equal shape share a program, whatever layers they are. Logits are `[V, R]` everywhere here.
    """

    def __init__(self, dims: ModelDims):
        self._dims = dims
        self._programs: ProgramStore[Program] = ProgramStore()
        self._others: ProgramStore[jax.stages.Compiled] = ProgramStore()

    @property
    def programs(self) -> tuple[Program, ...]:
        """Compiled steps."""
        return tuple(self._programs)

    def step(self, key: StepKey, plan: SegmentPlan, group: SubMesh) -> Program:
        """The program of `key`."""
        return self._programs.get(key, lambda: compile_step(self._dims, plan, key, group))

    def draw(self, device: jax.Device, logits: tuple[int, ...], num_slots: int, packed: int) -> jax.stages.Compiled:
        """`sampler.draw` for logits of this shape and settings of this size."""

        shapes = [(logits, _F32), ((num_slots,), _I32), ((packed,), _I32)]
        return self._get(("draw", device, logits, packed), device, sampler.draw, shapes)

    def draw_full(
        self, device: jax.Device, logits: tuple[int, ...], num_slots: int, packed: int
    ) -> jax.stages.Compiled:
        """`sampler.draw_full` for logits of this shape and settings of this size. Donates `flags`."""
        state = (num_slots, logits[0])
        shapes = [(logits, _F32), ((num_slots,), _I32), (state, _I32), (state, _F32), ((packed,), _I32)]
        return self._get(("draw_full", device, logits, packed), device, sampler.draw_full, shapes, donate=(2,))

    def set_state(self, device: jax.Device, state: tuple[int, ...]) -> jax.stages.Compiled:
        """`sampler.set_state` for `flags` and `bias` of this shape. Donates both."""
        row = state[1:]
        shapes = [(state, _I32), (state, _F32), ((), _I32), (row, _I32), (row, _F32)]
        return self._get(("set_state", device, state), device, sampler.set_state, shapes, donate=(0, 1))

    def token_logprobs(self, device: jax.Device, logits: tuple[int, ...]) -> jax.stages.Compiled:
        """`sampler.token_logprobs` for logits of this shape and as many targets."""

        shapes = [(logits, _F32), (logits[1:], _I32)]
        return self._get(("token_logprobs", device, logits), device, sampler.token_logprobs, shapes)

    def take_column(self, device: jax.Device, logits: tuple[int, ...]) -> jax.stages.Compiled:
        """`(logits, index) -> logits[:, index]`, as one column."""

        def take_column(logits: jax.Array, index: jax.Array):
            return lax.dynamic_slice_in_dim(logits, index, 1, axis=1)

        return self._get(("take_column", device, logits), device, take_column, [(logits, _F32), ((), _I32)])

    def page_copy(self, group: SubMesh, extent_pages: tuple[int, ...], num_layers: int) -> jax.stages.Compiled:
        """`compile_page_copy` for extents of so many pages in each layer."""
        key = ("page_copy", group.device_indices, extent_pages, num_layers)
        return self._others.get(key, lambda: compile_page_copy(self._dims, group, extent_pages, num_layers))

    def exchange(
        self,
        dims: ModelDims,
        group: SubMesh,
        old_extents: tuple[int, ...],
        new_extents: tuple[int, ...],
        phase_pieces: int,
    ) -> jax.stages.Compiled:
        """`compile_exchange` for one layer."""
        key = ("exchange", group.device_indices, old_extents, new_extents, phase_pieces)
        dtype = jnp.dtype(dims.dtype)
        return self._others.get(
            key, lambda: compile_exchange(dims.pages, dtype, group, old_extents, new_extents, 1, phase_pieces)
        )

    def migrate(
        self, dims: ModelDims, group: SubMesh, extents: tuple[int, ...], num_pieces: int
    ) -> jax.stages.Compiled:
        """`compile_migrate`."""
        key = ("migrate", group.device_indices, extents, num_pieces)
        dtype = jnp.dtype(dims.dtype)
        return self._others.get(key, lambda: compile_migrate(dims.pages, dtype, group, extents, num_pieces))

    def defragment(
        self,
        dims: ModelDims,
        group: SubMesh,
        old_extents: tuple[int, ...],
        new_extents: tuple[int, ...],
        num_pieces: int,
    ) -> jax.stages.Compiled:
        """`compile_defragment`."""
        key = ("defragment", group.device_indices, old_extents, new_extents, num_pieces)
        dtype = jnp.dtype(dims.dtype)
        return self._others.get(
            key, lambda: compile_defragment(dims.pages, dtype, group, old_extents, new_extents, num_pieces)
        )

    def restore(self, group: SubMesh, released: ReleasedChunk, dims: ModelDims, step_pages: int) -> jax.stages.Compiled:
        """`compile_restore` for a chunk; those of other layers, and others that peers trade alike, share it."""
        places = tuple(released.chunks[device % dims.max_tp] for device in group.device_indices)
        key = ("restore", group.device_indices, released.spec.stored_shape, places, step_pages)
        dtype = jnp.dtype(dims.dtype)
        return self._others.get(key, lambda: compile_restore(released, dims.max_tp, dtype, group, step_pages))

    def mapped(
        self,
        name: Hashable,
        group: SubMesh,
        function: Callable[[jax.Array], jax.Array],
        shape: tuple[int, ...],
        spec: P,
        result: P,
        dtype: str,
    ) -> jax.stages.Compiled:
        """A function of one array under `shard_map` over a group."""
        key = (name, group.device_indices, shape, dtype)

        def make() -> jax.stages.Compiled:
            run = jax.shard_map(function, mesh=group.mesh, in_specs=spec, out_specs=result, check_vma=False)
            inputs, outputs = NamedSharding(group.mesh, spec), NamedSharding(group.mesh, result)
            jitted = jax.jit(run, in_shardings=inputs, out_shardings=outputs)
            return jitted.lower(jax.ShapeDtypeStruct(shape, dtype)).compile()

        return self._others.get(key, make)

    def _get(
        self,
        key: Hashable,
        device: jax.Device,
        function: Callable[..., Any],
        arguments: list[tuple[tuple[int, ...], Any]],
        donate: tuple[int, ...] = (),
    ) -> jax.stages.Compiled:
        """A program on one device, compiled if there is none of this key yet."""

        def make() -> jax.stages.Compiled:
            here = SingleDeviceSharding(device)
            jitted = jax.jit(function, in_shardings=here, out_shardings=here, donate_argnums=donate, keep_unused=True)
            abstract = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arguments]
            return jitted.lower(*abstract).compile()

        return self._others.get(key, make)

    @property
    def num_made(self) -> int:
        """Programs that were compiled, or loaded from the compile cache, so far."""
        return self._programs.num_added + self._others.num_added

    def prepare(self, requests: Iterable[Request], on_program: Callable[[], None], jobs: int = 2) -> None:
        """Compile what is missing, `jobs` at a time (XLA releases the GIL). Reports each program when it is done."""
        wanted = {key: (key, plan, group) for key, plan, group in requests}
        missing = {key: request for key, request in wanted.items() if key not in self._programs}
        for _ in range(len(wanted) - len(missing)):
            on_program()

        def build(request: Request) -> Program:
            key, plan, group = request
            return compile_step(self._dims, plan, key, group)

        with ThreadPoolExecutor(jobs, thread_name_prefix="amoeba-compile") as threads:
            for program in threads.map(build, missing.values()):
                self._programs.add(program.key, program)
                on_program()
