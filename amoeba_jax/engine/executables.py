"""The registry of compiled steps."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from amoeba_jax.engine.program import Program, StepKey, compile_step
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.models.dims import ModelDims
from sharding.mesh import SubMesh

Request = tuple[StepKey, SegmentPlan, SubMesh]


class Executables:
    """Holds one program for each key. Segments of equal shape share it, whatever layers they are."""

    def __init__(self, dims: ModelDims):
        self._dims = dims
        self._programs: dict[StepKey, Program] = {}

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(self._programs.values())

    def get(self, key: StepKey, plan: SegmentPlan, group: SubMesh) -> Program:
        """The program of `key`, compiled on first use if `prepare` did not."""
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = compile_step(self._dims, plan, key, group)
        return program

    def prepare(self, requests: Iterable[Request], on_compiled: Callable[[Program], None], jobs: int = 2) -> None:
        """Compile what is missing, `jobs` at a time (XLA releases the GIL). Reports each program when it is done."""
        missing = {key: (key, plan, group) for key, plan, group in requests if key not in self._programs}

        def build(request: Request) -> Program:
            key, plan, group = request
            return compile_step(self._dims, plan, key, group)

        with ThreadPoolExecutor(jobs, thread_name_prefix="amoeba-compile") as threads:
            for program in threads.map(build, missing.values()):
                self._programs[program.key] = program
                on_compiled(program)
