"""The registry of compiled steps."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from amoeba_jax.engine.program import Program, StepKey, compile_step
from amoeba_jax.engine.sampler import sample_packed
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.models.dims import ModelDims
from sharding.mesh import SubMesh

Request = tuple[StepKey, SegmentPlan, SubMesh]


class Executables:
    """Holds one program for each key. Segments of equal shape share it, whatever layers they are."""

    def __init__(self, dims: ModelDims):
        self._dims = dims
        self._programs: dict[StepKey, Program] = {}
        self._samplers: dict[tuple[jax.Device, tuple[int, ...]], jax.stages.Compiled] = {}

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(self._programs.values())

    def step(self, key: StepKey, plan: SegmentPlan, group: SubMesh) -> Program:
        """The program of `key`, compiled on first use if `prepare` did not."""
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = compile_step(self._dims, plan, key, group)
        return program

    def sampler(self, device: jax.Device, shape: tuple[int, ...]) -> jax.stages.Compiled:
        """The program that draws tokens from logits of this shape (`[R, V]`) on a device."""
        key = (device, shape)
        if key not in self._samplers:
            logits, settings = (
                jax.ShapeDtypeStruct(shape, jnp.float32),
                jax.ShapeDtypeStruct((6, shape[0]), jnp.int32),
            )
            here = SingleDeviceSharding(device)
            jitted = jax.jit(sample_packed, in_shardings=here, out_shardings=here)
            self._samplers[key] = jitted.lower(logits, settings).compile()
        return self._samplers[key]

    def __len__(self) -> int:
        return len(self._programs) + len(self._samplers)

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
                self._programs[program.key] = program
                on_program()
