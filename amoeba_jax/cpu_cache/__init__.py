"""Workarounds for XLA on CPU. They use private parts of JAX.

- `PortableProgram` loads a compiled program on other devices than the devices of its compilation.
- `ProgramStore` evicts programs before the process runs out of memory mappings.
- Compile options make compilation or steps faster.

On GPU and TPU, `compile_or_load` compiles a program through JAX's persistent cache and does nothing else.
"""

from amoeba_jax.cpu_cache.compile_options import Options, few_kernels, step_options
from amoeba_jax.cpu_cache.loading import Obtained, compile_or_load
from amoeba_jax.cpu_cache.program_store import ProgramStore
from amoeba_jax.cpu_cache.relocation import PortableProgram

__all__ = [
    "Obtained",
    "Options",
    "PortableProgram",
    "ProgramStore",
    "compile_or_load",
    "few_kernels",
    "step_options",
]
